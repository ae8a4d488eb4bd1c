"""Binds the scale tensors of safetensors files to a model's layers; shared by every such source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kv8.errors import ScaleError
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.scales.names import BoundName, Role, resolve_name
from kv8.scales.scale import (
    LayerScales,
    ModelScales,
    Origin,
    OriginKind,
    Scale,
    ScaleProblem,
    Side,
)
from kv8.scales.tensors import SmallTensor, read_small
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
                origin = Origin(self.kind, f"{tensor.name} in {tensor.file}")
                self.scales[key] = Scale(tensor.values, origin)


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
    """
    bound = {name: role for name in names if (role := resolve_name(name)) is not None}
    layers = {name: _layer(name, role, geometry) for name, role in bound.items()}
    binding = _Binding(kind, strategy)
    for tensor in read_small([(n, names[n]) for n, r in bound.items() if r.sides]):
        binding.add(bound[tensor.name], layers[tensor.name], tensor)
    faulty = {(problem.layer, problem.side) for problem in binding.problems}
    usable = {key: scale for key, scale in binding.scales.items() if key not in faulty}
    return CollectedScales(
        scales=ModelScales(by_layer(usable), tuple(binding.problems)),
        tensors=frozenset(bound),
        unbound=tuple(name for name in names if name not in bound),
        before_rope=tuple(n for n, role in bound.items() if role.spelling.before_rope),
        probability=tuple(n for n, r in bound.items() if r.spelling.role is Role.PROBABILITY),
    )


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
        raise ScaleError(
            f"{what} is a KV cache scale for layer {layer}, which stores no keys and values: it "
            f"reads those of layer {found.kv_source}, so this scale would be lost. Remove it; the "
            f"scales of layer {found.kv_source} hold for both."
        )


def _layer(name: str, bound: BoundName, geometry: ModelGeometry) -> LayerGeometry:
    check_layer(bound.layer, bound.sides, geometry, f"Tensor {name}")
    return geometry.layer(bound.layer)


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
