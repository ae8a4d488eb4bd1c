"""Which format the cache has: explicit option > checkpoint's declaration > model's dtype."""

from kv8.errors import UnsupportedModelError
from kv8.formats.base import ALIASES, KVFormat
from kv8.formats.lookup import get_format
from kv8.scales.declaration import CacheDeclaration


def resolve_cache_format(
    option: str, declaration: CacheDeclaration | None, model_dtype: str
) -> tuple[KVFormat, str]:
    """Return the cache's format and what decided it, in words without a full stop.

    Args:
        option: the value of ``kv_cache_dtype``; an alias (``fp8``) becomes its concrete name.
        declaration: what the checkpoint declares, if anything.
        model_dtype: name of the weights' dtype.

    Raises:
        RequestError: ``option`` or ``model_dtype`` is no format kv8 stores.
        UnsupportedModelError: the checkpoint declares a scheme kv8 does not serve. An explicit
            16-bit or 32-bit ``option`` is served all the same: it does not use the scheme.
    """
    if option != "auto":
        return _explicit(option, declaration)
    if declaration is not None:
        _require_served(declaration)
        chosen = get_format(declaration.format, what=declaration.where)
        return chosen, f"the checkpoint declares it ({declaration.where})"
    chosen = get_format(model_dtype, what="the model's dtype")
    return chosen, (
        "the model's dtype: no kv_cache_dtype was given and the checkpoint declares none"
    )


def _explicit(option: str, declaration: CacheDeclaration | None) -> tuple[KVFormat, str]:
    chosen = get_format(option)
    alias = f" (fp8 is short for {chosen.name})" if option in ALIASES else ""
    reason = f"kv_cache_dtype={option} was given{alias}"
    if declaration is None:
        return chosen, reason
    if chosen.quantized:
        _require_served(declaration)
    if chosen.name == declaration.format:
        return chosen, f"{reason}, as the checkpoint declares ({declaration.where})"
    return chosen, f"{reason}, which overrides what the checkpoint declares ({declaration.where})"


def _require_served(declaration: CacheDeclaration) -> None:
    if declaration.refusal:
        raise UnsupportedModelError(
            f"The checkpoint declares a KV cache that kv8 does not serve: {declaration.refusal}. "
            f"An unquantized cache works: give kv_cache_dtype=bfloat16 (--kv-cache-dtype bfloat16)."
        )
