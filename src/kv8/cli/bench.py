"""``kv8 bench WHAT``: how fast kv8 is here, beside what this machine would allow."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv8.cli.argv import words_given
from kv8.cli.options_view import engine_flags, with_flags
from kv8.cli.output import output_flags, say, say_json, start_logging
from kv8.errors import RequestError

if TYPE_CHECKING:
    from kv8.bench.report import Report

DTYPES = ["bfloat16", "fp8"]
WORKLOADS = ["16x128", "8x1024"]
# Lists that take every word up to the next flag.
LIST_FLAGS = frozenset({"--contexts", "--dtypes", "--workloads"})
_ENGINE = {
    "dtype",
    "attention_backend",
    "block_size",
    "device",
    "enforce_eager",
    "max_num_batched_tokens",
    "query_dtype",
}

Model = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or built-in name.")]
Dtypes = Annotated[
    list[str],
    typer.Option(
        "--dtypes", metavar="DTYPE...", help="Cache dtypes; the first is the others' measure."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Tokens decoded in a repeat, a sequence.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats that count, after one that does not.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to compute with. Default: torch's own choice.")
]
Seed = Annotated[int, typer.Option(help="Seed of the made-up prompts.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a page of Markdown.")]


def make_bench() -> typer.Typer:
    """Return the command ``bench`` with what it can measure."""
    bench = typer.Typer(rich_markup_mode=None)

    @bench.callback()
    def _bench() -> None:
        """Measure speed, beside what this machine would allow."""

    for command in (latency, throughput, kernels, startup):
        bench.command()(command)
    return bench


@with_flags(engine=engine_flags(only=_ENGINE), output=output_flags())
def latency(  # noqa: PLR0913 - one a flag
    model: Model = "smollm2",
    contexts: Annotated[
        list[int],
        typer.Option(
            "--contexts",
            metavar="TOKENS...",
            help="Lengths of the prompt. Default: those of 32, 1024, 3500, 7500 that fit.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    dtypes: Dtypes = DTYPES,
    steps: Steps = 32,
    repeats: Repeats = 5,
    threads: Threads = None,
    seed: Seed = 0,
    markdown: Markdown = False,
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """One request at a time: prefill and decode, by context.

    Each apart, under each cache dtype; and the peak memory of a long prompt.
    """
    _begin(output, threads)
    from kv8.bench.latency import bench_latency

    report = bench_latency(
        model,
        contexts,
        dtypes,
        steps=steps,
        options=engine,
        repeats=repeats,
        seed=seed,
        command=["kv8", *words_given()],
    )
    _print(report, output, markdown=markdown)


@with_flags(engine=engine_flags(only=_ENGINE), output=output_flags())
def throughput(  # noqa: PLR0913 - one a flag
    model: Model = "smollm2",
    workloads: Annotated[
        list[str],
        typer.Option("--workloads", metavar="SxC...", help="S requests of C tokens each, at once."),
    ] = WORKLOADS,
    dtypes: Dtypes = DTYPES,
    steps: Steps = 32,
    repeats: Repeats = 5,
    threads: Threads = None,
    seed: Seed = 0,
    markdown: Markdown = False,
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Many requests at once: prefill and decode, by batch.

    Each apart, under each cache dtype.
    """
    _begin(output, threads)
    shapes = [_parse_workload(text) for text in workloads]
    from kv8.bench.phases import bench_phases
    from kv8.bench.report import Report
    from kv8.bench.workload import Workload

    report = Report("throughput", f"{model}, many requests at once.")
    bench_phases(
        report,
        model,
        dtypes,
        [Workload(sequences, context, steps) for sequences, context in shapes],
        options=engine,
        repeats=repeats,
        seed=seed,
        command=["kv8", *words_given()],
    )
    _print(report, output, markdown=markdown)


@with_flags(
    engine=engine_flags(only={"attention_backend", "block_size", "device"}), output=output_flags()
)
def kernels(  # noqa: PLR0913 - one a flag
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 9,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 3,
    head_dim: Annotated[int, typer.Option(min=1, help="Head size.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers that take turns.")] = 4,
    tokens: Annotated[int, typer.Option(min=64, help="Cached tokens in decode, in all.")] = 65536,
    contexts: Annotated[
        list[int], typer.Option("--contexts", metavar="TOKENS...", help="Prompts of prefill.")
    ] = [1024, 3500],  # noqa: B006 - typer copies it
    repeats: Repeats = 9,
    threads: Threads = None,
    seed: Seed = 0,
    markdown: Markdown = False,
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """The attention kernels alone: FP8 over bf16.

    Also the bytes they read, against the memory's speed.
    """
    _begin(output, threads)
    if heads % kv_heads:
        raise RequestError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}.")
    from kv8.bench.attention_work import Shape
    from kv8.bench.kernels import bench_kernels
    from kv8.engine.devices import choose_block_size, resolve_device

    device, _ = resolve_device(engine["device"])
    block_size = choose_block_size(engine["block_size"], device)
    report = bench_kernels(
        Shape(heads, kv_heads, head_dim, layers, block_size, str(device)),
        backend=engine["attention_backend"],
        tokens=tokens,
        contexts=contexts,
        repeats=repeats,
        seed=seed,
        command=["kv8", *words_given()],
    )
    _print(report, output, markdown=markdown)


@with_flags(
    engine=engine_flags(only={*_ENGINE, "kv_cache_dtype", "kv_cache_memory"}), output=output_flags()
)
def startup(
    model: Model = "smollm2",
    repeats: Repeats = 5,
    threads: Threads = None,
    markdown: Markdown = False,
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Cold processes until their first token, part by part.

    Also kv8 --help.
    """
    _begin(output, threads)
    from kv8.bench.startup import bench_startup

    report = bench_startup(model, engine, repeats=repeats, command=["kv8", *words_given()])
    _print(report, output, markdown=markdown)


def _begin(output: dict[str, Any], threads: int | None) -> None:
    start_logging(output)
    if threads is not None:
        import os

        import torch

        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that are started


def _parse_workload(text: str) -> tuple[int, int]:
    sequences, times, context = text.partition("x")
    if not (times and sequences.isdecimal() and context.isdecimal() and int(sequences)):
        raise RequestError(
            f"--workloads {text!r} is not known. Write requests x tokens, like 16x128."
        )
    return int(sequences), int(context)


def _print(report: "Report", output: dict[str, Any], *, markdown: bool) -> None:
    from kv8.bench import tables

    if output["json"]:
        say_json(report.as_json())
    else:
        say(tables.markdown(report.as_json()) if markdown else tables.text_table(report.as_json()))
