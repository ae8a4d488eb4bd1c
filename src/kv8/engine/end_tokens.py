"""Which tokens end an output: the model's own, and the tokenizer's."""

from typing import Any

from kv8.models.hook import HookedModel


def find_end_tokens(model: HookedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an output.

    Chat models often list several in their generation config, and base models' tokenizers know one
    that the config does not mention; any of them means that the model has said all.
    """
    found: set[int] = set()
    for owner in (model.module.generation_config, model.module.config, tokenizer):
        tokens = getattr(owner, "eos_token_id", None)
        if tokens is not None:
            found.update([tokens] if isinstance(tokens, int) else tokens)
    return frozenset(found)
