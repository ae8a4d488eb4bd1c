"""Lets native kernels compute the well-known parts of a loaded model, each proven first.

Decoder layers of the usual structure are replaced whole; linear layers and norms elsewhere one by
one (`kv8.models.fusion`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kv8.attention.backend import AttentionCall
from kv8.attention.checks import FLOAT_DTYPES
from kv8.kernels.cpu import CpuKernels, load_kernels
from kv8.models.decoder_parts import DecoderParts, is_plain_linear, read_layer, read_norm
from kv8.models.fused_layer import FusedLayer
from kv8.models.fused_modules import FusedLinear, FusedNorm
from kv8.models.fusion import Fusion
from kv8.models.fusion_proof import (
    PROOF_ROWS,
    LayerProbe,
    MakeForward,
    probe_layers,
    proven_rotation,
)
from kv8.models.hook import HookedModel
from kv8.models.interface import BINDING, LayerBinding
from kv8.models.layer_chain import LayerChain, prove_chains
from kv8.models.layer_operations import LayerOperations
from kv8.models.weight_memory import WeightMemory, gather, room_for
from kv8.models.whole_step import find_whole_step, prove_whole_step
from kv8.models.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A decoder layer of the usual structure: its number, its module, and what is in it."""

    number: int
    layer: nn.Module
    parts: DecoderParts


@dataclass(frozen=True)
class _Fused:
    layer: FusedLayer
    probe: LayerProbe


def fuse_model(model: HookedModel, kernels: CpuKernels | None = None) -> None:
    """Replace what can be replaced in ``model``, and say in the log what was.

    Does nothing on other devices than the CPU, or where the kernels were not built.

    Args:
        model: a loaded model, not bound to a batch.
        kernels: the native kernels; loaded if not given.
    """
    if model.device.type != "cpu" or model.dtype not in FLOAT_DTYPES:
        return
    if kernels is None:
        try:
            kernels = load_kernels(announce=False)
        except ImportError as error:
            logger.debug("The model computes as transformers wrote it: %s", error)
            return
    fusion, workspace = Fusion(), Workspace(model.dtype)
    layers, taken = _fuse_layers(model, fusion, kernels, workspace)
    linears = [m for m in model.module.modules() if m not in taken and is_plain_linear(m)]
    gather(_apart([linear.weight for linear in linears], model.module), kernels)
    for linear in linears:
        fused = FusedLinear(linear, kernels, workspace)
        fusion.replace(linear, fused.forward)
        if linear is not model.module.get_output_embeddings():  # only wanted rows get there
            fusion.most_native = min(fusion.most_native, fused.most_native)
    norms = []
    for module in model.module.modules():
        if module in taken:
            continue
        if "RMSNorm" in type(module).__name__ and (norm := read_norm(module)) is not None:
            fusion.replace(module, FusedNorm(norm, kernels).forward)
            norms.append(norm)
    fusion.enable()
    model.fusion = fusion
    chains = _chain_layers(layers, kernels)
    proven = prove_chains(model, chains, kernels) if chains else None
    if proven is not None:
        whole = find_whole_step(model, chains, norms, kernels, workspace)
        if whole is not None:
            prove_whole_step(model, fusion, whole, kernels, proven)
    logger.info(
        "Native kernels compute %d of %d decoder layers (q, k, v and gate, up merged; %s), %d "
        "other linear layers and %d other norms",
        len(layers),
        len(model.attention_modules),
        f"decoding in {len(chains)} calls" if proven is not None else "one by one",
        len(linears),
        len(norms),
    )


def _fuse_layers(
    model: HookedModel, fusion: Fusion, kernels: CpuKernels, workspace: Workspace
) -> tuple[list[_Fused], set[nn.Module]]:
    """Replace decoder layers; return them, and the modules that they no longer call."""
    candidates = find_candidates(model)
    memory = WeightMemory(sum(_weight_bytes(c.parts) for c in candidates), kernels)
    taken: set[nn.Module] = set()
    fused: list[_Fused] = []
    make_forward = partial(_forward_of, kernels)
    for candidate, probe, rotates in proven_layers(model, candidates, make_forward):
        operations = LayerOperations(
            candidate.parts,
            getattr(candidate.parts.attention, BINDING),
            probe.call,
            rotates=rotates,
            kernels=kernels,
            memory=memory,
        )
        layer = FusedLayer(operations, workspace)
        fusion.replace(candidate.layer, layer.forward)
        fusion.most_native = min(fusion.most_native, operations.most_native)
        fused.append(_Fused(layer, probe))
        known_mlp = bool(candidate.parts.gate_up)
        for module in candidate.layer.modules():
            if known_mlp or not _is_inside(module, candidate.parts.mlp):
                taken.add(module)
    return fused, taken


