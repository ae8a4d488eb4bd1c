"""Bytes, blocks, tokens and requests, turned into each other."""

import pytest
from tests.cache_models import gemma3_270m, make_geometry, make_plan, skip_sliding, smollm2

from kv8.cache.capacity import (
    capacity,
    decode_blocks,
    longest_sequence,
    memory_for,
    peak_blocks,
)
from kv8.cache.gain import capacity_gain, describe_gain
from kv8.cache.layout import make_layout
from kv8.cache.manager import CacheManager
from kv8.cache.pool import KVPool

GIB = 2**30


def make(geometry, formats="fp8_e4m3", block_size=16, max_chunk=2048):
    return make_layout(geometry, make_plan(geometry, formats), block_size, max_chunk)


@pytest.mark.parametrize(
    ("name", "num_blocks", "tokens"),
    [("bfloat16", 2912, 46_592), ("fp8_e4m3", 5825, 93_200), ("fp8_e5m2", 5825, 93_200)],
)
def test_one_gibibyte_of_smollm2(name, num_blocks, tokens):
    """Pitfall 55, pitfall 63: prefix reuse costs no capacity, and no block is reserved for it."""
    held = capacity(make(smollm2(), name), GIB, 8192)
    assert (held.num_blocks, held.tokens) == (num_blocks, tokens)
    assert held.bytes_per_token == (23_040 if name == "bfloat16" else 11_520)
    assert held.longest_sequence == tokens
    assert held.max_concurrency == num_blocks / 512
    assert held.cache_bytes <= GIB < held.cache_bytes + held.block_bytes


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
@pytest.mark.parametrize("memory", [GIB, GIB + 12345, 10**9, 184_320 * 77])
def test_fp8_codes_are_exactly_half(block_size, memory):
    """Half the bytes a token and a block; a pool of the same blocks is half as large."""
    geometry = smollm2()
    plain = make(geometry, "bfloat16", block_size)
    fp8 = make(geometry, "fp8_e4m3", block_size)
    assert plain.bytes_per_token == 2 * fp8.bytes_per_token
    assert plain.block_bytes == 2 * fp8.block_bytes
    assert plain.scale_bytes == 0 < fp8.scale_bytes
    assert capacity(plain, memory, 64).num_blocks == capacity(fp8, memory // 2, 64).num_blocks
    assert capacity(fp8, memory, 64).num_blocks // 2 == capacity(plain, memory, 64).num_blocks


def fill(manager, prompts, max_chunk):
    """Compute the prompts one after the other, in chunks; return how many chunks found no room."""
    refused = 0
    for name, tokens in enumerate(prompts):
        manager.start(name, tokens)
        for start in range(0, len(tokens), max_chunk):
            stop = min(len(tokens), start + max_chunk)
            if not manager.reserve(name, stop):
                refused += 1
                break
            manager.commit(name, tokens, stop)
    return refused


@pytest.mark.parametrize("max_model_len", [64, 100, 333])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_filling_to_the_printed_number_succeeds_and_one_block_more_fails(
    max_model_len, prefix_caching
):
    layout = make(make_geometry([None] * 3), max_chunk=48)
    held = capacity(layout, 50 * layout.block_bytes + 7, max_model_len)
    assert held.tokens == 50 * 16
    lengths = [max_model_len // 16 * 16] * (held.tokens // (max_model_len // 16 * 16))
    lengths.append(held.tokens - sum(lengths))
    prompts = [[1000 * i + n for n in range(length)] for i, length in enumerate(lengths) if length]
    manager = CacheManager(
        layout, held.num_blocks, enable_prefix_caching=prefix_caching, digest_key=b""
    )
    assert fill(manager, prompts, 48) == 0
    assert manager.num_free_blocks == 0
    assert manager.usage() == 1
    manager.start("one more", [1])
    assert not manager.reserve("one more", 1)
    manager.check_invariants()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("num_blocks", [700, 1000, 3001])
def test_hybrids_hold_the_printed_number_too(num_blocks, skip):
    """Requests of the greatest length one after the other, the last as long as fits; chunked."""
    geometry = gemma3_270m()
    plan = skip_sliding(geometry) if skip else make_plan(geometry, "fp8_e4m3")
    layout = make_layout(geometry, plan, 16, 256)
    held = capacity(layout, num_blocks * layout.block_bytes, 1600)
    assert held.tokens > 0
    lengths = [1600] * (held.tokens // 1600) + [held.tokens % 1600]
    prompts = [
        [10_000 * i + n for n in range(length)] for i, length in enumerate(lengths) if length
    ]
    manager = CacheManager(layout, held.num_blocks, enable_prefix_caching=True, digest_key=b"")
    assert fill(manager, prompts, 256) == 0
    manager.check_invariants()


def test_prefill_of_window_layers_is_part_of_the_answer():
    """Pitfall 64: what a chunk holds beyond the window counts, so a larger chunk fits less."""
    geometry = make_geometry([32] * 4 + [None])
    layouts = [make(geometry, max_chunk=chunk) for chunk in (16, 256, 1024)]
    longest = [longest_sequence(layout, 600) for layout in layouts]
    assert longest == sorted(longest, reverse=True)
    assert longest[0] > longest[2]
    # Decoding needs the window alone, whatever the chunk.
    assert len({decode_blocks(layout, 4096) for layout in layouts}) == 1


@pytest.mark.parametrize(
    "geometry",
    [smollm2(), gemma3_270m(), make_geometry([64] * 3), make_geometry([5, None, 300])],
    ids=["uniform", "hybrid", "windows only", "two windows"],
)
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 100, 1000])
def test_the_longest_length_starts_and_the_next_does_not(geometry, num_blocks):
    """Pitfall 62: the length a refusal suggests really works, and one block more is refused."""
    layout = make(geometry, max_chunk=256)
    memory = num_blocks * layout.block_bytes
    longest = longest_sequence(layout, num_blocks)
    if longest is None:
        assert capacity(layout, memory, 10**9).fits
        return
    if longest > 0:
        suggested = capacity(layout, memory, longest)
        assert suggested.fits
        assert suggested.max_concurrency >= 1
        assert suggested.tokens >= longest
        assert memory_for(layout, longest) <= memory
        manager = CacheManager(layout, num_blocks, enable_prefix_caching=True, digest_key=b"")
        assert fill(manager, [list(range(longest))], 256) == 0
    refused = capacity(layout, memory, longest + 1)
    assert not refused.fits
    assert refused.max_concurrency < 1
    assert memory_for(layout, longest + 1) > memory
    # ... and the memory it asks for is enough, at the same settings.
    assert capacity(layout, memory_for(layout, longest + 1), longest + 1).fits


def test_a_model_of_windows_alone_has_no_longest_sequence():
    layout = make(make_geometry([64] * 3), max_chunk=256)
    enough = peak_blocks(layout, 10**6)
    assert longest_sequence(layout, enough) is None
    assert longest_sequence(layout, enough - 1) is not None


def test_less_than_a_block_holds_nothing_and_says_so():
    layout = make(smollm2())
    held = capacity(layout, layout.block_bytes - 1, 100)
    assert (held.num_blocks, held.tokens, held.longest_sequence) == (0, 0, 0)
    assert held.max_concurrency == 0
    assert not held.fits


def test_capacity_reads_as_a_sentence():
    assert str(capacity(make(smollm2()), GIB, 8192)) == (
        "93,200 tokens in 5,825 blocks of 16 (1023.93 MiB of 1.00 GiB, 11,520 bytes a token): "
        "11.38 requests of 8,192 tokens at once"
    )


def test_the_gain_of_a_uniform_model_is_that_of_the_format():
    gain = capacity_gain(smollm2(), make(smollm2()), 8192)
    assert gain.ratio == 2
    assert gain.limiting is None
    assert str(gain) == "2.00x the sequences of 8,192 tokens"


@pytest.mark.parametrize("num_tokens", [128, 1600, 32768])
@pytest.mark.parametrize("skip", [False, True])
def test_the_gain_of_a_hybrid_is_what_is_allocated(num_tokens, skip):
    """Pitfall 60: bytes by window class for both dtypes; the ratio is that of allocated blocks."""
    geometry = gemma3_270m()
    plans = (
        make_plan(geometry, "bfloat16"),
        skip_sliding(geometry) if skip else make_plan(geometry, "fp8_e4m3"),
    )
    held = []
    for plan in plans:
        layout = make_layout(geometry, plan, 16, 256)
        manager = CacheManager(layout, 20_000, enable_prefix_caching=True, digest_key=b"")
        tokens = list(range(num_tokens))
        most = 0
        manager.start(0, tokens)
        for stop in range(1, num_tokens + 1):
            assert manager.reserve(0, stop)
            most = max(most, manager.num_blocks - manager.num_free_blocks)
            manager.commit(0, tokens, stop)
        pool = KVPool(layout, geometry, plan, most, "cpu")
        held.append(pool.storage_bytes)
    gain = capacity_gain(geometry, layout, num_tokens)
    assert sum(c.model_dtype_bytes for c in gain.classes) == held[0]
    assert sum(c.held_bytes for c in gain.classes) == held[1]
    assert gain.ratio == held[0] / held[1]
    assert f": {gain.ratio:.2f}x the sequences" in describe_gain(geometry, layout, num_tokens)
    if skip:
        assert 1 < gain.ratio < 2
        assert gain.limiting is not None
        assert gain.limiting.window == 512
        assert gain.limiting.layers == tuple(n for n in range(18) if n % 6 != 5)
        assert "limited by 15 layers with a window of 512: " in str(gain)
    else:
        assert gain.ratio == 2
        assert gain.limiting is None
