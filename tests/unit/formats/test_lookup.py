import pytest
from tests.fp8_table import finite_magnitudes

from kv8.errors import RequestError
from kv8.formats.base import FORMATS, FP8_E4M3
from kv8.formats.encode import torch_dtype
from kv8.formats.lookup import get_format


@pytest.mark.parametrize("name", FORMATS)
def test_every_name_is_its_own_format(name):
    assert get_format(name).name == name


def test_fp8_is_resolved_to_a_concrete_name():
    """Pitfall 69: fp8 has one meaning, and what comes out of the lookup says which."""
    assert get_format("fp8") is FP8_E4M3
    assert get_format("fp8").name == "fp8_e4m3"
    assert "fp8 (= fp8_e4m3)" in message("float8")


@pytest.mark.parametrize("name", ["e4m3fnuz", "fp8_e4m3fnuz", "float8_e5m2fnuz", "FP8_E4M3FNUZ"])
def test_a_foreign_dialect_is_refused_by_name(name):
    """Pitfall 31: the other e4m3 reads every byte as half the value; it is never taken for ours."""
    text = message(name)
    assert name in text
    assert "half" in text
    assert "fp8_e4m3" in text


@pytest.mark.parametrize("name", ["fp8_e4m2", "int8", "fp8e4nv", "", "bf16", "FP8"])
def test_the_message_has_the_request_and_what_works(name):
    """Pitfall 71: a message names the requested value and working alternatives, nothing else."""
    text = message(name)
    assert repr(name) in text
    for allowed in FORMATS:
        assert allowed in text
    assert "nv" not in text.replace(repr(name), "")


def test_a_near_miss_is_suggested():
    assert "Did you mean fp8_e5m2?" in message("fp8_e5m3")


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_the_stated_ranges_are_those_of_the_bit_layout(name):
    magnitudes, kv_format = finite_magnitudes(name), get_format(name)
    assert kv_format.finite_max == magnitudes[-1]
    assert kv_format.smallest == magnitudes[1]
    assert kv_format.bytes_per_value == torch_dtype(kv_format).itemsize == 1


def message(name: str) -> str:
    with pytest.raises(RequestError) as caught:
        get_format(name)
    return str(caught.value)