def _forward_of(
    kernels: CpuKernels,
    parts: DecoderParts,
    binding: LayerBinding,
    call: AttentionCall,
    rotates: bool,
) -> Callable[..., torch.Tensor]:
    """Return what stands in for a layer's ``forward``, with a workspace of its own."""
    operations = LayerOperations(parts, binding, call, rotates=rotates, kernels=kernels)
    return FusedLayer(operations, Workspace(parts.output.weight.dtype)).forward


def _chain_layers(layers: Sequence[_Fused], kernels: CpuKernels) -> list[LayerChain]:
    """Let layers compute at once of which each is called with what the one before it returned."""
    runs: list[list[_Fused]] = []
    for fused in layers:
        if not fused.layer.native.whole:
            continue
        if runs and fused.probe.x is runs[-1][-1].probe.output:
            runs[-1].append(fused)
        else:
            runs.append([fused])
    chains = []
    for run in runs:
        chains.append(LayerChain([fused.layer.native for fused in run], kernels))
        for index, fused in enumerate(run):
            fused.layer.join(chains[-1], index)
    return chains


def _weight_bytes(parts: DecoderParts) -> int:
    """Return the memory that a layer's weights take as `LayerOperations` merges them."""
    groups = (parts.qkv, (parts.output,), parts.gate_up, (parts.down,) if parts.down else ())
    return sum(room_for([linear.weight for linear in group]) for group in groups)


def _apart(parameters: Sequence[nn.Parameter], module: nn.Module) -> list[nn.Parameter]:
    """Leave out parameters whose memory another one uses, too: they must not be parted."""
    uses = Counter(parameter.data_ptr() for parameter in module.parameters())
    return [parameter for parameter in parameters if uses[parameter.data_ptr()] == 1]


def find_candidates(model: HookedModel) -> list[Candidate]:
    """Return the decoder layers of the usual structure that store keys and values of their own."""
    parents = {child: parent for parent in model.module.modules() for child in parent.children()}
    candidates = []
    for number, attention in model.attention_modules.items():
        layer = parents.get(attention)
        parts = read_layer(layer) if layer is not None else None
        if layer is not None and parts is not None and parts.attention is attention:
            binding, merged = getattr(attention, BINDING), parts.qkv
            geometry = binding.geometry
            heads = geometry.num_heads + 2 * geometry.num_kv_heads
            width = sum(linear.out_features for linear in merged)
            if geometry.owns_kv and width == heads * geometry.head_dim:
                candidates.append(Candidate(number, layer, parts))
    return candidates


def proven_layers(
    model: HookedModel,
    candidates: Sequence[Candidate],
    make_forward: MakeForward,
    num_rows: Sequence[int] = PROOF_ROWS,
) -> Iterator[tuple[Candidate, LayerProbe, bool]]:
    """Yield the layers that may be replaced, what they are called with, and whether they rotate.

    Of layers of one kind the first is proven (`proven_rotation`).
    """
    probes = probe_layers(model, {c.number: c.layer for c in candidates}) if candidates else {}
    rotations: dict[Any, bool | None] = {}  # by kind of layer; `None` where the proof failed
    for candidate in candidates:
        probe = probes.get(candidate.number)
        if probe is None or probe.call.sinks is not None or not one_dtype(candidate, probe):
            continue
        kind = layer_kind(candidate, probe)
        if kind not in rotations:
            rotations[kind] = proven_rotation(model, candidate.layer, probe, make_forward, num_rows)
        rotates = rotations[kind]
        if rotates is not None:
            yield candidate, probe, rotates


def one_dtype(candidate: Candidate, probe: LayerProbe) -> bool:
    """Whether all that a layer computes with is of one type; angles may be float32."""
    dtype = probe.x.dtype
    angles = probe.keywords.get("position_embeddings") or ()
    return all(p.dtype == dtype for p in candidate.layer.parameters()) and all(
        torch.is_tensor(table) and table.dtype in (dtype, torch.float32) for table in angles
    )


def layer_kind(candidate: Candidate, probe: LayerProbe) -> Any:
    """Return what layers must have in common for one's proof to hold for another.

    The classes of their modules, the shapes of their weights, and every plain attribute, apart
    from the layer's number.
    """
    modules = []
    for name, module in candidate.layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and key != "layer_idx"
        }
        shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
        modules.append((name, type(module), repr(sorted(plain.items())), repr(shapes)))
    return tuple(modules), probe.call


def _is_inside(module: nn.Module, parent: nn.Module) -> bool:
    return any(module is part for part in parent.modules())
