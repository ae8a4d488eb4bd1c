"""Runs a loaded model once to prove that kv8 serves it as transformers would.

Two short sequences go through transformers alone, one at a time, and through kv8 packed and in
chunks. Each layer's attention must agree closely, being computed in float32 on the same inputs;
the logits must agree but for rounding. What would go wrong in silence fails here: tokens of
different sequences that mix outside of attention, a mask or window kv8 does not know of, rotary
angles that depend on the batch.
"""

from dataclasses import replace

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.errors import KV8Error, UnsupportedModelError
from kv8.formats.base import FORMATS
from kv8.models.hook import HookedModel
from kv8.models.interface import BINDING, check_shapes, read_call
from kv8.models.probe import (
    RECORDER_NAME,
    ProbeSequence,
    RecordedCall,
    probe_batch,
    probe_layer,
    probe_sequences,
)

# One layer, float32 on both sides: rounding of a sum over at most a few hundred tokens, plus the
# rounding of q·k itself, which grows with it and is added below.
_LAYER_TOLERANCE = 1e-4
_FLOAT32_EPS = 2.0**-23
# Logits, relative to their spread. In float32 only rounding differs. In 16 bits the last bit of a
# matrix product depends on how many rows it has, later layers amplify that, and an expert may be
# chosen differently for a few tokens; a structural mistake changes whole sequences by about 1.
_LOGIT_TOLERANCE = {torch.float32: (0.01, 0.0)}
_LOGIT_TOLERANCE_16_BITS = (0.25, 0.1)


@torch.no_grad()
def verify_model(model: HookedModel, backend: AttentionBackend | None = None) -> None:
    """Check that ``model`` gives transformers' own results through kv8.

    Args:
        model: the loaded model, not bound to a batch.
        backend: what attends; the reference backend by default.

    Raises:
        UnsupportedModelError: it does not; names the layer and the difference.
    """
    backend = backend or ReferenceBackend()
    sequences = probe_sequences(model.geometry, model.device)
    try:
        expected = []
        for sequence in sequences:
            logits, calls = _run_alone(model, sequence)
            for number, call in calls:
                _check_layer(model, number, call, backend)
            expected.append(logits)
        packed = _run_packed(model, sequences, backend)
    except KV8Error:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(
            f"kv8 cannot serve {model.geometry.architecture}: a packed batch of two sequences "
            f"fails in it with {type(error).__name__}: {error}"
        ) from error
    _check_logits(model, torch.cat(expected), packed)


def _run_alone(
    model: HookedModel, sequence: ProbeSequence
) -> tuple[torch.Tensor, list[tuple[int, RecordedCall]]]:
    """Return transformers' logits of a sequence on its own, and what each layer was asked."""
    with model.recording(RECORDER_NAME) as recorded:
        # The first sequence goes without positions, so that transformers' own are checked too.
        positions = sequence.positions.unsqueeze(0) if sequence.first_position else None
        output = model.module(
            input_ids=sequence.token_ids.unsqueeze(0),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.arange(sequence.length, device=model.device),
        )
    return output.logits[0].float(), recorded


def _run_packed(
    model: HookedModel, sequences: tuple[ProbeSequence, ...], backend: AttentionBackend
) -> torch.Tensor:
    """Return the logits of all sequences, packed and in two steps, in the sequences' order."""
    lengths = [sequence.length for sequence in sequences]
    kv_format = FORMATS[str(model.dtype).removeprefix("torch.")]
    layers: dict[int, LayerAttention] = {}
    for geometry in model.geometry.layers:
        owner = None if geometry.owns_kv else layers[geometry.kv_source]
        layers[geometry.layer] = probe_layer(
            geometry, sum(lengths), model.device, kv_format=kv_format, owner=owner
        )
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for ends in ([sequence.chunk for sequence in sequences], lengths):
        chunks = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        ids = [s.token_ids[chunk] for s, chunk in zip(sequences, chunks, strict=True)]
        positions = [s.positions[chunk] for s, chunk in zip(sequences, chunks, strict=True)]
        rows = torch.arange(sum(map(len, ids)), device=model.device)
        batch = probe_batch([len(part) for part in ids], ends, lengths, model.device)
        with model.bound(batch, layers, backend):
            logits = model.forward(torch.cat(ids), torch.cat(positions), rows)
        for part, ids_of_one in zip(parts, ids, strict=True):
            part.append(logits[: len(ids_of_one)])
            logits = logits[len(ids_of_one) :]
        starts = ends
    return torch.cat([torch.cat(part) for part in parts])


def _check_layer(
    model: HookedModel, number: int, call: RecordedCall, backend: AttentionBackend
) -> None:
    """Check one layer's attention on the inputs transformers had, in float32."""
    module = call.module
    binding = getattr(module, BINDING)
    asked = read_call(binding, module, call.query, call.keywords)
    check_shapes(binding, call.query, call.key, call.value)
    length = call.query.shape[2]
    batch = probe_batch([length], [length], [length], model.device)
    # Alone with its inputs, a layer that reads another's keys and values stores them itself.
    geometry = replace(model.geometry.layer(number), kv_source=number)
    layer = probe_layer(geometry, length, model.device)
    query, key, value = (
        tensor[0].transpose(0, 1).float() for tensor in (call.query, call.key, call.value)
    )
    backend.store(layer, key, value, batch)
    output = backend.attend(layer, query, batch, asked)
    expected = call.expected()[0]
    error = (output - expected).flatten(1).norm(dim=1)
    # Where nothing is expected, nothing is what there must be.
    difference = torch.where(error == 0, 0.0, error / expected.flatten(1).norm(dim=1))
    largest_logit = query.norm(dim=-1).max() * key.norm(dim=-1).max() * abs(asked.softmax_scale)
    tolerance = _LAYER_TOLERANCE + 4 * _FLOAT32_EPS * float(largest_logit)
    worst = float(difference.nan_to_num(nan=torch.inf).max())
    if worst > tolerance and bool(expected.isfinite().all()):
        raise binding.refuse(
            f"attends differently from transformers: over {length} tokens the outputs differ by "
            f"{worst:.2g} (relative; {tolerance:.1g} is rounding)"
        )


def _check_logits(model: HookedModel, expected: torch.Tensor, packed: torch.Tensor) -> None:
    limit, share = _LOGIT_TOLERANCE.get(model.dtype, _LOGIT_TOLERANCE_16_BITS)
    spread = expected - expected.mean(dim=1, keepdim=True)
    shift = packed - packed.mean(dim=1, keepdim=True)
    difference = (shift - spread).norm(dim=1) / spread.norm(dim=1)
    finite = expected.isfinite().all(dim=1)
    wrong = finite & ~(difference <= limit)
    if int(wrong.sum()) > share * len(wrong):
        raise UnsupportedModelError(
            f"kv8 cannot serve {model.geometry.architecture} correctly: packed with another "
            f"sequence and computed in two steps, {int(wrong.sum())} of {len(wrong)} probe tokens "
            f"get other logits than alone (relative difference up to "
            f"{float(difference[finite].max()):.2g}). Every layer's attention agrees, so tokens "
            f"must meet outside of attention."
        )
