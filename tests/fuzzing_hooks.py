"""What schemathesis cannot know from a server's document, loaded by it: see tests/fuzzing.

A made-up model is a 404; a token far beyond the vocabulary, an empty prompt, and a field that needs
another are a 400. So would be most of what it makes up; with this most gets as far as the engine,
and is done there soon enough for the next.
"""

import os
from typing import Any

import schemathesis

SMALLEST_VOCABULARY = 256
MOST_TOKENS = int(os.environ.get("KV8_FUZZ_TOKENS", "12"))
LENGTHS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens"}


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case, __: dict[str, Any]) -> None:
    """Mend what is of the right types, and leave alone what is not: that is to be refused."""
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    if isinstance(body.get("model"), str):
        del body["model"]
    for name in {"prompt", "stop_token_ids", "tokens"} & body.keys():
        body[name] = _known_tokens(body[name])
    if body.get("prompt") in ("", []):
        body["prompt"] = "hello"
    if "top_logprobs" in body and body.get("logprobs", False) is False:
        body["logprobs"] = True
    if "stream_options" in body and body.get("stream", False) is False:
        body["stream"] = True
    if case.path in LENGTHS:
        _shorten(body, LENGTHS[case.path])
    case.body = body


def _shorten(body: dict[str, Any], name: str) -> None:
    """Ask for few tokens; ``name`` is the field that says how many."""
    wanted = body.get(name)
    if wanted is None or _is_natural(wanted):
        body[name] = MOST_TOKENS if wanted is None else min(wanted, MOST_TOKENS)
    if name != "max_tokens" and _is_natural(body.get("max_tokens")):  # the older name of the same
        del body["max_tokens"]
    if _is_natural(body.get("min_tokens")):
        body["min_tokens"] = min(body["min_tokens"], 1)


def _known_tokens(value: Any) -> Any:
    if isinstance(value, list):
        return [_known_tokens(item) for item in value]
    return value % SMALLEST_VOCABULARY if _is_natural(value) and value < 2**31 else value


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
