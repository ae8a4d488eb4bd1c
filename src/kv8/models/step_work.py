"""What a step of a model must read and multiply, by formula from its config, without weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kv8.errors import UnsupportedModelError
from kv8.models.config import model_class, text_config

_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class StepWork:
    """Counts of weight values.

    Attributes:
        weights_read: read once in every step, however many tokens it computes.
        per_token: multiplied and added once for every token.
        per_logits: multiplied and added once for every token whose logits are wanted.
    """

    weights_read: int
    per_token: int
    per_logits: int


def read_step_work(config: Any) -> StepWork | None:
    """Return the work of a step of the model that ``config`` (from `load_config`) describes.

    `None` for a mixture of experts: which of them a step reads depends on its tokens.

    Raises:
        UnsupportedModelError: transformers has no implementation of the model.
    """
    text, built = text_config(config), model_class(config)
    if built is None:
        raise UnsupportedModelError(f"No implementation of {type(config).__name__} is known.")
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_FIELDS):
        return None
    with torch.device("meta"):
        module = built(text if built.config_class is type(text) else config)
    # Embedding tables are looked up in, row by row; only as output head one is read whole.
    tables = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    matrices = {p for p in module.parameters() if p.dim() > 1} - tables
    head = module.get_output_embeddings().weight
    vectors = sum(p.numel() for p in module.parameters() if p.dim() < 2)
    per_token = sum(p.numel() for p in matrices if p is not head)
    return StepWork(
        weights_read=per_token + vectors + head.numel(),
        per_token=per_token,
        per_logits=head.numel(),
    )
