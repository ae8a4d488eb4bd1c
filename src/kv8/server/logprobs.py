"""Log probabilities as OpenAI's two endpoints tell them, and as vLLM tells a prompt's."""

from collections.abc import Sequence
from typing import Any

from kv8.outputs import Logprob
from kv8.server.mailbox import TokenLogprobs
from kv8.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from kv8.server.protocol.completions import CompletionLogprobs

_LEAST = -9999.0  # what OpenAI says for "impossible": JSON has no minus infinity
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(
    token_ids: Sequence[int], reports: Sequence[TokenLogprobs], num_top: int
) -> ChoiceLogprobs:
    """Return the reports on ``token_ids`` in the shape of chat completions."""
    return ChoiceLogprobs(
        content=[
            TokenLogprob(
                **_candidate(report[token]),
                top_logprobs=[TopLogprob(**_candidate(entry)) for entry in _top(report, num_top)],
            )
            for token, report in zip(token_ids, reports, strict=True)
        ]
    )


def prompt_logprobs(
    reports: Sequence[TokenLogprobs | None] | None, num_top: int | None
) -> list[dict[str, Any] | None] | None:
    """Return a prompt's reports as vLLM tells them: candidates by token number, none for its first.

    ``num_top`` is how many were asked for, `None` if none were.
    """
    if reports is None or num_top is None:
        return None
    return [None if report is None else _by_number(report, num_top) for report in reports]


class CompletionReporter:
    """The reports on one completion in the shape of ``/v1/completions``, piece by piece.

    Text offsets are where a token's text lies in the completion's. A token that is only part of a
    character, or is not shown, lies where the text stood when it came.

    Args:
        num_top: how many of the most likely tokens to report.

    Attributes:
        first_token: text of the token that has no report, a prompt's first.
    """

    def __init__(self, num_top: int) -> None:
        self.first_token = ""
        self._num_top = num_top
        self._text = ""
        self._offset = 0

    def report(
        self,
        text: str,
        token_ids: Sequence[int],
        reports: Sequence[TokenLogprobs | None],
    ) -> CompletionLogprobs:
        """Return the reports on the next tokens, with which the text gained ``text``."""
        self._text += text
        told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, report in zip(token_ids, reports, strict=True):
            own = self.first_token if report is None else report[token].decoded_token or ""
            told.tokens.append(own)
            told.token_logprobs.append(None if report is None else _finite(report[token].logprob))
            told.top_logprobs.append(
                None if report is None else _by_text(report, token, self._num_top)
            )
            told.text_offset.append(self._place(own))
        return told

    def _place(self, token: str) -> int:
        found = self._text.find(token, self._offset, self._offset + len(token) + 2) if token else -1
        if found >= 0:
            self._offset = found + len(token)
            return found
        return self._offset


def _top(report: TokenLogprobs, num_top: int) -> list[Logprob]:
    """Return the most likely candidates; the token itself is among them only if it is one."""
    return sorted(report.values(), key=lambda entry: -entry.logprob)[:num_top]


def _with_own(report: TokenLogprobs, token: int, num_top: int) -> dict[int, Logprob]:
    """Return the most likely candidates and the token itself, likeliest first."""
    ranked = sorted(report, key=lambda candidate: -report[candidate].logprob)
    kept = {*ranked[:num_top], token}
    return {candidate: report[candidate] for candidate in ranked if candidate in kept}


def _by_text(report: TokenLogprobs, token: int, num_top: int) -> dict[str, float]:
    """Return candidates by text; of those with the same text the likeliest."""
    result: dict[str, float] = {}
    for entry in _with_own(report, token, num_top).values():
        result.setdefault(entry.decoded_token or "", _finite(entry.logprob))
    return result


def _by_number(report: TokenLogprobs, num_top: int) -> dict[str, Any]:
    own = next(iter(report))  # the engine puts the token itself first
    return {
        str(token): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in _with_own(report, own, num_top).items()
    }


def _candidate(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {
        "token": token,
        "logprob": _finite(entry.logprob),
        "bytes": None if _REPLACEMENT in token else list(token.encode()),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
