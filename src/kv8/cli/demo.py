"""``kv8 demo``: the same prompts through three KV caches, what each saves, and what it costs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv8.cli.options_view import with_flags
from kv8.cli.output import note, output_flags, say, say_json, start_logging

if TYPE_CHECKING:
    from kv8.cli.comparison import CacheRun

SETTINGS = ("auto", "fp8", "fp8_e5m2")
PROMPTS = (
    "London is the capital of",
    "The key-value cache of a language model stores",
    "Once upon a time there was a little robot who",
)
TOPICS = ("objects", "execmodel", "naming")  # of Python's own documentation, as prose to read


@with_flags(output=output_flags())
def demo(
    model: Annotated[str, typer.Option(help="Folder, .gguf file, hub id or built-in.")] = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    text_tokens: Annotated[int, typer.Option(min=4, help="Tokens of text to compare over.")] = 1024,
    *,
    output: dict[str, Any],
) -> None:
    """Compare answers through a 16-bit and two FP8 KV caches."""
    start_logging(output)
    from pydoc_data.topics import topics

    from kv8.cli.comparison import compare_caches

    text = "\n\n".join(topics[name] for name in TOPICS)
    runs = compare_caches(
        model,
        SETTINGS,
        PROMPTS,
        text,
        max_tokens=max_tokens,
        num_text_tokens=text_tokens,
        progress=lambda doing: note(f"kv8: {doing} ..."),
    )
    if output["json"]:
        say_json({"model": model, "prompts": list(PROMPTS), "runs": [r.as_json() for r in runs]})
    else:
        say(_page(model, runs))


def _page(model: str, runs: "list[CacheRun]") -> str:
    return "\n\n".join(
        [
            f"{model} answers the same prompts through {len(runs)} KV caches.",
            *(_answers(i, prompt, runs) for i, prompt in enumerate(PROMPTS)),
            _figures(runs),
            "The layers in short, after all of the above:",
            *(f"{_name(run)}\n{run.report.summary()}" for run in runs),
            *_verdict(runs),
        ]
    )


def _answers(number: int, prompt: str, runs: "list[CacheRun]") -> str:
    width = max(len(_name(run)) for run in runs)
    lines = [f"  {_name(run):{width}}  {' '.join(run.texts[number].split())}" for run in runs]
    return "\n".join([f"{prompt} ...", *lines])


def _figures(runs: "list[CacheRun]") -> str:
    from kv8.engine.table import format_table

    headings = (
        "KV cache", "bytes/token", "tokens in 1 GiB", "gain",
        "KL mean", "median", "largest", "by quarter of the text", "same first choice",
    )  # fmt: skip
    rows = []
    for run in runs:
        row = [
            _name(run),
            f"{run.report.capacity.bytes_per_token:,}",
            f"{run.tokens_per_gib:,}",
            f"{run.tokens_per_gib / runs[0].tokens_per_gib:.2f}x",
        ]
        if run.divergence is None:
            row += ["reference", "", "", "", ""]
        else:
            found = run.divergence
            row += [f"{value:.2g}" for value in (found.mean, found.median, found.maximum)]
            row += [" ".join(f"{value:.2g}" for value in found.by_position)]
            row += [f"{100 * found.same_top:.1f} %"]
        rows.append(row)
    compared = next(run.divergence for run in runs if run.divergence is not None)
    return (
        f"{format_table(headings, rows)}\n"
        f"KL divergence, in nats, of the next-token distributions from those of {_name(runs[0])} "
        f"at {compared.num_positions:,} positions of Python's own documentation."
    )


def _verdict(runs: "list[CacheRun]") -> list[str]:
    """Say what a reader must not miss: clipping, and scales nobody measured."""
    lines = []
    for run in runs:
        share = run.report.saturated_share
        if share > 0:
            lines.append(
                f"{_name(run)} clipped {100 * share:.2g} % of the values it stored: its scales do "
                f"not fit this model. Calibrate, or keep the layers above in the model's dtype."
            )
        elif run.report.calibrated is False:
            lines.append(
                f"{_name(run)} has no calibrated scales; at scale 1.0 it clipped nothing here."
            )
    return ["\n".join(lines)] if lines else []


def _name(run: "CacheRun") -> str:
    return run.dtype if run.setting == run.dtype else f"{run.setting} ({run.dtype})"
