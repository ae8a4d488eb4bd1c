"""The models the tests are made of: a seed says every weight, whatever was drawn before."""

import pytest
import torch
from tests.tiny_models import FAMILIES, make_config, make_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_says_every_weight(family: str) -> None:
    torch.manual_seed(3)
    first = make_model(make_config(family)).state_dict()
    torch.manual_seed(4)
    second = make_model(make_config(family)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
