"""The arena and its views."""

import os

import pytest
import torch
from tests.cache_models import gemma3_270m, make_geometry, make_plan, skip_sliding, smollm2

from kv8.cache import pool as pool_module
from kv8.cache.layout import Arrangement, make_layout
from kv8.cache.pool import KVPool
from kv8.errors import CapacityError

MIXED = ["float32", "fp8_e4m3", "bfloat16", "fp8_e5m2"]
GEOMETRIES = {
    "uniform": (make_geometry([None] * 3), "fp8_e4m3"),
    "uniform in 16 bits": (make_geometry([None] * 3), "bfloat16"),
    "one window class, mixed formats": (make_geometry([None] * 4), MIXED),
    "hybrid": (make_geometry([8, 8, None] * 2), "fp8_e4m3"),
    "padded": (make_geometry([8, 8, 8, None]), ["bfloat16", "bfloat16", "bfloat16", "fp8_e4m3"]),
    "parts": (make_geometry([8, None]), ["bfloat16", "fp8_e4m3"]),
    "odd sizes": (make_geometry([8, None] * 2, num_kv_heads=[1, 3] * 2, head_dim=17), MIXED),
    "shared": (make_geometry([8, None, 8], kv_sources={2: 0}), "fp8_e5m2"),
}


def make_pool(name, num_blocks=5, block_size=4, **more):
    geometry, formats = GEOMETRIES[name]
    plan = make_plan(geometry, formats)
    layout = make_layout(geometry, plan, block_size, 64)
    return geometry, plan, layout, KVPool(layout, geometry, plan, num_blocks, "cpu", **more)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_views_have_the_shapes_and_types_of_the_plan(name):
    geometry, plan, layout, pool = make_pool(name)
    for layer in geometry.layers:
        parts = layout.groups[layout.group_of(layer.layer)].parts
        for codes in pool.codes(layer.layer):
            assert codes.shape == (5 * parts, layer.num_kv_heads, 4, layer.head_dim)
            assert str(codes.dtype) == f"torch.{plan.format(layer.layer).torch_dtype}"
            assert codes[0].is_contiguous()
            assert codes.data_ptr() % codes.element_size() == 0


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_layer_block_and_head_has_bytes_of_its_own(name):
    """Pitfall 34: distinct values by (layer, side, block, head) are all read back, padded or not.

    Blocks are dealt to groups as the manager would: a block is one group's at a time.
    """
    geometry, _, layout, pool = make_pool(name, num_blocks=3 * 7)
    expected = []
    number = 0
    for layer in geometry.kv_layers:
        group = layout.groups[layout.group_of(layer.layer)]
        own = range(group.index, pool.num_blocks, len(layout.groups))
        for side, codes in enumerate(pool.codes(layer.layer)):
            for block in own:
                for entry in range(block * group.parts, (block + 1) * group.parts):
                    for head in range(layer.num_kv_heads):
                        pattern = torch.arange(number, number + codes[entry, head].nbytes)
                        bits = (pattern * 2654435761 >> 7).to(torch.uint8)
                        codes[entry, head].view(torch.uint8).view(-1).copy_(bits)
                        expected.append((layer.layer, side, entry, head, bits))
                        number += 1009
    for layer, side, entry, head, bits in expected:
        stored = pool.codes(layer)[side][entry, head].view(torch.uint8).view(-1)
        assert torch.equal(stored, bits), (layer, side, entry, head)


@pytest.mark.parametrize("name", GEOMETRIES)
def testallocated_bytes_are_those_of_the_layout(name):
    """Pitfall 59: what is allocated equals the formula, with two head sizes and mixed formats."""
    geometry, plan, layout, pool = make_pool(name)
    assert pool.storage_bytes == 5 * layout.block_bytes
    for layer in geometry.kv_layers:
        expected = layer.values_per_token * plan.format(layer.layer).bytes_per_value
        assert pool.bytes_per_token(layer.layer) == expected
    assert sum(pool.bytes_per_token(x.layer) for x in geometry.kv_layers) == layout.bytes_per_token


def test_arenas_beyond_two_gibibytes_are_addressed_within_their_bytes():
    """Offsets beyond 32 bits: the last block of the last layer ends inside the arena."""
    geometry = make_geometry([8, None], num_kv_heads=8, head_dim=256)
    plan = make_plan(geometry, ["bfloat16", "fp8_e4m3"])
    layout = make_layout(geometry, plan, 16, 64)
    num_blocks = 3 * 2**30 // layout.block_bytes
    for number in (0, 1):
        place = layout.placement(number, num_blocks)
        end = place.v_offset + (place.num_parts - 1) * place.stride + place.side_bytes
        assert 2**31 < end <= num_blocks * layout.block_bytes


