"""``kv8 generate MODEL PROMPT...``: complete prompts and print what came."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv8.cli.options_view import ModelArgument, engine_flags, sampling_flags, with_flags
from kv8.cli.output import note, output_flags, read_stdin, say, say_json, start_logging
from kv8.errors import EngineError

if TYPE_CHECKING:
    from kv8.engine.report import KVCacheReport
    from kv8.outputs import RequestOutput


@with_flags(engine=engine_flags(), sampling=sampling_flags(), output=output_flags())
def generate(
    model: ModelArgument,
    prompts: Annotated[
        list[str],
        typer.Argument(help="What to complete; - reads one from stdin."),
    ],
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Complete one or more prompts."""
    start_logging(output)
    from kv8.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    texts = [read_stdin() if prompt == "-" else prompt for prompt in prompts]
    from kv8.llm import LLM

    with LLM(model, **engine) as llm:
        results = llm.generate(texts, params, use_tqdm=len(texts) > 1 and sys.stderr.isatty())
        report = llm.kv_cache_report()
    if output["json"]:
        entries = [result_json(result, report) for result in results]
        say_json(entries[0] if len(entries) == 1 else entries)
    else:
        for i, result in enumerate(results):
            if len(results) > 1:
                say(("\n" if i else "") + f"--- {result.prompt}")
            say(result.outputs[0].text)
        note(f"\n{usage_line(results)}\n{report.summary()}")
    raise_failures(results)


def result_json(result: "RequestOutput", report: "KVCacheReport") -> dict[str, Any]:
    """Return one finished request as plain data."""
    completion = result.outputs[0]
    num_prompt, num_output = len(result.prompt_token_ids), len(completion.token_ids)
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "cached_tokens": result.num_cached_tokens,
        },
        "kv_cache": report.brief(),
    }


def usage_line(results: "list[RequestOutput]") -> str:
    """Return how much was read and written, in a sentence."""
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_output = sum(len(result.outputs[0].token_ids) for result in results)
    reasons = sorted({str(result.outputs[0].finish_reason) for result in results})
    return f"{num_prompt} prompt tokens, {num_output} generated ({', '.join(reasons)})"


def raise_failures(results: "list[RequestOutput]") -> None:
    """Raise `EngineError` if a request ended with ``error``; the others were printed."""
    failed = [r.outputs[0].error for r in results if r.outputs[0].finish_reason == "error"]
    if failed:
        raise EngineError(f"{len(failed)} of {len(results)} requests failed: {failed[0]}")
