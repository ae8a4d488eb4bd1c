"""The weights' fingerprint: other weights, other digits; another container, the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kv8.errors import ModelError
from kv8.models.fingerprint import weights_fingerprint


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.embed_tokens.weight": torch.randn(50, 8, generator=generator),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(8, 8, generator=generator),
        "model.norm.weight": torch.randn(3, generator=generator),
    }


def save(folder: Path, tensors: dict[str, torch.Tensor], **shards: list[str]) -> Path:
    """Write ``tensors``, whole or in the named shards, to ``folder``."""
    folder.mkdir()
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    for name, members in shards.items():
        save_file({m: tensors[m] for m in members}, folder / f"{name}.safetensors", {"by": name})
    weight_map = {m: f"{name}.safetensors" for name, members in shards.items() for m in members}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def test_shards_and_their_cache_scales_do_not_count(tmp_path: Path) -> None:
    tensors = weights()
    whole = weights_fingerprint(save(tmp_path / "whole", tensors))
    first, *rest = tensors
    scale = "model.layers.0.self_attn.k_scale"
    scaled = tensors | {scale: torch.tensor([0.5])}
    cut = save(tmp_path / "cut", scaled, b=[first], a=[*rest, scale])
    assert weights_fingerprint(cut) == whole
    assert len(whole) == 32


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("name", list(weights()))
def test_a_change_of_any_tensor_where_it_is_sampled_counts(
    tmp_path: Path, name: str, share: float
) -> None:
    tensors = weights()
    before = weights_fingerprint(save(tmp_path / "before", tensors))
    flat = tensors[name].view(-1)
    flat[int(share * (len(flat) - 1))] += 1
    assert weights_fingerprint(save(tmp_path / "after", tensors)) != before


def test_names_types_and_shapes_count(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(4, 4)}
    variants = (
        tensors,
        {"b.weight": torch.zeros(4, 4)},
        {"a.weight": torch.zeros(2, 8)},
        {"a.weight": torch.zeros(4, 4, dtype=torch.int32)},
        {**tensors, "empty.weight": torch.zeros(0)},
    )
    found = [weights_fingerprint(save(tmp_path / str(i), t)) for i, t in enumerate(variants)]
    assert len(set(found)) == len(variants)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "cut", weights())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ModelError, match=r"model\.safetensors is no complete"):
        weights_fingerprint(folder)
