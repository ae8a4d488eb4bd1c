"""``kv8 chat MODEL``: a conversation at the terminal, or one answer to what stdin holds."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv8.cli.generate import raise_failures, result_json
from kv8.cli.options_view import ModelArgument, engine_flags, sampling_flags, with_flags
from kv8.cli.output import (
    at_terminal,
    note,
    output_flags,
    read_stdin,
    say,
    say_json,
    start_logging,
)
from kv8.errors import RequestError

if TYPE_CHECKING:
    from kv8.llm import LLM
    from kv8.outputs import RequestOutput
    from kv8.sampling_params import SamplingParams


@with_flags(
    engine=engine_flags(),
    sampling=sampling_flags(without={"max_tokens"}),
    output=output_flags(),
)
def chat(
    model: ModelArgument,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer. Default: up to the model's end token."),
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Talk to a model. Without a terminal, answer what stdin holds.

    At the terminal ctrl-C stops an answer, ctrl-D ends the conversation.
    """
    start_logging(output)
    from kv8.sampling_params import SamplingParams

    params = SamplingParams(**sampling, max_tokens=max_tokens)
    from kv8.llm import LLM

    with LLM(model, **engine) as llm:
        messages = [{"role": "system", "content": system}] if system else []
        for question in _questions():
            messages.append({"role": "user", "content": question})
            try:
                answer = _answer(llm, messages, params, silent=output["json"])
            except RequestError as error:
                if not at_terminal():
                    raise
                note(f"kv8: error: {error} The message was dropped.")
                messages.pop()
                continue
            if output["json"]:
                say_json(result_json(answer, llm.kv_cache_report()))
            messages.append({"role": "assistant", "content": answer.outputs[0].text})


def _questions() -> Iterator[str]:
    """Return what the user says: line by line at a terminal, else all of stdin at once."""
    if not at_terminal():
        text = read_stdin().strip()
        if not text:
            raise RequestError("stdin holds no message. Pipe one in, or run in a terminal.")
        yield text
        return
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            note("")
            return
        if line.strip():
            yield line.strip()


def _answer(
    llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams", *, silent: bool
) -> "RequestOutput":
    """Return the answer to ``messages``, printed as it comes unless ``silent``.

    An interrupt at the terminal ends the answer, not the conversation.
    """
    num_shown = 0
    answers = llm.stream_chat(messages, params)
    output = None
    try:
        for output in answers:
            text = output.outputs[0].text
            if not silent:
                say(text[num_shown:], newline=False)
            num_shown = len(text)
        assert output is not None, "a request that was accepted gives at least one output"
        raise_failures([output])
    except KeyboardInterrupt:
        if output is None or not at_terminal():
            raise
    finally:
        answers.close()
    if not silent:
        say()
    return output
