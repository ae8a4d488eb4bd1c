"""Groups, bytes of a block and addresses."""

from dataclasses import replace

import pytest
from tests.cache_models import gemma3_270m, make_geometry, make_plan, skip_sliding, smollm2

from kv8.cache.layout import Arrangement, make_layout
from kv8.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("name", "block_bytes"), [("bfloat16", 368_640), ("fp8_e4m3", 184_320), ("fp8_e5m2", 184_320)]
)
def test_smollm2_is_one_group_without_padding(name, block_bytes):
    layout = make_layout(smollm2(), make_plan(smollm2(), name), 16, 2048)
    assert layout.block_bytes == block_bytes
    assert layout.padding_bytes == 0
    assert layout.bytes_per_token * 16 == block_bytes
    assert layout.arrangement is Arrangement.SLOT_MAJOR
    (group,) = layout.groups
    assert group.layers == tuple(range(30))


def test_layers_of_unlike_formats_but_one_window_share_a_group():
    geometry = make_geometry([None] * 4)
    plan = make_plan(geometry, ["bfloat16", "fp8_e4m3", "fp8_e4m3", "bfloat16"])
    layout = make_layout(geometry, plan, 16, 2048)
    assert [g.layers for g in layout.groups] == [(0, 3, 1, 2)]
    assert layout.padding_bytes == 0
    assert layout.arrangement is Arrangement.SLOT_MAJOR


@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3"])
def test_gemma3_has_six_groups_of_three_layers(name):
    layout = make_layout(gemma3_270m(), make_plan(gemma3_270m(), name), 16, 2048)
    assert [len(g.layers) for g in layout.groups] == [3] * 6
    assert [g.window for g in layout.groups] == [None] + [512] * 5
    assert layout.padding_bytes == 0
    assert layout.arrangement is Arrangement.SLOT_MAJOR


def test_gemma3_with_16_bit_windows_wastes_nothing():
    """Pitfall 58: window layers in 16 bits beside full layers in 8; memory is the layers' sum."""
    geometry = gemma3_270m()
    plan = skip_sliding(geometry)
    layout = make_layout(geometry, plan, 16, 2048)
    assert layout.bytes_per_token == sum(
        x.values_per_token * plan.format(x.layer).bytes_per_value for x in geometry.layers
    )
    assert layout.bytes_per_token == 15 * 2 * 256 * 2 + 3 * 2 * 256
    assert layout.padding_bytes == 0
    assert [g.parts for g in layout.groups] == [2, 1, 1, 1, 1, 1]
    assert [g.block_tokens for g in layout.groups] == [32, 16, 16, 16, 16, 16]
    assert layout.arrangement is Arrangement.PAGE_MAJOR


def test_padding_is_paid_rather_than_a_group_for_every_layer():
    """29 window layers and 5 full ones: one layer's worth of 35 stays unused, and is reported."""
    geometry = make_geometry(([1024] * 5 + [None]) * 5 + [1024] * 4, max_position=131072)
    layout = make_layout(geometry, make_plan(geometry, "fp8_e4m3"), 16, 2048)
    assert len(layout.groups) == 7
    assert layout.padding_bytes == layout.block_bytes // 5
    assert layout.arrangement is Arrangement.SLOT_MAJOR


@pytest.mark.parametrize(
    "formats",
    [
        ["bfloat16"] * 6,
        ["fp8_e4m3"] * 6,
        ["bfloat16", "fp8_e4m3"] * 3,
        ["fp8_e4m3", "bfloat16"] * 3,
        ["float32", "fp8_e4m3", "bfloat16"] * 2,
    ],
)
@pytest.mark.parametrize("head_dims", [[16, 32], [64, 80], [48, 17]])
@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_page_sizes_that_do_not_divide(formats, head_dims, block_size):
    """Pitfall 59: two head sizes with every mix of formats have a layout, and padding is known."""
    geometry = make_geometry([7, None] * 3, num_kv_heads=[1, 2] * 3, head_dim=head_dims * 3)
    plan = make_plan(geometry, formats)
    layout = make_layout(geometry, plan, block_size, 64)
    for group in layout.groups:
        of_a_token = sum(
            geometry.layer(n).values_per_token * plan.format(n).bytes_per_value
            for n in group.layers
        )
        assert group.used_bytes == of_a_token * group.block_tokens
        assert group.used_bytes <= layout.block_bytes
    assert layout.padding_bytes == sum(layout.block_bytes - g.used_bytes for g in layout.groups)
    assert sorted(n for g in layout.groups for n in g.layers) == list(range(6))


def test_layers_that_read_others_take_their_group_and_no_bytes():
    geometry = make_geometry([8, None, 8, None], kv_sources={2: 0, 3: 1})
    layout = make_layout(geometry, make_plan(geometry, "bfloat16"), 16, 64)
    assert layout.group_of(2) == layout.group_of(0)
    assert layout.group_of(3) == layout.group_of(1)
    assert layout.bytes_per_token == 2 * 2 * 2 * 16 * 2
    with pytest.raises(KeyError):
        layout.group_of(4)


@pytest.mark.parametrize(("reader", "expected"), [(None, None), (64, 64), (4, 8)])
def test_a_source_keeps_what_its_widest_reader_sees(reader, expected):
    geometry = make_geometry([8, reader], kv_sources={1: 0})
    layout = make_layout(geometry, make_plan(geometry, "bfloat16"), 16, 64)
    assert [g.window for g in layout.groups] == [expected]


def test_scale_bytes_are_stated_apart():
    """Scales of K and V, and two sets of four counters, for quantized layers alone."""
    geometry = smollm2()
    quantized = make_layout(geometry, make_plan(geometry, "fp8_e4m3"), 16, 2048)
    plain = make_layout(geometry, make_plan(geometry, "bfloat16"), 16, 2048)
    assert quantized.scale_bytes == 30 * 2 * (3 * 4 + 4 * 8)
    assert plain.scale_bytes == 0


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [(None, 10**6, 0), (1, 5, 1), (1, 4, 1), (1, 3, 0), (4, 7, 1), (4, 6, 0), (5, 7, 0), (5, 8, 1)],
)
def test_first_visible_block_is_the_first_with_a_visible_key(window, position, first):
    geometry = make_geometry([window])
    (group,) = make_layout(geometry, make_plan(geometry, "bfloat16"), 4, 64).groups
    assert group.first_visible_block(position) == first
    visible = [k for k in range(position + 1) if window is None or k > position - window]
    assert visible[0] // 4 == first


def test_a_model_that_stores_nothing_is_refused():
    empty = replace(make_geometry([None]), layers=())
    with pytest.raises(UnsupportedModelError, match="TestForCausalLM has no attention layer"):
        make_layout(empty, make_plan(empty, "bfloat16"), 16, 64)
