"""Scales given in Python: the same rules as for a file."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint_folders import geometry_of

from kv8.errors import ScaleError
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.scale import OriginKind

GEOMETRY = geometry_of()


def test_numbers_lists_arrays_and_tensors_are_scales() -> None:
    scales = scales_from_mapping(
        {
            0: {"k": 0.05, "v": [0.25, 0.5]},
            "1": {"k": 1, "v": (0.25,), "q": [0.1, 0.2, 0.3, 0.4]},
            2: {"k": np.float32(0.5), "v": np.array([0.25, 0.5])},
            3: {"k": torch.tensor(0.5), "v": torch.tensor([0.25, 0.5]).reshape(2, 1, 1)},
        },
        GEOMETRY,
    )
    first = scales.layer(0)
    assert first.k is not None
    assert first.k.values == (np.float32(0.05).item(),)  # as float32 rounds it
    assert first.k.origin.kind is OriginKind.PYTHON
    assert str(first.k.origin) == "given in Python: kv_scales[0]['k']"
    for number in (0, 2, 3):
        v = scales.layer(number).v
        assert v is not None
        assert v.values == (0.25, 0.5)


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({}, "kv_scales must map"),
        ([0.5], "kv_scales must map"),
        ({99: {"k": 0.5}}, "layer 99"),
        ({-1: {"k": 0.5}}, "layer -1"),
        ({True: {"k": 0.5}}, "True"),
        ({"zero": {"k": 0.5}}, "'zero'"),
        ({0: {}}, "kv_scales[0]"),
        ({0: 0.5}, "kv_scales[0]"),
        ({0: {"kv": 0.5}}, "'kv'"),
        ({0: {"k": 0.5, "w": 0.5}}, "'w'"),
        ({0: {"k": 0.5}, "0": {"k": 0.5}}, "twice"),
        ({0: {"k": "0.5"}}, "kv_scales[0]['k']"),
        ({0: {"k": None}}, "None"),
        ({0: {"k": True}}, "True"),
        ({0: {"k": [[0.5], [0.5]]}}, "flat list"),
        ({0: {"k": []}}, "[0]"),
        ({0: {"k": [0.1, 0.2, 0.3]}}, "shape [3]"),
        ({0: {"q": [0.1, 0.2]}}, "query heads"),
        ({0: {"k": 0}}, "zero"),
        ({0: {"k": [0.1, -0.1]}}, "head 1 is negative"),
        ({0: {"k": math.nan}}, "not a number"),
        ({0: {"k": 1e300}}, "infinite"),
        ({0: {"k": 10**400}}, "infinite"),
        ({0: {"k": 1e-320}}, "zero"),
    ],
)
def test_anything_else_is_refused_by_entry(mapping: Any, named: str) -> None:
    with pytest.raises(ScaleError) as error:
        scales_from_mapping(mapping, GEOMETRY)
    assert named in str(error.value)


def test_a_layer_of_shared_kv_takes_q_only() -> None:
    geometry = geometry_of(sources={3: 1})
    scales_from_mapping({3: {"q": 0.5}}, geometry)
    with pytest.raises(ScaleError, match="layer 1"):
        scales_from_mapping({3: {"k": 0.5}}, geometry)
