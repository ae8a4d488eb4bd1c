"""The manager's promises one at a time; `tests/property/test_cache_manager.py` mixes them."""

import pytest
from tests.cache_models import make_geometry, make_plan

from kv8.cache.layout import make_layout
from kv8.cache.manager import CacheManager

B = 4


def make_manager(windows=(None,), formats="fp8_e4m3", num_blocks=32, max_chunk=64, **more):
    geometry = make_geometry(windows, max_position=64)
    layout = make_layout(geometry, make_plan(geometry, formats), B, max_chunk)
    options = {"enable_prefix_caching": True, "digest_key": b"key", **more}
    return CacheManager(layout, num_blocks, **options)


def compute(manager, seq, tokens, *, stop=None, chunk=64, **more):
    """Start, reserve and commit ``tokens`` up to ``stop``; return the tokens found in the cache."""
    cached = manager.start(seq, tokens, **more)
    stop = len(tokens) if stop is None else stop
    for begin in range(cached, stop, chunk):
        assert manager.reserve(seq, min(stop, begin + chunk))
        manager.commit(seq, tokens, min(stop, begin + chunk))
    manager.check_invariants()
    return cached


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (B, 0), (B + 1, B), (2 * B, B), (2 * B + 1, 2 * B)]
)
def test_a_repeat_finds_whole_blocks_and_computes_at_least_one_token(length, expected):
    manager = make_manager()
    tokens = list(range(length))
    assert compute(manager, 0, tokens) == 0
    manager.release(0)
    assert compute(manager, 1, tokens) == expected


def test_running_sequences_share_blocks():
    manager = make_manager()
    tokens = list(range(10))
    compute(manager, 0, tokens)
    free = manager.num_free_blocks
    assert compute(manager, 1, tokens) == 8
    assert manager.block_table(0, 0)[:2] == manager.block_table(1, 0)[:2]
    assert manager.block_table(0, 0)[2] != manager.block_table(1, 0)[2]
    assert manager.num_free_blocks == free - 1
    manager.release(0)
    manager.check_invariants()
    assert manager.num_cached_blocks == 0, "the shared blocks are still referenced"


def test_nothing_is_found_before_it_is_stored():
    manager = make_manager()
    tokens = list(range(10))
    manager.start(0, tokens)
    assert manager.reserve(0, 10)
    assert manager.start(1, tokens) == 0
    manager.commit(0, tokens, 7)
    assert manager.start(2, tokens) == 4


