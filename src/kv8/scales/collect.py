"""Binds the scale tensors of safetensors files to a model's layers; shared by every such source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kv8.errors import ModelError, ScaleError
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.scales.names import BoundName, Role, resolve_name
from kv8.scales.provenance import VERSION, ScalesFileMetadata, is_ours, parse_header
from kv8.scales.scale import (
    LayerScales,
    ModelScales,
    Origin,
    OriginKind,
    Scale,
    ScaleProblem,
    Side,
)
from kv8.scales.tensor_writer import CHECKSUM, checksum
from kv8.scales.tensors import SmallTensor, file_metadata, read_small, read_tensors
from kv8.scales.validity import Strategy, shape_fault, values_fault
from kv8.scales.wording import layer_list

_SCALE_DTYPES = {"float64", "float32", "bfloat16", "float16"}


@dataclass(frozen=True)
class CollectedScales:
    """Everything a set of files says about KV cache scales.

    Attributes:
        scales: the scales, and those that are unusable as problems.
        tensors: names of all tensors that belong to the KV cache, used or not.
        unbound: names of tensors that have nothing to do with the KV cache.
        before_rope: names of scales measured before the rotary embedding.
        probability: names of softmax weight scales, which kv8 does not need.
    """

    scales: ModelScales
    tensors: frozenset[str] = frozenset()
    unbound: tuple[str, ...] = ()
    before_rope: tuple[str, ...] = ()
    probability: tuple[str, ...] = ()


@dataclass
class _Binding:
    kind: OriginKind
    strategy: Strategy | None
    headers: Mapping[str, ScalesFileMetadata | None]
    scales: dict[tuple[int, Side], Scale] = field(default_factory=dict)
    problems: list[ScaleProblem] = field(default_factory=list)
    tensors: dict[tuple[int, Side], str] = field(default_factory=dict)

    def add(self, bound: BoundName, layer: LayerGeometry, tensor: SmallTensor) -> None:
        """Take in one tensor: a usable scale, a problem, or a harmless zero point."""
        if bound.spelling.role is Role.OFFSET:
            fault = _offset_fault(tensor)
            self.problems += [_problem(layer, s, tensor, fault) for s in bound.sides if fault]
            return
        for side in bound.sides:
            key = (layer.layer, side)
            if key in self.tensors:
                raise ScaleError(
                    f"Two tensors give the {side} scale of layer {layer.layer}: "
                    f"{self.tensors[key]} and {tensor.name}. Remove one of them."
                )
            self.tensors[key] = tensor.name
            fault = _scale_fault(tensor, side, layer, self.strategy)
            if fault:
                self.problems.append(_problem(layer, side, tensor, fault))
            else:
                self.scales[key] = Scale(tensor.values, self._origin(*key, tensor))

    def check_copy(self, sides: Sequence[Side], layer: LayerGeometry, tensor: SmallTensor) -> None:
        """Accept a k or v scale of a layer that reads another's KV, if it repeats that layer's.

        Readers that give every layer scales of its own (vLLM) need the copy; any other value would
        be lost here.
        """
        for side in sides:
            source = self.scales.get((layer.kv_source, side))
            if side != "q" and (source is None or source.values != tensor.values):
                raise _no_use(layer, f"Tensor {tensor.name}")

    def _origin(self, layer: int, side: Side, tensor: SmallTensor) -> Origin:
        where = f"{tensor.name} in {tensor.file}"
        metadata = self.headers[tensor.file]
        if metadata is None:
            return Origin(self.kind, where)
        measured = metadata.measured(layer, side)
        if self.kind is OriginKind.FILE:
            return Origin(OriginKind.CALIBRATION, f"{measured} ({where})")
        return Origin(self.kind, f"{where} ({OriginKind.CALIBRATION.value}, {measured})")


def collect_scales(
    names: Mapping[str, Path],
    geometry: ModelGeometry,
    kind: OriginKind,
    strategy: Strategy | None = None,
) -> CollectedScales:
    """Read every KV cache scale among the tensors ``names`` (name to file) and bind it to a layer.

    Args:
        names: all tensors of the files.
        geometry: the model the scales must fit.
        kind: what to write down as the scales' origin.
        strategy: one value a tensor or one a head; `None` if the source does not say.

    Raises:
        ScaleError: a scale has no layer to bind to, or two tensors give the same one.
        ModelError: the scales of a file are not those that kv8 wrote into it.
    """
    bound = {name: role for name in names if (role := resolve_name(name)) is not None}
    layers = {name: _layer(name, role, geometry) for name, role in bound.items()}
    files = {names[name] for name in bound}
    headers = {file.name: _checked_header(file) for file in files}
    binding = _Binding(kind, strategy, headers)
    copies: list[SmallTensor] = []
    for tensor in read_small([(n, names[n]) for n, r in bound.items() if r.sides]):
        if _may_be_copy(bound[tensor.name], layers[tensor.name]):
            copies.append(tensor)
        else:
            binding.add(bound[tensor.name], layers[tensor.name], tensor)
    for tensor in copies:  # after everything they may be copies of
        binding.check_copy(bound[tensor.name].sides, layers[tensor.name], tensor)
    faulty = {(problem.layer, problem.side) for problem in binding.problems}
    usable = {key: scale for key, scale in binding.scales.items() if key not in faulty}
    return CollectedScales(
        scales=ModelScales(by_layer(usable), tuple(binding.problems)),
        tensors=frozenset(bound),
        unbound=tuple(name for name in names if name not in bound),
        before_rope=tuple(n for n, role in bound.items() if role.spelling.before_rope),
        probability=tuple(n for n, r in bound.items() if r.spelling.role is Role.PROBABILITY),
    )


def _checked_header(file: Path) -> ScalesFileMetadata | None:
    """Return what a file of kv8's own says of its scales, having looked that it still holds them.

    One without a checksum, from an older kv8, is taken at its word. What a newer one says in a
    checkpoint's shard is left out: the scales themselves follow the checkpoint's own declaration.
    """
    header = file_metadata(file)
    if not is_ours(header) or header.get("version") != VERSION:
        return None
    written = header.get(CHECKSUM)
    if written is not None and written != (found := checksum(read_tensors(file))):
        raise ModelError(
            f"{file} is damaged: the checksum of its scales is {found}, and was {written} when "
            f"they were written. Get the file again, or calibrate again. (Whoever changes scales "
            f"by hand leaves the entry {CHECKSUM} out of the header.)"
        )
    return parse_header(header, str(file))


def by_layer(scales: Mapping[tuple[int, Side], Scale]) -> dict[int, LayerScales]:
    """Group scales keyed by (layer, side) into one `LayerScales` a layer."""
    layers: dict[int, dict[str, Scale]] = {}
    for (layer, side), scale in scales.items():
        layers.setdefault(layer, {})[side] = scale
    return {layer: LayerScales(**sides) for layer, sides in sorted(layers.items())}


def check_layer(layer: int, sides: Sequence[Side], geometry: ModelGeometry, what: str) -> None:
    """Raise `ScaleError`, naming ``what``, unless ``layer`` has a use for scales of ``sides``."""
    try:
        found = geometry.layer(layer)
    except KeyError:
        numbers = layer_list(each.layer for each in geometry.layers)
        raise ScaleError(
            f"{what} is a KV cache scale for layer {layer}, but {geometry.architecture} has "
            f"attention in {numbers} only. Is it the scale of another model?"
        ) from None
    if not found.owns_kv and any(side != "q" for side in sides):
        raise _no_use(found, what)


def _no_use(layer: LayerGeometry, what: str) -> ScaleError:
    return ScaleError(
        f"{what} is a KV cache scale for layer {layer.layer}, which stores no keys and values: it "
        f"reads those of layer {layer.kv_source}, so this scale would be lost. Remove it; the "
        f"scales of layer {layer.kv_source} hold for both."
    )


def _layer(name: str, bound: BoundName, geometry: ModelGeometry) -> LayerGeometry:
    # k and v scales of a layer without a cache are judged later, when all values are known.
    sides: tuple[Side, ...] = ("q",) if bound.sides else ()
    check_layer(bound.layer, sides, geometry, f"Tensor {name}")
    return geometry.layer(bound.layer)


def _may_be_copy(bound: BoundName, layer: LayerGeometry) -> bool:
    stored = any(side != "q" for side in bound.sides)
    return bound.spelling.role is Role.SCALE and stored and not layer.owns_kv


def _scale_fault(
    tensor: SmallTensor, side: Side, layer: LayerGeometry, strategy: Strategy | None
) -> str | None:
    heads = layer.num_heads if side == "q" else layer.num_kv_heads
    fault = shape_fault(tensor.shape, side, heads, strategy)
    if fault is None and tensor.dtype not in _SCALE_DTYPES:
        fault = f"dtype {tensor.dtype} is none of {', '.join(sorted(_SCALE_DTYPES))}"
    return fault or values_fault(tensor.values)


def _offset_fault(tensor: SmallTensor) -> str | None:
    if tensor.values and all(value == 0 for value in tensor.values):
        return None
    return "has values other than 0; kv8 stores symmetric formats, without zero points"


def _problem(layer: LayerGeometry, side: Side, tensor: SmallTensor, fault: str) -> ScaleProblem:
    return ScaleProblem(layer.layer, side, f"{tensor.name} in {tensor.file}: {fault}")
