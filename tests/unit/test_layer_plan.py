"""The layer plan: the skip list's language and which format the cache has."""

import pytest
from tests.checkpoint_folders import GEMMA3, geometry_of

from kv8.errors import LayerPlanError, RequestError, UnsupportedModelError
from kv8.formats.base import BFLOAT16, FLOAT16, FLOAT32, FP8_E4M3, FP8_E5M2, KVFormat
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan, make_layer_plan, resolve_cache_format
from kv8.scales.declaration import CacheDeclaration

TEN = geometry_of(10)
HYBRID = geometry_of(10, without_attention=[0, 3, 6, 9])  # attention in 1, 2, 4, 5, 7, 8
SHARED = geometry_of(10, sources={7: 5, 8: 4, 9: 5})


def plan_of(geometry: ModelGeometry, *skip: str, format: KVFormat = FP8_E4M3) -> LayerPlan:  # noqa: A002
    return make_layer_plan(geometry, format, skip)


def skipped(geometry: ModelGeometry, *skip: str) -> list[int]:
    plan = plan_of(geometry, *skip)
    unquantized = [entry.layer for entry in plan.layers if not entry.format.quantized]
    assert unquantized == [entry.layer for entry in plan.layers if entry.skipped_by is not None]
    return unquantized


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ((), []),
        (("0",), [0]),
        (("+3",), [3]),
        (("-1",), [9]),
        (("-10",), [0]),
        (("2-4",), [2, 3, 4]),
        (("5-5",), [5]),
        (("first:2",), [0, 1]),
        (("last:3",), [7, 8, 9]),
        (("0", "1", "-1"), [0, 1, 9]),
        (("0,1,-1",), [0, 1, 9]),
        (("0 1 -1",), [0, 1, 9]),
        ((" 0, 1 ,-1 ",), [0, 1, 9]),
        (("0-3", "2-5", "3", "first:1"), [0, 1, 2, 3, 4, 5]),
        (("full_attention",), list(range(10))),
        (("",), []),
    ],
)
def test_what_each_entry_means(skip: tuple[str, ...], expected: list[int]) -> None:
    assert skipped(TEN, *skip) == expected


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("1", [1]),
        ("-1", [8]),  # the last layer with attention is the last that can be meant
        ("-2", [7]),
        ("0-4", [1, 2, 4]),
        ("first:2", [1, 2]),
        ("last:2", [7, 8]),
    ],
)
def test_numbers_are_the_models_own_in_hybrids(skip: str, expected: list[int]) -> None:
    assert skipped(HYBRID, skip) == expected


@pytest.mark.parametrize("name", ["sliding_window", "sliding_attention"])
def test_gemma3_keeps_its_window_layers_unquantized(name: str) -> None:
    """Pitfall 58: the dtype of every layer of a hybrid, by type and by number together."""
    plan = plan_of(GEMMA3, name)
    formats = [entry.format.name for entry in plan.layers]
    assert formats.count("bfloat16") == 15
    assert formats.count("fp8_e4m3") == 3
    assert plan.quantized_layers == (5, 11, 17)
    assert plan.layers[0].skipped_by == name
    assert plan_of(GEMMA3, name, "5").quantized_layers == (11, 17)


@pytest.mark.parametrize(
    ("geometry", "entry", "suggestion"),
    [
        (GEMMA3, "sliding_windows", "sliding_window"),
        (GEMMA3, "slidng_window", "sliding_window"),
        (GEMMA3, "full_atention", "full_attention"),
        (GEMMA3, "sliding-window", "sliding_window"),
    ],
)
def test_a_misspelt_type_is_refused_with_a_suggestion(
    geometry: ModelGeometry, entry: str, suggestion: str
) -> None:
    """Pitfall 58: an unknown name is an error that suggests the right one."""
    with pytest.raises(LayerPlanError, match=f"Did you mean '{suggestion}'") as error:
        plan_of(geometry, entry)
    assert "kv_cache_dtype_skip_layers" in str(error.value)
    assert repr(entry) in str(error.value)


@pytest.mark.parametrize(
    "entry",
    [
        *("10", "99", "-11", "0-10", "5-99", "4-2", "0-", "1.5", "0:3", "--1", "1-2-3", "-3--1"),
        *("first:0", "last:11", "first:", "first", "typo_layer", "sliding_window", "mamba", "²"),
    ],
)
def test_an_unknown_or_out_of_range_entry_lists_what_is_valid(entry: str) -> None:
    with pytest.raises(LayerPlanError) as error:
        plan_of(TEN, entry)
    for part in (repr(entry), "layers 0-9", "0-9", "first:N", "up to 10", "full_attention"):
        assert part in str(error.value)
    with pytest.raises(LayerPlanError):
        plan_of(TEN, "0", f"1,{entry}")  # good neighbours do not hide it


@pytest.mark.parametrize("entry", ["0", "9", "3", "6-6"])
def test_a_layer_without_attention_cannot_be_skipped(entry: str) -> None:
    with pytest.raises(LayerPlanError, match=r"layers 1, 2, 4, 5, 7, 8 \("):
        plan_of(HYBRID, entry)


def test_layers_of_shared_kv_follow_the_layer_that_stores_it() -> None:
    plan = plan_of(SHARED, "5")
    assert [entry.layer for entry in plan.layers if not entry.format.quantized] == [5, 7, 9]
    assert plan.layers[7].skipped_by == "5"
    assert skipped(SHARED, "full_attention") == list(range(10))
    assert skipped(SHARED, "last:2") == [5, 6, 7, 9]  # of those that store: 5 and 6


