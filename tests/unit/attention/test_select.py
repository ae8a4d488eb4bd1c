import logging
import sys

import pytest
from tests.attention_cases import make_case

from kv8.attention.reference import ReferenceBackend
from kv8.attention.select import BackendEntry, check_backend_name, select_backend
from kv8.errors import RequestError


class Picky(ReferenceBackend):
    name = "picky"

    def refuses(self, layer):
        return "head size 16 is not a multiple of 32"


def unavailable():
    raise ImportError("no compiled extension for this machine")


def never():
    raise AssertionError("loaded although it was not asked for")


REFERENCE = BackendEntry("reference", ReferenceBackend, "plain")
PICKY = BackendEntry("picky", Picky, "fast")
MISSING = BackendEntry("missing", unavailable, "fast")
UNTOUCHED = BackendEntry("untouched", never, "fast")


@pytest.fixture
def layers():
    return [make_case([1]).layer]


def test_auto_takes_one_that_serves_every_layer(layers):
    assert select_backend("auto", layers, [REFERENCE]).name == "reference"
    assert select_backend("reference", layers).name == "reference"


@pytest.mark.parametrize("name", ["", "Reference", "flash"])
def test_an_unknown_name_lists_the_known_ones(name, layers):
    for check in (lambda: select_backend(name, layers), lambda: check_backend_name(name)):
        with pytest.raises(
            RequestError, match="Allowed: auto, measured, triton, cpu, flash3, reference"
        ) as caught:
            check()
        assert repr(name) in str(caught.value)


def test_the_choice_and_every_reason_are_logged_once(layers, caplog):
    with caplog.at_level(logging.INFO, logger="kv8"):
        chosen = select_backend("auto", layers, [MISSING, PICKY, REFERENCE])
    assert chosen.name == "reference"
    (record,) = caplog.records
    for part in ("reference", "plain", "no compiled extension", "layer 0: head size 16"):
        assert part in record.getMessage()


def test_a_named_backend_that_cannot_is_refused_with_reason_and_alternative(layers):
    """Pitfall 71: the requested value, what failed, and what works here."""
    with pytest.raises(RequestError, match="'picky'") as caught:
        select_backend("picky", layers, [PICKY, MISSING, REFERENCE])
    assert "layer 0: head size 16" in str(caught.value)
    assert "Backends that can: reference." in str(caught.value)


def test_only_what_is_asked_for_is_loaded(layers):
    assert select_backend("reference", layers, [UNTOUCHED, REFERENCE]).name == "reference"
    assert select_backend("auto", layers, [REFERENCE, UNTOUCHED]).name == "reference"
    check_backend_name("untouched", [UNTOUCHED])


def test_auto_loads_nothing_for_caches_of_another_device(layers):
    elsewhere = BackendEntry("untouched", never, "fast", devices=("cuda",))
    assert select_backend("auto", layers, [elsewhere, REFERENCE]).name == "reference"
    with pytest.raises(AssertionError, match="not asked for"):
        select_backend("untouched", layers, [elsewhere])


def test_a_missing_triton_is_a_reason_with_a_remedy(layers, monkeypatch):
    monkeypatch.setitem(sys.modules, "kv8.attention.triton", None)
    with pytest.raises(RequestError, match=r"Triton is not installed.*kv8\[cuda\]"):
        select_backend("triton", layers)


def test_no_backend_at_all(layers):
    with pytest.raises(RequestError, match="Backends that can: none"):
        select_backend("auto", layers, [PICKY, MISSING])


def test_fp8_attention_over_a_16_bit_cache_is_refused():
    layer = make_case([1], stored_as="bfloat16", fp8_queries=True).layer
    with pytest.raises(RequestError, match=r"FP8 attention needs an FP8 cache.*bfloat16"):
        select_backend("reference", [layer])
