"""Engine options on their own, before any model is looked at."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from kv8.errors import RequestError
from kv8.formats.base import ALIASES, FORMATS
from kv8.options import OPTION_FIELDS, EngineOptions, KVCacheDtype


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "fp8"),
        ("kv_cache_dtype", "int4"),
        ("query_dtype", "bf16"),
        ("missing_scales", "ignore"),
        ("block_size", 0),
        ("max_model_len", 1.5),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", "many"),
        ("kv_cache_memory", "2 Gigs"),
        ("tokenizer", 5),
        ("kv_cache_dtype_skip_layers", 1.5),
        ("kv_cache_dtype_skip_layers", None),
        ("kv_scales", 0.5),
        ("enable_prefix_caching", "no"),
        ("enable_prefix_caching", None),
        ("device", "gpu"),
        ("device", None),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", "0.9"),
        ("enforce_eager", 1),
        ("seed", "x"),
        ("seed", True),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        EngineOptions(model="m", **{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_two_amounts_of_memory_are_refused() -> None:
    with pytest.raises(RequestError, match=r"gpu_memory_utilization=0.5 and kv_cache_memory=1024"):
        EngineOptions(model="m", gpu_memory_utilization=0.5, kv_cache_memory=1024)


def test_every_format_is_offered_and_no_other() -> None:
    """Pitfall 67: the choices shown are the formats there are."""
    assert set(get_args(KVCacheDtype)) == {"auto", *FORMATS, *ALIASES}


def test_auto_is_offered_and_case_forgiven_in_a_hint() -> None:
    with pytest.raises(RequestError, match=r"'FP8' .* Did you mean fp8\? Allowed: auto, fp8_e4m3"):
        EngineOptions(model="m", kv_cache_dtype="FP8")  # type: ignore[arg-type]


def test_a_foreign_dialect_is_explained() -> None:
    """Pitfall 31: whoever asks for the other e4m3 is told what it is, and what there is."""
    with pytest.raises(
        RequestError, match=r"'fp8_e4m3fnuz'.*another dialect.*Allowed: auto, fp8_e4m3"
    ):
        EngineOptions(model="m", kv_cache_dtype="fp8_e4m3fnuz")  # type: ignore[arg-type]


def test_a_model_is_needed() -> None:
    with pytest.raises(RequestError, match="smollm2"):
        EngineOptions()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0, 1, 23], ("0", "1", "23")),
        ("0,3-5, sliding_window", ("0", "3-5", "sliding_window")),
        (-1, ("-1",)),
        (("first:2", "last:2"), ("first:2", "last:2")),
        ([], ()),
        ("", ()),
    ],
)
def test_the_skip_list_takes_numbers_and_text(given: object, expected: tuple) -> None:
    options = EngineOptions(model="m", kv_cache_dtype_skip_layers=given)  # type: ignore[arg-type]
    assert options.kv_cache_dtype_skip_layers == expected


def test_sizes_and_paths_are_normalised() -> None:
    options = EngineOptions(model="m", kv_cache_memory="2GiB", kv_scales=Path("s.safetensors"))
    assert options.kv_cache_memory == 2 * 2**30
    assert options.kv_scales == "s.safetensors"


def test_help_says_what_fp8_means() -> None:
    """Pitfall 69: format, granularity, where scales come from, what hardware it needs."""
    text = OPTION_FIELDS["kv_cache_dtype"].metadata["help"]
    for fact in ("fp8_e4m3", "448", "per tensor or per head", "static", "checkpoint", "CPU or GPU"):
        assert fact in text


def test_every_field_has_help() -> None:
    assert all(field.metadata["help"].endswith(".") for field in OPTION_FIELDS.values())


def test_nothing_can_be_assigned() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions(model="m").seed = 1  # type: ignore[misc]
