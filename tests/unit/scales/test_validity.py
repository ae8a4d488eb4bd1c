"""The rules for numbers and shapes."""

import math

import pytest

from kv8.scales.validity import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    shape_fault,
    value_fault,
    values_fault,
)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (math.nan, "not a number"),
        (math.inf, "infinite"),
        (-math.inf, "infinite"),
        (0.0, "zero"),
        (-0.0, "zero"),
        (-0.05, "negative"),
        (-1e-40, "negative"),
        (1e-40, "denormal"),
        (3.2797e-18, "too small"),
        (1.7945e38, "too large"),
        (math.nextafter(SMALLEST_SCALE, 0), "too small"),
        (math.nextafter(LARGEST_SCALE, math.inf), "too large"),
    ],
)
def test_what_is_no_scale_is_said_in_words(value: float, word: str) -> None:
    assert word in (value_fault(value) or "")


@pytest.mark.parametrize(
    "value",
    [
        SMALLEST_SCALE,
        LARGEST_SCALE,
        2.2e-15,  # AutoFP8, all-zero tensor
        1.1920929e-07,  # llm-compressor and Quark, all-zero tensor in float32
        0.0078125,  # llm-compressor, all-zero tensor in bfloat16
        1.0,
        146.3,  # the largest float16 divided by 448
    ],
)
def test_what_producers_write_on_purpose_is_a_scale(value: float) -> None:
    assert value_fault(value) is None


def test_the_bad_head_is_named() -> None:
    assert "for head 2" in (values_fault((0.1, 0.2, 0.0)) or "")
    assert "head" not in (values_fault((0.0,)) or "")
    assert values_fault((0.1, 0.2)) is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_one_value_fits_a_tensor_scale_of_any_rank(shape: tuple[int, ...]) -> None:
    assert shape_fault(shape, "k", 3, "tensor") is None
    assert shape_fault(shape, "k", 3, None) is None


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
def test_one_value_a_head_fits_attn_head(shape: tuple[int, ...]) -> None:
    assert shape_fault(shape, "k", 3, "attn_head") is None
    assert shape_fault(shape, "k", 3, None) is None


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((3, 1, 1), "tensor"),
        ((1,), "attn_head"),  # vLLM broadcasts; it may as well be a lost vector
        ((2,), "attn_head"),
        ((9,), "attn_head"),  # vLLM takes the first three
        ((0,), "tensor"),
        ((2,), None),
        ((192, 576), None),
    ],
)
def test_strategy_and_shape_must_agree(shape: tuple[int, ...], strategy) -> None:
    fault = shape_fault(shape, "k", 3, strategy)
    assert fault is not None
    assert str(list(shape)) in fault
    assert "kv heads" in fault or "1 value" in fault


def test_with_one_kv_head_both_strategies_mean_the_same() -> None:
    for strategy in ("tensor", "attn_head", None):
        assert shape_fault((1, 1, 1), "k", 1, strategy) is None


def test_q_counts_query_heads() -> None:
    assert shape_fault((9, 1, 1), "q", 9, "attn_head") is None
    assert "query heads" in (shape_fault((3, 1, 1), "q", 9, "attn_head") or "")
