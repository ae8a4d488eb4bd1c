"""Quantize a model's attention and KV cache to FP8 with llm-compressor, for kv8 to serve.

    python quantize.py MODEL OUTPUT [--texts FILE.jsonl] [--strategy tensor|attn_head]

MODEL is a local folder. Texts are a .jsonl file whose lines have "messages" (a chat) or "text";
without one, Python's own documentation. Runs in an environment made with requirements.txt, without
network; nothing is left in OUTPUT unless its scales can be used.
"""

import argparse
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from check_scales import refuse_unusable_scales
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Calibrate, save, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--strategy", choices=("tensor", "attn_head"), default="tensor")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=512)
    args = parser.parse_args()
    if args.output.exists():
        sys.exit(f"{args.output} exists; give another output folder.")

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [tokenize(row, tokenizer, args.max_length) for row in read(args.texts)[: args.samples]]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=recipe(args.strategy, type(model.model.layers[0].self_attn).__name__),
        max_seq_length=args.max_length,
        num_calibration_samples=len(rows),
        pad_to_max_length=False,  # padding would be measured like text
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(args.output, save_compressed=True)
    tokenizer.save_pretrained(args.output)
    try:
        count = refuse_unusable_scales(args.output)
    except ValueError as error:
        shutil.rmtree(args.output)
        sys.exit(f"llmcompressor {version('llmcompressor')}: {error}\n{args.output} was removed.")
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    print(f"{args.output}: {count} scales from {len(rows)} texts, {num_tokens:,} tokens")


def recipe(strategy: str, attention_class: str) -> QuantizationModifier:
    """Return the recipe: queries by the class of the attention modules, keys and values by the
    cache's scheme.

    The default observer of 0.13.0 keeps the last sample's range alone; ``static_minmax`` keeps the
    range of all of them.
    """
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=strategy, observer="static_minmax")
    return QuantizationModifier(
        config_groups={
            "attention": QuantizationScheme(targets=[attention_class], input_activations=scheme)
        },
        kv_cache_scheme=scheme,
    )


def read(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, or Python's documentation as rows."""
    if file is not None:
        return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    from pydoc_data.topics import topics

    longest = sorted(topics, key=lambda name: -len(topics[name]))
    return [{"text": topics[name]} for name in longest]


def tokenize(row: dict[str, Any], tokenizer: Any, max_length: int) -> dict[str, list[int]]:
    """Return a row's tokens; a chat goes through the model's template."""
    text = row.get("text")
    if text is None:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    limits = {"max_length": max_length, "truncation": True, "padding": False}
    return dict(tokenizer(text, add_special_tokens="messages" not in row, **limits))


if __name__ == "__main__":
    main()
