"""Proves that a fused decoder layer computes what transformers' own does, before it is used.

The model runs once over a few tokens while every layer's arguments are noted. A copy of the layer
in float32 then gets the same arguments twice, once through its own code and once fused, over few
rows and over many. In float32 only the order of sums differs, so that any mistake shows; what the
narrower types round, the fused layer rounds at the same places.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.errors import KV8Error
from kv8.formats.base import FORMATS
from kv8.kernels.step import MOST_ROWS
from kv8.models.decoder_parts import DecoderParts, read_layer
from kv8.models.hook import HookedModel
from kv8.models.interface import BINDING, LayerBinding
from kv8.models.probe import probe_batch, probe_layer, probe_sequences

logger = logging.getLogger(__name__)

# Of what a layer adds to its input, and of the input itself: rounding of float32 sums over some
# thousand terms, with a margin; a wrong step changes what is added by about 1.
_TOLERANCE, _ROUNDING = 1e-4, 1e-6
_FEW_ROWS = 5
PROOF_ROWS: Final = (_FEW_ROWS, MOST_ROWS + 1)  # a layer is tried on each
# What a model may raise that is not what it seems to be.
PROOF_ERRORS = (KV8Error, TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)


# From a layer's parts, its binding, what its attention asks for, and whether it rotates.
MakeForward = Callable[[DecoderParts, LayerBinding, AttentionCall, bool], Callable[..., Any]]


@dataclass(frozen=True)
class LayerProbe:
    """A layer's input and output [1, T, C], its keywords, and its attention's call."""

    x: torch.Tensor
    output: torch.Tensor
    keywords: dict[str, Any]
    call: AttentionCall


class _NotingBackend(ReferenceBackend):
    """Attends, and notes what each layer's attention asked for."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        self.calls[layer.geometry.layer] = call
        return super().attend(layer, query, batch, call)


@torch.no_grad()
def probe_layers(model: HookedModel, layers: Mapping[int, nn.Module]) -> dict[int, LayerProbe]:
    """Run the model once and return what ``layers`` were called with.

    Left out are those that are called with more than one positional argument or return more than
    one tensor; all, if the model does not run.
    """
    noted: dict[int, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {}
    handles = [
        layer.register_forward_hook(_note(number, noted), with_kwargs=True)
        for number, layer in layers.items()
    ]
    backend = _NotingBackend()
    try:
        _run_once(model, backend)
    except PROOF_ERRORS as error:
        logger.debug("The model does not run a probe, so that nothing is fused: %s", error)
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {
        number: LayerProbe(x, output, keywords, backend.calls[number])
        for number, (x, output, keywords) in noted.items()
        if number in backend.calls
    }


def _note(number: int, noted: dict[int, Any]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Any, keywords: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and torch.is_tensor(output) and output.shape == args[0].shape:
            noted[number] = (args[0], output, keywords)

    return hook


def _run_once(model: HookedModel, backend: ReferenceBackend) -> None:
    sequence = probe_sequences(model.geometry, model.device)[0]
    kv_format = FORMATS[str(model.dtype).removeprefix("torch.")]
    layers: dict[int, LayerAttention] = {}
    for geometry in model.geometry.layers:
        owner = None if geometry.owns_kv else layers[geometry.kv_source]
        layers[geometry.layer] = probe_layer(
            geometry, sequence.length, model.device, kv_format=kv_format, owner=owner
        )
    lengths, rows = [sequence.length], torch.zeros(1, dtype=torch.int64, device=model.device)
    with model.bound(probe_batch(lengths, lengths, lengths, model.device), layers, backend):
        model.forward(sequence.token_ids, sequence.positions, rows)


@torch.no_grad()
def proven_rotation(
    model: HookedModel,
    layer: nn.Module,
    probe: LayerProbe,
    make_forward: MakeForward,
    num_rows: Sequence[int],
) -> bool | None:
    """Prove a layer; return whether its queries and keys rotate, or `None` if nothing is proven.

    ``make_forward`` returns what is to stand in for the ``forward`` of such a layer. It is tried
    on each of ``num_rows``.
    """
    config = getattr(model.module, "config", None)
    number = None
    try:
        scope = next(
            getattr(module, BINDING).scope for module in layer.modules() if hasattr(module, BINDING)
        )
        kept = {id(scope): scope, id(config): config}
        exact = copy.deepcopy(layer, kept).float()
        for rotates in (True, False):
            number, difference = _worst_difference(
                model, exact, probe, make_forward, num_rows, rotates=rotates
            )
            if difference <= 1.0:
                return rotates
        logger.debug("Layer %s computes something else than it seems to; it is not fused", number)
    except PROOF_ERRORS as error:
        logger.debug("A layer like layer %s cannot be fused: %s", number, error)
    return None


def _worst_difference(
    model: HookedModel,
    exact: nn.Module,
    probe: LayerProbe,
    make_forward: MakeForward,
    row_counts: Sequence[int],
    *,
    rotates: bool,
) -> tuple[int, float]:
    """Return the layer's number and how far fused and own results differ, in tolerances."""
    parts = read_layer(exact)
    assert parts is not None, "a copy has the structure of its original"
    binding = getattr(parts.attention, BINDING)
    plain = type(exact).forward
    worst = 0.0
    length = probe.x.shape[1]
    for num_rows in row_counts:
        rows = torch.arange(num_rows, device=probe.x.device) % length
        x = _take(probe.x, rows, length)
        keywords = {key: _take(value, rows, length) for key, value in probe.keywords.items()}

        def run(forward: Callable[..., Any], x: Any = x, keywords: Any = keywords) -> torch.Tensor:
            lengths = [x.shape[1]]
            batch = probe_batch(lengths, lengths, lengths, model.device)
            cache = probe_layer(binding.geometry, x.shape[1], model.device)
            with model.bound(batch, {binding.geometry.layer: cache}, ReferenceBackend()):
                output: torch.Tensor = forward(x, **keywords)
            return output

        expected = run(lambda x, **keywords: plain(exact, x, **keywords))
        found = run(make_forward(parts, binding, probe.call, rotates))
        allowed = _TOLERANCE * (expected - x).norm(dim=-1) + _ROUNDING * x.norm(dim=-1)
        ratio = float(((found - expected).norm(dim=-1) / allowed).nan_to_num(torch.inf).max())
        worst = max(worst, ratio)
    return binding.geometry.layer, worst


def _take(value: Any, rows: torch.Tensor, length: int) -> Any:
    """Return ``rows`` of every tensor [1, length, ...] in ``value``, in float32 where floating."""
    if isinstance(value, tuple | list):
        return type(value)(_take(part, rows, length) for part in value)
    if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] != length:
        return value
    value = value[:, rows]
    return value.float() if value.is_floating_point() else value
