"""What a checkpoint folder says of its KV cache: declaration and scales, without any weight."""

from dataclasses import dataclass, field
from pathlib import Path

from kv8.geometry import ModelGeometry
from kv8.scales.collect import CollectedScales, collect_scales
from kv8.scales.declaration import (
    CacheDeclaration,
    combine,
    declared,
    modelopt_section,
    quantization_section,
)
from kv8.scales.scale import ModelScales, OriginKind
from kv8.scales.tensors import read_json, tensor_names, weight_files
from kv8.scales.wording import layer_list

# Methods whose scales are taken at the k and v projections' output, whatever the tensor's name.
_MEASURED_BEFORE_ROPE = ("fp8", "quark")


@dataclass(frozen=True)
class CheckpointScales:
    """A checkpoint's declaration and scales.

    Attributes:
        declaration: what its configuration declares of the KV cache, or `None`. Scales can be
            there all the same: available, but not declared.
        scales: the scales found in its tensors.
        notes: what a reader of the log should know of them.
        tensors: names of all tensors that belong to the KV cache and not to the model.
    """

    declaration: CacheDeclaration | None = None
    scales: ModelScales = field(default_factory=ModelScales)
    notes: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()


def read_checkpoint(folder: Path, geometry: ModelGeometry) -> CheckpointScales:
    """Read ``folder``'s configuration, safetensors headers and scale tensors.

    Raises:
        ModelError: a file is missing, damaged, or contradicts another.
        ScaleError: a scale tensor binds to no layer of ``geometry``, or two bind to one.
    """
    config = quantization_section(read_json(folder / "config.json"))
    extra_file = folder / "hf_quant_config.json"
    extra = modelopt_section(read_json(extra_file)) if extra_file.is_file() else None
    sections = [section for section in (config, extra) if section is not None]

    declaration: CacheDeclaration | None = None
    for section in sections:
        declaration = combine(declaration, declared(section))
    strategy = declaration.strategy if declaration else None
    names = tensor_names(weight_files(folder))
    collected = collect_scales(names, geometry, OriginKind.CHECKPOINT, strategy)
    return CheckpointScales(
        declaration=declaration,
        scales=collected.scales,
        notes=_notes(collected, sections[0].method if sections else ""),
        tensors=collected.tensors,
    )


def _notes(collected: CollectedScales, method: str) -> tuple[str, ...]:
    notes = []
    layers = [number for number, scales in collected.scales if scales.k or scales.v]
    if layers and (collected.before_rope or method in _MEASURED_BEFORE_ROPE):
        example = min(collected.before_rope or collected.tensors)
        notes.append(
            f"The scales of {layer_list(layers)} (such as {example}) were measured before the "
            "rotary embedding, which can make single values up to 1.41 times larger: keys saturate "
            "more easily than with scales measured after it."
        )
    if collected.probability:
        notes.append(
            f"{len(collected.probability)} softmax weight scales (such as "
            f"{min(collected.probability)}) are not needed: kv8 multiplies softmax weights, which "
            "lie between 0 and 1, by an exact power of two instead."
        )
    return tuple(notes)
