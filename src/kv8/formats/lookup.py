"""From a name a person writes to the format it means; one place, so that it means one thing."""

from collections.abc import Sequence
from difflib import get_close_matches

from kv8.errors import RequestError
from kv8.formats.base import ALIASES, FORMATS, KVFormat

# Dialects of FP8 that look like ours and are not: the same byte stands for half the value, and
# the code of "negative zero" for NaN.
_FOREIGN_SUFFIX = "fnuz"


def get_format(name: str, *, what: str = "kv_cache_dtype", also: Sequence[str] = ()) -> KVFormat:
    """Return the format called ``name``, aliases resolved (``fp8`` is ``fp8_e4m3``).

    Args:
        name: as a person or a configuration file writes it.
        what: what the name was given for, to begin the refusal with.
        also: other words the caller would have taken, for the list of those allowed.

    Raises:
        RequestError: no such format; the message lists those there are.
    """
    concrete = ALIASES.get(name, name)
    if concrete in FORMATS:
        return FORMATS[concrete]
    aliases = (f"{alias} (= {to})" for alias, to in ALIASES.items())
    allowed = ", ".join([*also, *FORMATS, *aliases])
    if name.lower().endswith(_FOREIGN_SUFFIX):
        raise RequestError(
            f"{what}={name!r} is another dialect of FP8: each of its bytes stands for "
            f"half the value kv8's formats give it (exponent bias one higher), and its NaN is "
            f"another byte. kv8 neither reads nor writes it. Convert to fp8_e4m3 or fp8_e5m2: "
            f"keep the bytes and halve the scale where there is no NaN byte (0x80), or quantize "
            f"again. Allowed: {allowed}."
        )
    close = get_close_matches(name.lower(), [*also, *FORMATS, *ALIASES], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise RequestError(f"{what}={name!r} is not known.{hint} Allowed: {allowed}.")
