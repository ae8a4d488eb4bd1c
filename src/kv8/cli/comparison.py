"""One model through several KV caches at once: texts, room, and what quantization changes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kv8.cache.capacity import capacity
from kv8.engine.report import KVCacheReport
from kv8.engine.scoring import prompt_logits
from kv8.llm import LLM
from kv8.sampling_params import SamplingParams

_ROWS_AT_ONCE = 64  # rows of float64 distributions in memory together
_NUM_RANGES = 4
_MEMORY = "128MiB"  # for each cache; plenty for the texts here


@dataclass(frozen=True)
class Divergence:
    """How far next-token distributions are from the reference's over a text, in nats.

    Attributes:
        num_positions: tokens of the text after which distributions were compared.
        mean: mean KL divergence, of this one from the reference.
        median: its median.
        maximum: its largest value.
        by_position: its mean over each quarter of the text, first to last.
        same_top: share of positions where both have the same most likely token.
    """

    num_positions: int
    mean: float
    median: float
    maximum: float
    by_position: tuple[float, ...]
    same_top: float


@dataclass(frozen=True)
class CacheRun:
    """What one cache gave.

    Attributes:
        setting: the ``kv_cache_dtype`` asked for.
        dtype: what it came to.
        texts: a completion of each prompt.
        tokens_per_gib: tokens of context a GiB of it holds.
        divergence: from the first cache; `None` for the first itself.
        report: the layer table after all that.
    """

    setting: str
    dtype: str
    texts: tuple[str, ...]
    tokens_per_gib: int
    divergence: Divergence | None
    report: KVCacheReport

    def as_json(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {
            "setting": self.setting,
            "dtype": self.dtype,
            "texts": list(self.texts),
            "tokens_per_gib": self.tokens_per_gib,
            "bytes_per_token": self.report.capacity.bytes_per_token,
            "divergence": None if self.divergence is None else vars(self.divergence),
            "kv_cache": self.report.brief(),
        }


def compare_caches(
    model: str,
    settings: Sequence[str],
    prompts: Sequence[str],
    text: str,
    *,
    max_tokens: int,
    num_text_tokens: int,
    progress: Callable[[str], None],
) -> list[CacheRun]:
    """Run ``model`` with each ``kv_cache_dtype`` of ``settings``; the first is the reference.

    Args:
        model: as `LLM` takes it.
        settings: values of ``kv_cache_dtype``.
        prompts: completed greedily, ``max_tokens`` tokens each.
        text: its first ``num_text_tokens`` tokens (as many as the model takes) are read by every
            cache, and the distributions after each of them compared.
        max_tokens: most tokens of a completion.
        num_text_tokens: most tokens of the text.
        progress: told what is being done.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with ExitStack() as stack:
        llms: list[LLM] = []
        for setting in settings:
            progress(f"loading {model} with kv_cache_dtype={setting}")
            llm = LLM(model, kv_cache_dtype=setting, kv_cache_memory=_MEMORY)
            llms.append(stack.enter_context(llm))
        progress(f"answering {len(prompts)} prompts with each")
        texts = [llm.generate(prompts, params, use_tqdm=False) for llm in llms]
        token_ids = llms[0].get_tokenizer().encode(text, verbose=False)
        longest = min(num_text_tokens, *(llm.engine.config.max_model_len for llm in llms))
        progress(f"reading {len(token_ids[:longest]):,} tokens of text with each")
        divergences = _divergences(llms, token_ids[:longest])
        return [
            CacheRun(
                setting=setting,
                dtype=llm.engine.config.kv_format.name,
                texts=tuple(output.outputs[0].text for output in outputs),
                tokens_per_gib=_tokens_per_gib(llm),
                divergence=divergence,
                report=llm.kv_cache_report(),
            )
            for setting, llm, outputs, divergence in zip(
                settings, llms, texts, divergences, strict=True
            )
        ]


def _tokens_per_gib(llm: LLM) -> int:
    config = llm.engine.config
    return capacity(config.layout, 2**30, config.max_model_len).tokens


def _divergences(llms: Sequence[LLM], token_ids: Sequence[int]) -> list[Divergence | None]:
    """Return each engine's divergence from the first; all read the text in step."""
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in llms[1:]]
    for reference, *others in zip(
        *(prompt_logits(llm.engine, token_ids) for llm in llms), strict=True
    ):
        for results, logits in zip(found, others, strict=True):
            for start in range(0, len(reference), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                results.append(kl_divergence(reference[rows], logits[rows]))
    return [None, *(_summarise(results) for results in found)]


def kl_divergence(
    reference: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare two sets of R distributions given as logits (float32 [R, V]).

    Returns:
        KL(reference || other) in nats, float64 [R], and whether the most likely tokens agree,
        bool [R].
    """
    p = torch.log_softmax(reference.double(), dim=1)
    q = torch.log_softmax(logits.double(), dim=1)
    # A token impossible in the reference adds nothing, whatever the other says of it.
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return terms.sum(dim=1).clamp_min(0.0), reference.argmax(dim=1) == logits.argmax(dim=1)


def _summarise(results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Divergence:
    divergence = torch.cat([kl for kl, _ in results]).cpu()
    same = torch.cat([agree for _, agree in results]).cpu()
    return Divergence(
        num_positions=len(divergence),
        mean=float(divergence.mean()),
        median=float(divergence.median()),
        maximum=float(divergence.max()),
        by_position=tuple(float(part.mean()) for part in divergence.chunk(_NUM_RANGES)),
        same_top=float(same.double().mean()),
    )