def test_a_prefix_counts_from_the_first_token():
    """Equal blocks after different beginnings hold different keys and values."""
    manager = make_manager()
    compute(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert compute(manager, 1, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert compute(manager, 2, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 4


def test_equal_prompts_side_by_side_own_their_blocks():
    """Both are computed at once, so neither finds the other; only one copy is kept for later."""
    manager = make_manager()
    tokens = list(range(9))
    for seq in (0, 1):
        manager.start(seq, tokens)
        assert manager.reserve(seq, 9)
    assert set(manager.block_table(0, 0)).isdisjoint(manager.block_table(1, 0))
    for seq in (0, 1):
        manager.commit(seq, tokens, 9)
        manager.check_invariants()
    manager.release(0)
    manager.release(1)
    manager.check_invariants()
    assert manager.num_cached_blocks == 2
    assert compute(manager, 2, tokens) == 8


def test_prompts_can_be_computed_in_full_and_still_serve_others():
    manager = make_manager()
    tokens = list(range(9))
    compute(manager, 0, tokens)
    assert compute(manager, 1, tokens, reuse_prefix=False) == 0
    assert compute(manager, 2, tokens) == 8


def test_prefix_caching_can_be_switched_off():
    manager = make_manager(enable_prefix_caching=False)
    tokens = list(range(9))
    compute(manager, 0, tokens)
    manager.release(0)
    assert manager.num_cached_blocks == 0
    assert compute(manager, 1, tokens) == 0


def test_fp8_and_prefix_reuse_are_both_on():
    """Pitfall 55: an FP8 layout reuses prefixes, plain or hybrid, and the counts say so."""
    for windows in ((None,), (8, None)):
        manager = make_manager(windows, "fp8_e4m3")
        tokens = list(range(21))
        compute(manager, 0, tokens)
        assert manager.enable_prefix_caching
        assert compute(manager, 1, tokens) == 20
        assert manager.stats.hit_tokens == 20


@pytest.mark.parametrize("windows", [(None,), (8, None), (8,)])
def test_other_scales_or_weights_find_nothing(windows):
    """Pitfall 48: after the key changes, the same prompt has no cached token."""
    manager = make_manager(windows)
    tokens = list(range(13))
    compute(manager, "running", tokens)
    compute(manager, "done", tokens)
    manager.release("done")
    manager.reset(b"other scales")
    manager.check_invariants()
    assert manager.num_cached_blocks == 0
    assert compute(manager, "new", tokens) == 0
    # What was running goes on, and leaves nothing behind that the new key could find.
    longer = [*tokens, *range(100, 120)]
    manager.release("new")
    manager.reset(b"other scales")
    assert manager.reserve("running", 33)
    manager.commit("running", longer, 33)
    manager.release("running")
    assert compute(manager, "newer", longer) == 0


def test_the_key_is_part_of_every_digest():
    """Pitfall 48: under another key not even an index that was kept would match."""
    manager = make_manager(digest_key=b"a")
    tokens = list(range(9))
    compute(manager, 0, tokens)
    manager.release(0)
    manager._root = make_manager(digest_key=b"b")._root
    assert manager.start(1, tokens) == 0


def test_cached_blocks_are_evicted_longest_unused_first_and_tails_before_heads():
    manager = make_manager(num_blocks=8)
    old, new = list(range(13)), list(range(100, 113))
    for seq, tokens in enumerate((old, new)):
        compute(manager, seq, tokens)
        manager.release(seq)
    assert manager.num_free_blocks == 8
    assert manager.num_cached_blocks == 6
    manager.start("big", list(range(200, 212)))
    assert manager.reserve("big", 12)  # two free blocks, and the tail of the older prompt
    assert manager.stats.evictions == 1
    manager.check_invariants()
    manager.release("big")
    assert manager.start("old", old) == 8
    assert manager.start("new", new) == 12


def test_use_makes_a_prefix_young_again():
    manager = make_manager(num_blocks=6)
    first, second = list(range(9)), list(range(100, 109))
    for seq, tokens in enumerate((first, second, first)):
        compute(manager, seq, tokens)
        manager.release(seq)
    manager.start("big", list(range(200, 216)))
    assert manager.reserve("big", 16)
    assert manager.start("first", first) == 8
    assert manager.start("second", second) == 0


def test_a_refused_reservation_changes_nothing():
    manager = make_manager((8, None), num_blocks=9)
    compute(manager, 0, list(range(8)))
    table = list(manager.block_table(0, 0))
    free = manager.num_free_blocks
    manager.start(1, list(range(50, 70)))
    assert not manager.reserve(1, 20)
    assert (manager.num_free_blocks, list(manager.block_table(0, 0))) == (free, table)
    assert list(manager.block_table(1, 0)) == []
    manager.check_invariants()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_window_groups_hold_no_more_than_the_next_query_sees(window):
    """Not a block too few (the property test) and not one too many."""
    manager = make_manager((window, None), num_blocks=64)
    tokens = list(range(40))
    manager.start(0, tokens)
    for stop in range(1, 41):
        assert manager.reserve(0, stop)
        manager.commit(0, tokens, stop)
        visible = {k // B for k in range(max(0, stop - window + 1), stop)}
        partly_filled = {stop // B} if stop % B else set()
        full = -(-stop // B)
        held = manager.num_blocks - manager.num_free_blocks - full
        assert held == len(visible | partly_filled)
    manager.check_invariants()


def test_hybrids_find_prefixes_as_long_as_the_last_window_is_stored():
    manager = make_manager((8, None), num_blocks=64)
    tokens = list(range(41))
    compute(manager, 0, tokens, chunk=10)
    assert compute(manager, 1, tokens) == 40
    table = manager.block_table(1, 1)
    # Only the last window's blocks are referenced; entries before it are valid numbers.
    assert len(table) == 11
    assert all(0 <= entry < 64 for entry in table)


def test_blocks_of_parts_are_named_part_by_part():
    """Full layers in half the bytes: a block holds two entries of the block table."""
    manager = make_manager((8, None), ["bfloat16", "fp8_e4m3"])
    full, window = manager.layout.groups
    assert (full.parts, window.parts) == (2, 1)
    tokens = list(range(20))
    compute(manager, 0, tokens)
    table = list(manager.block_table(0, full.index))
    assert len(table) == 6
    assert all(table[i] + 1 == table[i + 1] for i in range(0, 6, 2))
    assert all(table[i] % 2 == 0 for i in range(0, 6, 2))
    # A prefix ends where a block of every group does: at 16, not at 20.
    assert compute(manager, 1, [*tokens, 1, 2, 3]) == 16


def test_admission_counts_what_a_sequence_still_takes():
    manager = make_manager((8, None), num_blocks=20, max_chunk=8)
    tokens = list(range(41))
    assert manager.blocks_needed(None, 41) == 11 + 5
    assert manager.can_hold(None, 41)
    assert manager.fits_alone(41)
    assert not manager.fits_alone(100)
    manager.start(0, tokens)
    assert manager.reserve(0, 8)
    assert manager.blocks_needed(0, 41) == 9 + 3
    manager.commit(0, tokens, 8)
    manager.start(1, list(range(100, 141)))
    assert manager.can_hold(1, 41) == (manager.blocks_needed(1, 41) <= manager.num_free_blocks)


def test_counts_cover_sequences_that_got_memory():
    """Started and released for want of memory, step after step, is not a hit each time."""
    manager = make_manager()
    tokens = list(range(9))
    compute(manager, 0, tokens)
    for _ in range(5):
        manager.start(1, tokens)
        manager.release(1)
    compute(manager, 1, tokens)
    stats = manager.stats
    assert (stats.queries, stats.query_tokens, stats.hit_tokens) == (2, 18, 8)
    stats.queries = 99
    assert manager.stats.queries == 2, "a reader's copy"


def test_another_continuation_after_a_rollback_reads_nothing_stale():
    """Pitfall 66: give up after 40 tokens, go back 7, append 7 others: no block of the old tail."""
    manager = make_manager(num_blocks=64)
    first = list(range(40))
    compute(manager, 0, first)
    old = list(manager.block_table(0, 0))
    manager.release(0)
    second = first[:33] + list(range(900, 907))
    assert compute(manager, 1, second) == 32
    assert list(manager.block_table(1, 0))[:8] == old[:8]
    manager.release(1)
    # Both continuations are stored by now, and each finds its own.
    assert compute(manager, 2, second) == 36
    assert compute(manager, 3, first) == 36
    assert manager.block_table(2, 0)[8] != manager.block_table(3, 0)[8]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m._pool._free.append(m._pool._free[-1]), "free list twice"),
        (lambda m: m._pool._references.__setitem__(0, 5), "reference counts"),
        (lambda m: m._pool._free.pop(), "free blocks"),
        (lambda m: m._index._keys.popitem(), "prefix index"),
        (lambda m: m._sequences[0].groups[0].append(31), "reference counts|reach|table"),
        (lambda m: m._sequences[0].groups[0].blocks.pop(), "lacks|reaches"),
        (lambda m: setattr(m._sequences[0].groups[0], "first_held", 1), "holds from block"),
        (
            lambda m: (
                m._sequences[0]
                .groups[1]
                .blocks.__setitem__(-1, m._sequences[0].groups[0].blocks[-1])
            ),
            "two groups",
        ),
        (lambda m: m._pool._cached.__setitem__(m._pool._free.pop(), None), "cached blocks"),
    ],
)
def test_check_invariants_notices_damage(damage, message):
    manager = make_manager((8, None))
    compute(manager, 0, list(range(10)))
    manager.check_invariants()
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_invariants()


def test_ten_thousand_prompts_pass_through_a_small_cache():
    """Work per prompt does not grow with what was served before; nothing leaks."""
    manager = make_manager(num_blocks=16)
    for seq in range(10_000):
        tokens = [seq % 7, seq % 5, seq % 3, 1, seq, 2]
        manager.start(seq, tokens)
        assert manager.reserve(seq, 6)
        manager.commit(seq, tokens, 6)
        manager.release(seq)
    manager.check_invariants()
    assert manager.num_free_blocks == 16