@pytest.mark.parametrize("entry", ["7", "-1", "8-9", "0-3,9"])
def test_naming_a_layer_of_shared_kv_says_which_layer_to_name(entry: str) -> None:
    with pytest.raises(LayerPlanError, match=r"Name layer [45];"):
        plan_of(SHARED, entry)


def test_a_range_may_hold_layers_of_shared_kv_if_their_source_is_skipped() -> None:
    assert skipped(SHARED, "4-9") == [4, 5, 6, 7, 8, 9]
    assert skipped(SHARED, "7-7", "5") == [5, 7, 9]


def test_a_skip_list_that_changes_nothing_is_checked_and_said() -> None:
    plan = plan_of(TEN, "0-3", format=BFLOAT16)
    assert {entry.format for entry in plan.layers} == {BFLOAT16}
    assert "changes nothing" in plan.notes[0]
    assert plan_of(TEN, format=BFLOAT16).notes == ()
    assert plan_of(TEN, "0-3").notes == ()
    with pytest.raises(LayerPlanError):
        plan_of(TEN, "99", format=BFLOAT16)


def test_skipped_layers_have_the_models_dtype_whatever_the_format() -> None:
    """Pitfall 32: a 16-bit cache dtype other than the model's is a conversion of its own."""
    plan = plan_of(geometry_of(4, model_dtype="float32"), "0", format=FLOAT16)
    assert [entry.format for entry in plan.layers] == [FLOAT32, FLOAT16, FLOAT16, FLOAT16]
    assert plan.notes == ()


def test_the_plan_answers_by_layer_number() -> None:
    plan = plan_of(HYBRID, "1")
    assert plan.format(1) == BFLOAT16
    assert plan.format(8) == FP8_E4M3
    with pytest.raises(KeyError):
        plan.format(0)
    assert plan.quantized_layers == (2, 4, 5, 7, 8)


def test_the_fingerprint_is_that_of_the_formats() -> None:
    assert plan_of(TEN, "0").fingerprint() == plan_of(TEN, "first:1").fingerprint()
    seen = {
        plan.fingerprint()
        for plan in (
            plan_of(TEN),
            plan_of(TEN, "0"),
            plan_of(TEN, "1"),
            plan_of(TEN, format=FP8_E5M2),
            plan_of(TEN, format=BFLOAT16),
        )
    }
    assert len(seen) == 5


DECLARED = CacheDeclaration(
    "compressed-tensors", "config.json: quantization_config.kv_cache_scheme"
)


@pytest.mark.parametrize("declaration", [None, DECLARED])
@pytest.mark.parametrize("option", ["auto", "bfloat16", "fp8"])
def test_flag_then_declaration_then_model(
    option: str, declaration: CacheDeclaration | None
) -> None:
    """Pitfall 13: explicit flag > checkpoint's declaration > model dtype, with the reason.

    Whether the declared scales are there too is the third column of the table; it decides whether
    the start goes on (see tests/unit/scales/test_precedence.py), not the format.
    """
    format_, reason = resolve_cache_format(option, declaration, "float16")
    expected = {"auto": "float16", "bfloat16": "bfloat16", "fp8": "fp8_e4m3"}[option]
    if option == "auto" and declaration:
        expected = "fp8_e4m3"
    assert format_.name == expected
    if option != "auto":
        assert f"kv_cache_dtype={option} was given" in reason
    if declaration:
        assert declaration.where in reason
        assert ("overrides" in reason) is (option == "bfloat16")
    if declaration is None and option == "auto":
        assert "model's dtype" in reason


def test_fp8_is_named_in_full() -> None:
    """Pitfall 69: the alias is resolved and printed as a concrete name."""
    format_, reason = resolve_cache_format("fp8", None, "bfloat16")
    assert format_ is FP8_E4M3
    assert "fp8 is short for fp8_e4m3" in reason


@pytest.mark.parametrize("option", ["fp8_e4m3", "fp8_e5m2", "float16", "float32"])
def test_a_concrete_name_is_what_is_stored(option: str) -> None:
    """Pitfall 70: no format is replaced by another."""
    for declaration in (None, DECLARED):
        format_, reason = resolve_cache_format(option, declaration, "bfloat16")
        assert format_.name == option
        assert f"kv_cache_dtype={option} was given" in reason


def test_an_unknown_format_lists_those_there_are() -> None:
    """Pitfall 71: the refusal names what was asked for and what works."""
    with pytest.raises(RequestError, match=r"kv_cache_dtype='int8'.*fp8_e4m3.*bfloat16"):
        resolve_cache_format("int8", None, "bfloat16")
    with pytest.raises(RequestError, match="the model's dtype='float64'"):
        resolve_cache_format("auto", None, "float64")


def test_a_declared_scheme_kv8_does_not_serve_only_allows_an_unquantized_cache() -> None:
    """Pitfall 14: refused before weights are read; an explicit 16-bit cache still works."""
    refused = CacheDeclaration("modelopt", "config.json: x", refusal="config.json: x is 'NVFP4'")
    for option in ("auto", "fp8", "fp8_e5m2"):
        with pytest.raises(UnsupportedModelError, match=r"'NVFP4'.*--kv-cache-dtype bfloat16"):
            resolve_cache_format(option, refused, "bfloat16")
    format_, reason = resolve_cache_format("bfloat16", refused, "bfloat16")
    assert format_ is BFLOAT16
    assert "overrides" in reason
