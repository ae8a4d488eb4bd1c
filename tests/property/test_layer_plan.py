"""The skip list against a brute-force model of what each entry means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint_folders import geometry_of

from kv8.errors import LayerPlanError
from kv8.formats.base import FP8_E4M3
from kv8.geometry import ModelGeometry
from kv8.layer_plan import make_layer_plan

TYPES = ["full_attention", "sliding_attention"]


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    """Return models with gaps, two layer types and layers of shared KV."""
    num_layers = draw(st.integers(1, 12))
    types = draw(st.lists(st.sampled_from(TYPES), min_size=num_layers, max_size=num_layers))
    gaps = draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1))
    present = [n for n in range(num_layers) if n not in gaps]
    sharing = draw(st.integers(0, len(present) - 1))
    owners = present[: len(present) - sharing]
    sources = {n: draw(st.sampled_from(owners)) for n in present[len(owners) :]}
    return geometry_of(num_layers, types=types, sources=sources, without_attention=sorted(gaps))


ENTRIES = st.one_of(
    st.integers(-14, 14).map(str),
    st.tuples(st.integers(0, 13), st.integers(0, 13)).map(lambda ends: f"{ends[0]}-{ends[1]}"),
    st.tuples(st.sampled_from(["first", "last"]), st.integers(0, 13)).map(
        lambda parts: f"{parts[0]}:{parts[1]}"
    ),
    st.sampled_from([*TYPES, "sliding_window", "sliding_windows", "mamba"]),
)


def meaning(geometry: ModelGeometry, entry: str) -> set[int] | None:
    """Return every layer number ``entry`` selects, or `None` if it means nothing here."""
    numbers = [layer.layer for layer in geometry.layers]
    owners = [layer.layer for layer in geometry.layers if layer.owns_kv]
    if entry.lstrip("-").isdigit():
        number = int(entry)
        wanted = number if number >= 0 else numbers[-1] + 1 + number
        return {wanted} if wanted in owners else None  # a layer of shared KV is refused by number
    if entry.startswith(("first:", "last:")):
        count = int(entry.split(":")[1])
        if not 1 <= count <= len(owners):
            return None
        return set(owners[:count] if entry.startswith("first") else owners[-count:])
    if entry[0].isdigit():
        low, high = map(int, entry.split("-"))
        return set(range(low, high + 1)) & set(numbers) or None if high <= numbers[-1] else None
    wanted_type = "sliding_attention" if entry == "sliding_window" else entry
    return {layer.layer for layer in geometry.layers if layer.type == wanted_type} or None


def brute_force(geometry: ModelGeometry, entries: list[str]) -> set[int] | None:
    """Return the layers left unquantized, or `None` if the list must be refused."""
    selected: set[int] = set()
    for entry in entries:
        found = meaning(geometry, entry)
        if found is None:
            return None
        selected |= found
    owners = {layer.layer for layer in geometry.layers if layer.owns_kv} & selected
    for layer in geometry.layers:
        if layer.layer in selected and layer.kv_source not in owners:
            return None  # would keep a layer unquantized whose KV is quantized elsewhere
    return {layer.layer for layer in geometry.layers if layer.kv_source in owners}


@given(geometry=geometries(), entries=st.lists(ENTRIES, max_size=4))
def test_the_plan_is_what_brute_force_says(geometry: ModelGeometry, entries: list[str]) -> None:
    expected = brute_force(geometry, entries)
    if expected is None:
        with pytest.raises(LayerPlanError):
            make_layer_plan(geometry, FP8_E4M3, entries)
        return
    plan = make_layer_plan(geometry, FP8_E4M3, entries)
    assert [entry.layer for entry in plan.layers] == [layer.layer for layer in geometry.layers]
    assert {e.layer for e in plan.layers if not e.format.quantized} == expected
    for entry in plan.layers:
        source = geometry.layer(entry.layer).kv_source
        assert entry.format == plan.format(source)


@given(
    geometry=geometries(),
    entries=st.lists(ENTRIES, min_size=1, max_size=4),
    separator=st.sampled_from([",", " ", ", "]),
)
def test_neither_order_nor_repetition_nor_separators_matter(
    geometry: ModelGeometry, entries: list[str], separator: str
) -> None:
    def outcome(skip: list[str]) -> tuple[bool, ...] | None:
        try:
            plan = make_layer_plan(geometry, FP8_E4M3, skip)
        except LayerPlanError:
            return None
        return tuple(entry.format.quantized for entry in plan.layers)

    expected = outcome(entries)
    assert outcome(entries[::-1]) == expected
    assert outcome(entries + entries) == expected
    assert outcome([separator.join(entries)]) == expected


@given(geometry=geometries(), text=st.text(max_size=8))
def test_any_text_is_understood_or_refused_by_name(geometry: ModelGeometry, text: str) -> None:
    try:
        make_layer_plan(geometry, FP8_E4M3, [text])
    except LayerPlanError as error:
        assert "kv_cache_dtype_skip_layers" in str(error)  # noqa: PT017
