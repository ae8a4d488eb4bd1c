"""Observations: merged, saved and checked; nothing unobserved or infinite becomes a scale."""

from pathlib import Path

import pytest
import torch
from tests.checkpoint_folders import geometry_of
from tests.observing import same

from kv8.calibration.observations import Observations
from kv8.calibration.scales import make_scales
from kv8.errors import ModelError, ScaleError
from kv8.formats.base import FP8_E4M3
from kv8.geometry import ModelGeometry

GEOMETRY = geometry_of(4, 4, 2)
SHARED = geometry_of(4, 4, 2, sources={2: 0, 3: 1})


def fill(
    observations: Observations,
    geometry: ModelGeometry = GEOMETRY,
    *,
    part: str = "first",
    sample: int = 0,
    num_tokens: int = 6,
    without: tuple[tuple[int, str], ...] = (),
) -> Observations:
    """Note random values of one sample in every layer and side but those of ``without``."""
    generator = torch.Generator().manual_seed(sample)
    for layer in geometry.layers:
        for side, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", 2)):
            values = torch.randn(num_tokens, heads, 16, generator=generator)
            if (layer.layer, side) not in without and (side == "q" or layer.owns_kv):
                observations.observe(
                    part,
                    layer.layer,
                    side,
                    values,
                    [sample],
                    [num_tokens],  # type: ignore[arg-type]
                )
    observations.count(part, num_tokens, 1)  # type: ignore[arg-type]
    return observations


def test_merged_observations_are_those_of_all_samples(tmp_path: Path) -> None:
    together, one, other = Observations(), Observations(), Observations()
    for sample, part in enumerate(("first", "second", "held_out", "first")):
        fill(together, part=part, sample=sample)
        fill(one if sample % 2 else other, part=part, sample=sample)
    one.merge(other)
    assert same(one, together)
    one.save(tmp_path / "seen")
    assert same(Observations.load(tmp_path / "seen"), together)


@pytest.mark.parametrize(
    "damage", ["missing", "text", "cut", "other", "one bit of a tensor", "a count"]
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "seen"
    fill(Observations()).save(path)
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("nothing of the kind")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "one bit of a tensor":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "a count":
        content, held_out = path.read_bytes(), b'held_out\\": 0'
        assert held_out in content
        path.write_bytes(content.replace(held_out, held_out[:-1] + b"1"))
    else:
        from safetensors.torch import save_file

        save_file({"first.0.k.counts": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match="seen holds no observations"):
        Observations.load(path)


def test_a_layer_that_was_never_seen_is_named() -> None:
    """Pitfall 16: a layer without observations is an error that names it, never a made-up scale."""
    observations = fill(Observations(), without=((2, "k"), (2, "v"), (3, "q")))
    with pytest.raises(
        ScaleError,
        match=r"keys of layer 2 \(0\), values of layer 2 \(0\), queries of layer 3 \(0\)",
    ):
        make_scales(observations, GEOMETRY, FP8_E4M3)


def test_a_layer_that_missed_some_tokens_is_named() -> None:
    """Pitfall 16: half observed is not observed."""
    observations = fill(Observations())
    fill(observations, sample=1, num_tokens=3, without=((1, "v"),))
    with pytest.raises(ScaleError, match=r"all of the 9 tokens .* values of layer 1 \(6\)"):
        make_scales(observations, GEOMETRY, FP8_E4M3)


def test_held_out_tokens_do_not_count_as_observed() -> None:
    with pytest.raises(ScaleError, match="at least one token"):
        make_scales(fill(Observations(), part="held_out"), GEOMETRY, FP8_E4M3)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["first", "held_out"])
def test_values_that_are_no_numbers_are_named(odd: float, part: str) -> None:
    observations = fill(fill(Observations()), part=part, sample=1, without=((2, "v"), (3, "v")))
    for layer in (2, 3):
        values = torch.zeros(6, 2, 16)
        values[5, 1, 3] = odd
        observations.observe(part, layer, "v", values, [1], [6])  # type: ignore[arg-type]
    with pytest.raises(ScaleError, match=r"The values of layers 2, 3 are not finite"):
        make_scales(observations, GEOMETRY, FP8_E4M3)


def test_layers_that_read_another_layers_cache_have_query_scales_only() -> None:
    scales = make_scales(fill(Observations(), SHARED), SHARED, FP8_E4M3)
    assert [scales.layer(n).k is not None for n in range(4)] == [True, True, False, False]
    assert [scales.layer(n).v is not None for n in range(4)] == [True, True, False, False]
    assert all(scales.layer(n).q is not None for n in range(4))


def test_a_sample_in_pieces_has_one_range() -> None:
    values = torch.randn(10, 2, 16)
    whole, pieces = Observations(), Observations()
    whole.observe("first", 0, "k", values, [7], [10])
    for rows in values.split([4, 5, 1]):
        pieces.observe("first", 0, "k", rows, [7], [len(rows)])
    assert same(whole, pieces)


def test_samples_of_a_step_keep_their_own_ranges() -> None:
    values = torch.randn(10, 2, 16)
    observations = Observations()
    observations.observe("first", 0, "k", values, [5, 2, 9], [3, 6, 1])
    ranges = observations.ranges(0, "k")
    assert ranges is not None
    low, high = ranges.in_order()  # by sample: 2, 5, 9
    pieces = [values[3:9], values[:3], values[9:]]
    assert torch.equal(low, torch.stack([piece.amin(dim=(0, 2)) for piece in pieces]))
    assert torch.equal(high, torch.stack([piece.amax(dim=(0, 2)) for piece in pieces]))
