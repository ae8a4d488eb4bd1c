"""Compares FlashAttention 3 with the triton kernels on made-up tensors: first whether they agree,
then which is faster. The cache, its scales and its counters are not touched.

What both may differ by follows from their roundings. With A the output for values without their
signs, Σ weight·|v|:

- weights meet the values rounded: to e4m3 in FP8 attention, one step of it (2^-3) between the two,
  since their maxima differ; else to 16 bits, 2^-7. As much as a quarter of that is allowed for
  products summed in fewer bits than float32 has. That is in proportion to A.
- FP8 weights below 2^-14 of the largest are off by up to 2^-17, whatever they are; all weights
  together are at least a half.
- both outputs are rounded to the query's type, 2^-8 each.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.kernel_choice import KindChoice, MadeUpWork, Race, Timer
from kv8.attention.layer import LayerAttention
from kv8.attention.made_up import CODE_SCALE, made_up_batch, random_codes
from kv8.errors import CapacityError
from kv8.formats.encode import bits
from kv8.kernels.clock import seconds_of

logger = logging.getLogger(__name__)

_REPEATS: Final = 5
_MOST_SECONDS: Final = 0.25  # for the repeats of one batch by one of the two
_LOGIT_SIZE: Final = 3.0  # standard deviation of logits: a few keys have most of the weight
_MOST_ROWS: Final = 256  # of an output that are compared


class DisagreementError(Exception):
    """The two do not compute the same."""


@dataclass(frozen=True)
class MadeUp:
    """A batch of queries ([T, H, D]) over a made-up cache like that of a layer."""

    layer: LayerAttention
    batch: AttentionBatch
    query: torch.Tensor
    call: AttentionCall

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Return what ``backend`` makes of it, [T, H, D]."""
        return backend.attend(self.layer, self.query, self.batch, self.call)


def race(
    triton: AttentionBackend,
    flash3: AttentionBackend,
    subject: tuple[LayerAttention, AttentionCall],
    work: MadeUpWork,
    dtype: torch.dtype,
    timer: Timer | None,
) -> KindChoice:
    """Return which of the two is faster over layers like that of ``subject``, which both serve.

    FlashAttention 3 is out, with a warning, where it fails or computes something else.
    """
    layer, _ = subject
    if timer is None:
        timer = partial(seconds_of, device=layer.k_codes.device)
    races = []
    for lengths in (work.prefill, work.decode):
        try:
            made_up = make_up(subject, lengths, dtype)
            _check_agreement(made_up, triton, flash3)
            races.append(_race(made_up, triton, flash3, timer))
        except (torch.OutOfMemoryError, CapacityError) as error:
            return KindChoice(problem=f"no memory to measure FlashAttention 3 with ({error})")
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, we can do without
            reason = str(error)
            if not isinstance(error, DisagreementError):
                reason = f"it failed with {type(error).__name__}: {error}"
            logger.warning("FlashAttention 3 is not used for attention: %s", reason)
            return KindChoice(problem=f"FlashAttention 3 is out, {reason}")
    return KindChoice(races[0], races[1])


def make_up(
    subject: tuple[LayerAttention, AttentionCall],
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> MadeUp:
    """Return a batch of sequences of ``(new tokens, context)`` over random codes.

    Every KV head has scales of its own, so that a head or a scale taken for another shows.
    """
    layer, call = subject
    _, num_kv_heads, block_size, head_dim = layer.k_codes.shape
    device, num_heads = layer.k_codes.device, layer.geometry.num_heads
    generator = torch.Generator(device).manual_seed(8)
    num_blocks = sum(-(-context // block_size) for _, context in lengths)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_codes, v_codes = random_codes(layer.format, shape, device, generator)
    spread = 1 + torch.arange(num_kv_heads, device=device) % 4 / 4
    size = _LOGIT_SIZE / (call.softmax_scale * head_dim**0.5)
    head_size = torch.full((num_heads,), size, device=device)
    k_scale = v_scale = None
    if layer.format.quantized:
        k_scale, v_scale = CODE_SCALE * spread, CODE_SCALE * spread.flip(0)
        head_size /= spread.repeat_interleave(num_heads // num_kv_heads)
    num_tokens = sum(new for new, _ in lengths)
    drawn = torch.randn(num_tokens, num_heads, head_dim, device=device, generator=generator)
    return MadeUp(
        layer=replace(
            layer,
            group=0,
            k_codes=k_codes,
            v_codes=v_codes,
            k_scale=k_scale,
            v_scale=v_scale,
            q_scale=None if layer.q_scale is None else CODE_SCALE * head_size,
            counters=None,
        ),
        batch=made_up_batch(lengths, block_size, device),
        query=(drawn * head_size[:, None]).to(dtype),
        call=call,
    )


def _check_agreement(made_up: MadeUp, triton: AttentionBackend, flash3: AttentionBackend) -> None:
    """Raise `DisagreementError` where the two differ by more than roundings explain."""
    num_tokens, layer = made_up.batch.num_tokens, made_up.layer
    rows = torch.linspace(0, num_tokens - 1, min(num_tokens, _MOST_ROWS)).round().long()
    rows = rows.to(made_up.query.device)
    expected, found = (made_up.attend(b)[rows].float() for b in (triton, flash3))
    plain = layer.v_codes.clone()  # without their signs
    if layer.format.quantized:
        bits(plain).bitwise_and_(0x7F)
    else:
        plain.abs_()
    unsigned = replace(made_up, layer=replace(layer, v_codes=plain)).attend(triton)[rows].float()
    bound = unsigned * 1.25 * 2.0 ** (-3 if layer.q_scale is not None else -7)
    bound += 2 * 2.0**-8 * expected.abs()
    if layer.q_scale is not None and layer.v_scale is not None:
        per_head = layer.v_scale.repeat_interleave(layer.geometry.num_heads // len(layer.v_scale))
        longest = max(made_up.batch.context_lens_host)
        bound += longest * 2.0**-16 * per_head[:, None] / CODE_SCALE
    if not ((found - expected).abs() <= bound).all():
        share = ((found - expected).abs() / bound).nan_to_num(torch.inf).max()
        raise DisagreementError(
            f"it differs from the triton kernels by {float(share):.3g} times what roundings explain"
        )


def _race(
    made_up: MadeUp, triton: AttentionBackend, flash3: AttentionBackend, timer: Timer
) -> Race:
    """Return what both take, in turns, so that a device whose speed drifts favours neither."""
    seconds: tuple[list[float], list[float]] = ([], [])
    work: list[Callable[[], object]] = [partial(made_up.attend, b) for b in (triton, flash3)]
    for each in work:  # once more, beside the comparison, to warm up
        timer(each)
    while len(seconds[0]) < _REPEATS and max(map(sum, seconds)) < _MOST_SECONDS:
        for taken, each in zip(seconds, work, strict=True):
            taken.append(timer(each))
    return Race(*map(statistics.median, seconds))
