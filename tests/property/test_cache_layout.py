"""Any mix of windows, head sizes and formats: bytes add up, and no two codes share one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache_models import make_geometry, make_plan

from kv8.cache.capacity import capacity, longest_sequence, memory_for
from kv8.cache.layout import Arrangement, make_layout
from kv8.cache.pool import KVPool

FORMATS = ["fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"]


@st.composite
def models(draw, most_layers=12):
    num_layers = draw(st.integers(1, most_layers))

    def each(values):
        return draw(st.lists(values, min_size=num_layers, max_size=num_layers))

    sources = {}
    if num_layers > 1 and draw(st.booleans()):
        sources = {num_layers - 1: 0}
    windows = draw(st.sampled_from([[None], [16], [None, 16], [None, 7, 64]]))
    head_dims = draw(st.sampled_from([[64], [16, 32], [17, 80, 256]]))
    formats = draw(st.sampled_from([["fp8_e4m3"], ["bfloat16"], ["fp8_e4m3", "bfloat16"], FORMATS]))
    geometry = make_geometry(
        each(st.sampled_from(windows)),
        num_kv_heads=each(st.integers(1, 3)),
        head_dim=each(st.sampled_from(head_dims)),
        kv_sources=sources,
        max_position=draw(st.sampled_from([64, 32768])),
    )
    names = each(st.sampled_from(formats))
    for reader, source in sources.items():
        names[reader] = names[source]
    return geometry, make_plan(geometry, names)


@given(models(), st.sampled_from([1, 3, 4, 16]), st.integers(1, 6))
@settings(max_examples=150)
def test_no_byte_of_a_block_belongs_to_two_layers(model, block_size, num_blocks):
    """Pitfall 34, by arithmetic: addresses of one group never overlap, nor leave the arena.

    Layers of different groups may share addresses, in different blocks; so each address is also
    checked to lie in the bytes of its own block.
    """
    geometry, plan = model
    layout = make_layout(geometry, plan, block_size, 64)
    arena_bytes = num_blocks * layout.block_bytes
    owner_block: dict[int, set[int]] = {}
    for group in layout.groups:
        seen = bytearray(arena_bytes)
        for number in group.layers:
            place = layout.placement(number, num_blocks)
            assert place.num_parts == num_blocks * group.parts
            item_bytes = plan.format(number).bytes_per_value
            for offset in (place.k_offset, place.v_offset):
                assert offset % item_bytes == 0
                assert place.stride % item_bytes == 0
                for part in range(place.num_parts):
                    start = offset + part * place.stride
                    stop = start + place.side_bytes
                    assert stop <= arena_bytes
                    assert not any(seen[start:stop])
                    seen[start:stop] = b"\x01" * place.side_bytes
                    for edge in (start, stop - 1):
                        owner_block.setdefault(edge, set()).add(part // group.parts)
        assert sum(seen) == num_blocks * group.used_bytes
    assert all(len(blocks) == 1 for blocks in owner_block.values()), "two blocks share a byte"


@given(models(most_layers=8), st.sampled_from([1, 4, 16]))
@settings(max_examples=60)
def test_blocks_of_different_groups_keep_their_contents(model, block_size):
    """Pitfall 34, by writing: each group fills its own blocks, and every one reads back whole."""
    geometry, plan = model
    layout = make_layout(geometry, plan, block_size, 64)
    num_blocks = 2 * len(layout.groups)
    pool = KVPool(layout, geometry, plan, num_blocks, "cpu", fill=255)
    written = []
    for number, group_index in layout.group_by_layer.items():
        if number not in layout.slots:
            continue
        parts = layout.groups[group_index].parts
        for side, codes in enumerate(pool.codes(number)):
            for block in (group_index, group_index + len(layout.groups)):
                for entry in range(block * parts, (block + 1) * parts):
                    bits = codes[entry].view(torch.uint8)
                    value = (31 * number + 17 * side + 7 * entry) % 251
                    bits.fill_(value)
                    written.append((bits, value))
    assert all(bool((bits == value).all()) for bits, value in written)


@given(models(), st.sampled_from([1, 4, 16]))
@settings(max_examples=150)
def test_groups_partition_the_layers_and_bytes_add_up(model, block_size):
    geometry, plan = model
    layout = make_layout(geometry, plan, block_size, 64)
    listed = [number for group in layout.groups for number in group.layers]
    assert sorted(listed) == [layer.layer for layer in geometry.kv_layers]
    assert [group.index for group in layout.groups] == list(range(len(layout.groups)))
    for layer in geometry.layers:
        assert layout.group_of(layer.layer) == layout.group_of(layer.kv_source)
        group = layout.groups[layout.group_of(layer.layer)]
        assert group.window is None or (layer.window is not None and layer.window <= group.window)
    expected = sum(
        layer.values_per_token * plan.format(layer.layer).bytes_per_value
        for layer in geometry.kv_layers
    )
    assert layout.bytes_per_token == expected
    assert sum(g.used_bytes // g.block_tokens for g in layout.groups) == expected
    assert 0 <= layout.padding_bytes < len(layout.groups) * layout.block_bytes
    if len({group.window for group in layout.groups}) == 1:
        assert len(layout.groups) == 1
        assert layout.padding_bytes == 0
        assert layout.arrangement is Arrangement.SLOT_MAJOR


@given(
    models(),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 300),
    st.integers(0, 3000),
    st.integers(1, 2000),
)
@settings(max_examples=200)
def test_more_memory_never_holds_less(model, block_size, chunk, num_blocks, max_model_len):
    geometry, plan = model
    layout = make_layout(geometry, plan, block_size, chunk)
    memory = num_blocks * layout.block_bytes
    less, more = (
        capacity(layout, memory + extra, max_model_len) for extra in (0, layout.block_bytes)
    )
    assert (less.num_blocks, more.num_blocks) == (num_blocks, num_blocks + 1)
    assert less.tokens <= more.tokens
    assert less.max_concurrency <= more.max_concurrency
    assert less.fits == (less.max_concurrency >= 1)
    if more.longest_sequence is not None:
        assert less.longest_sequence is not None
        assert less.longest_sequence <= more.longest_sequence
    if all(group.window is None for group in layout.groups):
        assert less.tokens == less.num_blocks * block_size
        assert less.longest_sequence == less.tokens


@given(models(), st.integers(1, 300), st.integers(0, 3000))
@settings(max_examples=200)
def test_memory_for_is_the_inverse_of_the_longest_sequence(model, chunk, num_blocks):
    """Pitfall 62: the longest length fits the memory, and no longer one does."""
    geometry, plan = model
    layout = make_layout(geometry, plan, 16, chunk)
    longest = longest_sequence(layout, num_blocks)
    memory = num_blocks * layout.block_bytes
    if longest is None:
        assert memory_for(layout, 10**9) <= memory
    else:
        assert memory_for(layout, longest) <= memory < memory_for(layout, longest + 1)
        again = longest_sequence(layout, memory_for(layout, longest + 1) // layout.block_bytes)
        assert again is None or again > longest