@pytest.mark.parametrize("fill", [0, 255])
def test_memory_is_filled_once_at_allocation(fill):
    """Pitfall 35: nothing is initialised later than allocation, so nothing can be wiped by it."""
    geometry, _, _, pool = make_pool("parts", fill=fill)
    for layer in geometry.layers:
        for codes in pool.codes(layer.layer):
            assert (codes[0].view(torch.uint8) == fill).all()
    pool.codes(0)[0][2].view(torch.uint8).fill_(7)
    for layer in geometry.layers:  # looking at other layers, and again at this one, changes nothing
        pool.codes(layer.layer)
    assert (pool.codes(0)[0][2].view(torch.uint8) == 7).all()


def test_poison_is_not_a_number_in_every_format():
    geometry, _, _, pool = make_pool("one window class, mixed formats", fill=255)
    for layer in geometry.layers:
        assert all(codes.float().isnan().all() for codes in pool.codes(layer.layer))


@pytest.mark.parametrize("name", ["uniform", "parts", "one window class, mixed formats"])
def test_blocks_saved_as_bits_come_back_as_bits(name):
    """Pitfall 36, pitfall 66: all 256 codes, NaN patterns too, survive being moved as bytes."""
    geometry, _, _, pool = make_pool(name, block_size=16)
    generator = torch.Generator().manual_seed(0)
    for layer in geometry.kv_layers:
        for codes in pool.codes(layer.layer):
            for entry in range(codes.shape[0]):
                bits = codes[entry].view(torch.uint8).view(-1)
                bits.copy_(
                    torch.arange(bits.numel()) + int(torch.randint(256, (1,), generator=generator))
                )
    chosen = [0, 2, 3]
    saved = [
        [codes[entry].view(torch.uint8).clone() for entry in chosen]
        for layer in geometry.kv_layers
        for codes in pool.codes(layer.layer)
    ]
    for layer in geometry.kv_layers:
        for codes in pool.codes(layer.layer):
            for entry in chosen:
                codes[entry].view(torch.uint8).zero_()
    tensors = [codes for x in geometry.kv_layers for codes in pool.codes(x.layer)]
    for codes, copies in zip(tensors, saved, strict=True):
        for entry, copy in zip(chosen, copies, strict=True):
            codes[entry].view(torch.uint8).copy_(copy)
            assert torch.equal(codes[entry].view(torch.uint8), copy)


def test_layers_that_read_others_get_the_very_same_tensors():
    _, _, _, pool = make_pool("shared")
    assert pool.codes(2)[0].data_ptr() == pool.codes(0)[0].data_ptr()
    assert pool.codes(0)[0].data_ptr() != pool.codes(0)[1].data_ptr()


def test_the_log_line_is_that_of_the_tensors(monkeypatch):
    """Pitfall 63: the line follows what was allocated, not what was asked for."""
    geometry = smollm2()
    plan = make_plan(geometry, "fp8_e4m3")
    layout = make_layout(geometry, plan, 16, 2048)
    line = str(KVPool(layout, geometry, plan, 10, "cpu"))
    assert line == (
        "1.76 MiB on cpu in 10 blocks: 30 layers in float8_e4m3fn, 11,520 bytes a token"
    )
    allocate = pool_module.allocate
    monkeypatch.setattr(pool_module, "allocate", lambda n, *rest: allocate(3 * n, *rest))
    view = pool_module._view
    monkeypatch.setattr(pool_module, "_view", lambda *args: view(*args).view(torch.uint8))
    line = str(KVPool(layout, geometry, plan, 10, "cpu"))
    assert line.startswith("5.27 MiB on cpu in 10 blocks: 30 layers in uint8, ")


def test_a_forked_process_has_a_cache_of_its_own():
    *_, pool = make_pool("uniform")
    codes = pool.codes(0)[0].view(torch.uint8)
    child = os.fork()
    if child == 0:
        codes.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert not codes.any()


def test_fp8_takes_half_the_storage():
    """Pitfall 63: an FP8 cache is half of a 16-bit one in allocated bytes, not in a log line."""
    geometry = smollm2()
    sizes = {}
    for name in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
        plan = make_plan(geometry, name)
        layout = make_layout(geometry, plan, 16, 2048)
        sizes[name] = KVPool(layout, geometry, plan, 7, "cpu").storage_bytes
    assert sizes["bfloat16"] == 2 * sizes["fp8_e4m3"] == 2 * sizes["fp8_e5m2"] == 7 * 368_640


def test_the_line_lists_every_dtype_of_a_mixed_plan():
    geometry = gemma3_270m()
    plan = skip_sliding(geometry)
    layout = make_layout(geometry, plan, 16, 2048)
    assert layout.arrangement is Arrangement.PAGE_MAJOR
    line = str(KVPool(layout, geometry, plan, 4, "cpu"))
    assert "15 layers in bfloat16, 3 layers in float8_e4m3fn, 16,896 bytes a token" in line


def test_memory_that_cannot_be_had_is_refused_with_its_size():
    geometry, formats = GEOMETRIES["uniform"]
    plan = make_plan(geometry, formats)
    layout = make_layout(geometry, plan, 16, 64)
    with pytest.raises(CapacityError, match=r"TiB could not be allocated on cpu.*kv_cache_memory"):
        KVPool(layout, geometry, plan, 2**50 // layout.block_bytes, "cpu")
