"""``kv8 plan MODEL --memory 2GiB``: what fits under each dtype, before anything is started."""

from typing import Annotated, Any

import typer

from kv8.cli.options_view import ModelArgument, engine_flags, with_flags
from kv8.cli.output import output_flags, say, say_json, start_logging

_FLAGS = {
    "dtype",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "block_size",
    "max_model_len",
    "max_num_batched_tokens",
}


@with_flags(engine=engine_flags(only=_FLAGS), output=output_flags())
def plan(
    model: ModelArgument,
    memory: Annotated[
        str,
        typer.Option(
            "--memory", "--kv-cache-memory", metavar="SIZE", help="Memory for the KV cache."
        ),
    ] = "1GiB",
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Show how many tokens and requests fit under each cache dtype.

    With a skip list, also what it leaves of the gain. No weights are read.
    """
    start_logging(output)
    from kv8.options import EngineOptions
    from kv8.units import format_bytes, parse_bytes

    memory_bytes = parse_bytes(memory, option="--memory")
    options = EngineOptions(model=model, **engine)
    from kv8.engine.planner import plan_rows
    from kv8.engine.table import format_table

    rows = plan_rows(options, memory_bytes)
    if output["json"]:
        say_json({"rows": [row.as_json() for row in rows]})
        return
    held = rows[0].capacity
    say(
        f"{format_bytes(memory_bytes)} for the KV cache of {model}, blocks of {held.block_size} "
        f"tokens, requests of {held.max_model_len:,} tokens; * is what the options choose"
    )
    headings = ("", "setting", "bytes/token", "tokens", "requests", "gain", "")
    lines = [
        (
            "*" if row.chosen else "",
            row.setting,
            f"{row.capacity.bytes_per_token:,}",
            f"{row.capacity.tokens:,}",
            f"{row.capacity.max_concurrency:.2f}",
            f"{row.gain:.2f}x",
            row.note,
        )
        for row in rows
    ]
    say(format_table(headings, lines))
