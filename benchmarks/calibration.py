"""What calibration is worth: one model under scales from several sources, against its own cache.

    python benchmarks/calibration.py [MODEL ...] [--json] > result

For each model: scales from nothing (1.0), random tokens, text the model writes and a real text, of
each strategy and FP8 format. Each is judged by the next-token distributions on text that no scale
was made from: mean KL divergence from the unquantized cache, in nats. Two more models show who
needs it: a tiny random Qwen2 with the key biases of real ones, and one whose heads differ in range.
"""

import argparse
import json
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.tiny_models import prompt_ids, save_model

from kv8.bench.conditions import Conditions
from kv8.calibration.collect import collect
from kv8.calibration.observations import Observations
from kv8.calibration.scales import make_scales
from kv8.calibration.sources import load_samples
from kv8.calibration.sources_made import text_writer
from kv8.cli.comparison import kl_divergence
from kv8.engine.engine import Engine
from kv8.engine.scoring import prompt_logits
from kv8.formats.base import FORMATS
from kv8.options import EngineOptions
from kv8.scales.scale import ModelScales

DTYPES = ("fp8_e4m3", "fp8_e5m2")
STRATEGIES = ("tensor", "attn_head")
STATISTICS = ("absmax", "mse")
SEED = 0


class Judge:
    """One model's unquantized next-token distributions over a text, and how far caches are off.

    Args:
        model: as `LLM` takes it.
        token_ids: the text, or a function that makes it of the tokenizer.
    """

    def __init__(self, model: str, token_ids: Callable[[Any], Sequence[int]]) -> None:
        self.model = model
        self.engine = self._start("auto")
        self.token_ids = list(token_ids(self.engine.tokenizer))
        self.reference = list(prompt_logits(self.engine, self.token_ids))
        self.quantized = {dtype: self._start(dtype) for dtype in DTYPES}

    def divergence(self, dtype: str, scales: ModelScales | None) -> dict[str, float]:
        """Return the mean KL divergence, and the share of positions with the same first choice."""
        engine = self.quantized[dtype]
        engine.set_scales(_as_mapping(engine, scales))
        found = [
            kl_divergence(reference, logits)
            for reference, logits in zip(
                self.reference, prompt_logits(engine, self.token_ids), strict=True
            )
        ]
        return {
            "kl": float(torch.cat([kl for kl, _ in found]).mean()),
            "same_top": float(torch.cat([same for _, same in found]).double().mean()),
        }

    def observe(self, samples: Sequence[Sequence[int]]) -> Observations:
        """Return what ``samples`` are where attention is computed."""
        observations = Observations(self.engine.config.dtype)
        collect(self.engine.runner.model, self.engine.config, samples, observations)
        return observations

    def rows(
        self, sources: dict[str, Sequence[Sequence[int]]], statistics: Sequence[str]
    ) -> Iterator[dict[str, object]]:
        """Yield a row for each source, strategy, statistic and format."""
        for dtype in DTYPES:
            yield {"source": "none: scale 1.0", "dtype": dtype, **self.divergence(dtype, None)}
        for source, samples in sources.items():
            observations = self.observe(samples)
            for strategy in STRATEGIES:
                for statistic in statistics:
                    for dtype in DTYPES:
                        scales = make_scales(
                            observations,
                            self.engine.config.geometry,
                            FORMATS[dtype],
                            strategy=strategy,
                            statistic=statistic,
                            sides=("k", "v"),
                        )
                        yield {
                            "source": source,
                            "strategy": strategy,
                            "statistic": statistic,
                            "dtype": dtype,
                            **self.divergence(dtype, scales),
                        }

    def _start(self, dtype: str) -> Engine:
        return Engine(EngineOptions(model=self.model, kv_cache_dtype=dtype))


def _as_mapping(engine: Engine, scales: ModelScales | None) -> dict[int, dict[str, Any]]:
    layers = engine.config.geometry.kv_layers
    if scales is None:
        return {layer.layer: {"k": 1.0, "v": 1.0} for layer in layers}
    found = {layer.layer: scales.layer(layer.layer) for layer in layers}
    return {n: {"k": s.k.values, "v": s.v.values} for n, s in found.items() if s.k and s.v}


def real_model(name: str, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the rows of a model that reads English: half a text measures, half judges."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    held_out = "\n".join(topics[1::2])
    judge = Judge(name, lambda tokenizer: tokenizer.encode(held_out)[: args.tokens])
    tokenizer, limits = judge.engine.tokenizer, {"samples": args.samples, "max_length": args.length}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "topics.txt"
        text.write_text("\n".join(topics[0::2]))
        writer = text_writer(judge.engine, seed=SEED)
        sources = {
            label: load_samples(source, tokenizer, **limits, seed=SEED, write_text=writer).sequences
            for label, source in (("random", "random"), ("self", "self"), ("text", str(text)))
        }
    yield from judge.rows(sources, STATISTICS)


def tiny_models() -> Iterator[tuple[str, Iterator[dict[str, object]]]]:
    """Yield the two made-up models that need calibration, and their rows."""
    sources = {"random": [prompt_ids(100, seed=seed) for seed in range(3)]}
    with tempfile.TemporaryDirectory() as folder:
        biased = save_model(Path(folder) / "biased", "qwen2", key_bias_layers=(0, 3))
        judge = Judge(str(biased), lambda _: prompt_ids(200, seed=77))
        yield "tiny random Qwen2 with huge key biases", judge.rows(sources, STATISTICS)
        for power in (7, 14, 17):
            loud = save_model(Path(folder) / f"loud{power}", edit=_one_loud_head(2.0**power))
            judge = Judge(str(loud), lambda _: prompt_ids(200, seed=77))
            yield (
                f"tiny random Llama, one head's values 2^{power} times another's",
                judge.rows(sources, ("absmax",)),
            )


def _one_loud_head(factor: float) -> Callable[[Any], None]:
    """Return an edit that changes no output, but makes one head's values so many times smaller."""

    def edit(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.view(2, 16, -1)[1] /= factor
            layer.self_attn.o_proj.weight.view(64, 4, 16)[:, 2:] *= factor

    return edit


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--samples", type=int, default=32, help="of each source")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text that judges")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    more = {"samples": args.samples, "max_length": args.length, "judged_on": args.tokens}
    rows: list[dict[str, object]] = []
    with Conditions([Path(sys.argv[0]).name, *sys.argv[1:]], seed=SEED, more=more) as seen:
        work = [*((name, real_model(name, args)) for name in args.models)]
        for name, found in (*work, *tiny_models()):
            for row in found:
                rows.append({"model": name, **row})
                print(rows[-1], file=sys.stderr)
    report = {"benchmark": "calibration", "conditions": seen.facts, "rows": rows}
    print(json.dumps(report, indent=1) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
