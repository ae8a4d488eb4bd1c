"""What a checkpoint's configuration files say about its KV cache. Plain JSON, no tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kv8.errors import ModelError
from kv8.formats.base import FP8_E4M3
from kv8.scales.schemes import dict_refusal, quark_refusal, strategy_of, word_refusal
from kv8.scales.validity import Strategy


@dataclass(frozen=True)
class CacheDeclaration:
    """A checkpoint's statement that its KV cache is quantized, and how.

    Attributes:
        producer: the quantization method that wrote it (``compressed-tensors``).
        where: file and field, for messages.
        format: name of the format keys and values are stored in.
        strategy: what a scale is per; `None` if the declaration does not say.
        queries: whether it also declares quantized queries.
        refusal: why kv8 does not serve this scheme, or `None` if it does. An explicit 16-bit
            cache dtype is served all the same.
    """

    producer: str
    where: str
    format: str = FP8_E4M3.name
    strategy: Strategy | None = "tensor"
    queries: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class Section:
    """The part of a configuration file that describes quantization.

    Attributes:
        fields: its content.
        where: file and field it stands in.
    """

    fields: Mapping[str, Any]
    where: str

    @property
    def method(self) -> str:
        """The quantization method's name, with one spelling each."""
        named = self.fields.get("quant_method")
        if not named:
            named = "compressed-tensors" if "config_groups" in self.fields else "unknown"
        return str(named).lower().replace("_", "-")


def quantization_section(config: Mapping[str, Any]) -> Section | None:
    """Return the section of ``config`` (a parsed config.json) that describes quantization.

    Raises:
        ModelError: the section is no JSON object.
    """
    for prefix, part in (("", config), ("text_config.", _mapping(config.get("text_config")))):
        for key in ("quantization_config", "compression_config"):
            value, where = part.get(key), f"config.json: {prefix}{key}"
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ModelError(f"{where} is {value!r}, expected a JSON object.")
            if value:
                return Section(value, where)
    return None


def modelopt_section(hf_quant_config: Mapping[str, Any]) -> Section:
    """Return the section of a parsed hf_quant_config.json, ModelOpt's file beside config.json."""
    fields = hf_quant_config.get("quantization")
    if not isinstance(fields, Mapping):
        raise ModelError("hf_quant_config.json has no object 'quantization'.")
    return Section({**fields, "quant_method": "modelopt"}, "hf_quant_config.json: quantization")


def declared(section: Section) -> CacheDeclaration | None:
    """Return what ``section`` declares of the KV cache, or `None` if nothing.

    Raises:
        ModelError: a field has a type that no producer writes.
    """
    fields, where = section.fields, section.where
    if section.method == "quark":
        return _quark(section)
    nested = fields.get("quantization")
    if isinstance(nested, Mapping):  # ModelOpt's own layout, copied into config.json
        fields, where = nested, f"{where}.quantization"
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = fields.get(key)
        if scheme is not None:
            found = _scheme(section.method, scheme, f"{where}.{key}")
            return _with_attention_groups(found, scheme, section)
    group = next(_attention_groups(section), None)
    if group is None:
        return None
    scheme, at = group
    return replace(_scheme(section.method, scheme, at), queries=True)


def combine(
    first: CacheDeclaration | None, second: CacheDeclaration | None
) -> CacheDeclaration | None:
    """Return the one declaration of two files.

    Raises:
        ModelError: they contradict each other.
    """
    if first is None or second is None:
        return first or second
    if (first.format, first.refusal is None) != (second.format, second.refusal is None):
        raise ModelError(
            f"{first.where} and {second.where} declare different KV caches. Correct one of them."
        )
    return first


def _scheme(producer: str, scheme: Any, where: str) -> CacheDeclaration:
    if isinstance(scheme, Mapping):
        refusal = dict_refusal(scheme, where)
        strategy = None if refusal else strategy_of(scheme)
        return CacheDeclaration(producer, where, strategy=strategy, refusal=refusal)
    if isinstance(scheme, str):
        return CacheDeclaration(producer, where, refusal=word_refusal(scheme, where))
    raise ModelError(f"{where} is {scheme!r}, expected a JSON object or a word.")


def _with_attention_groups(
    found: CacheDeclaration, scheme: Any, section: Section
) -> CacheDeclaration:
    for group, where in _attention_groups(section):
        refusal = found.refusal or dict_refusal(group, where)
        if refusal is None and isinstance(scheme, Mapping):
            strategies = strategy_of(scheme), strategy_of(group)
            if strategies[0] != strategies[1]:
                refusal = (
                    f"{found.where}.strategy is {strategies[0]!r} but {where}.strategy is "
                    f"{strategies[1]!r}; one attention module has one scheme"
                )
        found = replace(found, queries=True, refusal=refusal)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _groups(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(fields.get("config_groups"))


def is_attention_group(group: Any) -> bool:
    """Whether a config group quantizes attention's inputs and no weights."""
    if not isinstance(group, Mapping) or group.get("weights"):
        return False
    targets = group.get("targets")
    return (
        isinstance(targets, list)
        and bool(targets)
        and all(re.search(r"(?i)att(?:n|ention)\$?$", str(t)) for t in targets)
    )


def _attention_groups(section: Section) -> Iterator[tuple[Mapping[str, Any], str]]:
    for name, group in _groups(section.fields).items():
        if is_attention_group(group) and isinstance(group.get("input_activations"), Mapping):
            where = f"{section.where}.config_groups.{name}.input_activations"
            yield group["input_activations"], where


def _quark_specs(fields: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    layers = fields.get("layer_quant_config") or fields.get("kv_cache_quant_config")
    return {name: _mapping(spec) for name, spec in _mapping(layers).items()}


def _quark(section: Section) -> CacheDeclaration | None:
    """Quark: static output quantization of the k and v projections stands for the cache."""
    fields = section.fields
    patterns = _mapping(fields.get("export")).get("kv_cache_group")
    if not patterns:
        return None
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ModelError(f"{section.where}.export.kv_cache_group is {patterns!r}, expected names.")
    where = f"{section.where}.layer_quant_config"
    outputs = {n: _mapping(spec.get("output_tensors")) for n, spec in _quark_specs(fields).items()}
    found = CacheDeclaration("quark", f"{section.where}.export.kv_cache_group")
    for pattern in patterns:
        specs = [(n, s) for n, s in outputs.items() if n == pattern or fnmatchcase(n, pattern)]
        if not any(spec for _, spec in specs):
            lost = f"{found.where} lists {pattern!r}, but {where} has no output_tensors for it"
            return replace(found, refusal=lost)
        for name, spec in specs:
            refusal = quark_refusal(spec, f"{where}.{name}.output_tensors")
            if refusal:
                return replace(found, refusal=refusal)
    return replace(found, queries=bool(outputs.get("*q_proj")))
