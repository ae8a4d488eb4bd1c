"""Native kernels in place of transformers' modules: the same tokens, the same logits."""

import logging
from collections.abc import Sequence

import pytest
import torch
from tests.packed import packed_logits
from tests.tiny_models import FAMILIES, LAYERS, TinyModel, prompt_ids

from kv8.kernels.cpu import load_kernels
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.load import load_model
from kv8.models.source import ModelSource

# Families whose layers have no part that only they have.
WHOLE_LAYERS = frozenset(FAMILIES) - {"gpt_oss", "gemma3n", "gemma4"}


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        load_kernels()
    except ImportError as error:
        pytest.skip(str(error))


def load(
    tiny_model: TinyModel, family: str, dtype: str = "float32", *, fuse: bool = True
) -> HookedModel:
    folder = tiny_model(family)
    config = load_config(folder)
    source = ModelSource(family, folder, "test")
    return load_model(source, config, read_geometry(config), dtype, verify=False, fuse=fuse)


def relative(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    a, b = torch.cat(list(found)), torch.cat(list(expected))
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_transformers_logits(
    family: str, chunk: int | None, tiny_model: TinyModel
) -> None:
    sequences = [prompt_ids(80, seed=1), prompt_ids(33, seed=2)]
    fused, plain = load(tiny_model, family), load(tiny_model, family, fuse=False)
    found = packed_logits(fused, sequences, chunk=chunk)
    # float32 rounding of another order of sums, as between chunk lengths in test_hook_parity.
    assert relative(found, packed_logits(plain, sequences)) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_usual_structure_are_replaced_whole(
    family: str, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv8")
    load(tiny_model, family)
    [line] = [r.getMessage() for r in caplog.records if "Native kernels" in r.getMessage()]
    fused = LAYERS if family in WHOLE_LAYERS else 0
    assert f"compute {fused} of {LAYERS} decoder layers" in line
