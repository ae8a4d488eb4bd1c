"""Structured output: from the form asked for to masks over the model's tokens, by llguidance.

llguidance is an extra and is imported when the first form is compiled.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import torch

from kv8.engine.grammar_masks import GrammarMask, MaskComputer, one_line
from kv8.engine.token_mask import TokenMask
from kv8.errors import RequestError
from kv8.structured_outputs import StructuredOutputsParams

# Between two parts of a JSON text: a blank, or a line break and an indentation. Models that have
# nothing to say go on with blanks for ever where nothing stops them.
_WHITESPACE = r" |\n[ \t]{0,32}"
# llguidance reads options out of the schema itself, and one of them ignores keywords it does not
# know; what is given here overrides that.
JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "lenient": False}
# By default 2,000, which an object of 500 optional properties exceeds; with 3,000 of them a mask
# takes 3 ms. The other limits stay: they bound what a form can make everyone else wait.
_MOST_ITEMS = 20_000
# llguidance reads these as Unicode does, where a digit may be one of 700 characters. Whoever writes
# [0-9] in this short way means what it means in a JSON schema's pattern, and in vLLM.
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NUM_KEPT = 64  # compiled forms; clients send the same few again and again


class Grammars:
    """Compiles forms for one model's tokens and keeps the last ones. Any thread may use it.

    Args:
        tokenizer: a transformers tokenizer.
        end_token_ids: the model's end tokens; a complete output is followed by one of them.
        vocab_size: V, the tokens the model has logits for.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(token for token in end_token_ids if token < vocab_size)
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._computer: MaskComputer | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutputsParams) -> None:
        """Make ``form`` ready, so that `open` takes no time. May take a second, the first time.

        Raises:
            RequestError: llguidance is missing, cannot take this model's tokens, or refuses the
                form; says why.
        """
        self._matcher(form)

    def open(self, form: StructuredOutputsParams) -> TokenMask:
        """Return the mask of one new sequence whose output is to have ``form``.

        Raises:
            RequestError: as `compile`.
        """
        matcher = self._matcher(form).deep_copy()
        assert self._computer is not None, "a form was compiled"
        return GrammarMask(matcher, self._computer)

    def look_ahead(self, masks: Sequence[tuple[TokenMask, Sequence[int]]]) -> None:
        """Compute the masks of a step together, so that each is there when it is asked for.

        Args:
            masks: of sequences, with the output so far of each.
        """
        own = [(mask, output) for mask, output in masks if isinstance(mask, GrammarMask)]
        for mask, output in own:
            mask.advance(output)
        if own:
            assert self._computer is not None, "a mask was opened"
            self._computer.compute([mask for mask, _ in own])

    def _matcher(self, form: StructuredOutputsParams) -> Any:
        """Return llguidance's matcher for ``form`` before the first token; for copying only."""
        with self._lock:
            if form in self._compiled:
                self._compiled.move_to_end(form)
                return self._compiled[form]
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(
                    self._tokenizer, self._end_token_ids, self._vocab_size
                )
                self._computer = MaskComputer(self._vocab_size, torch.get_num_threads())
        matcher = _compile(form, self._vocabulary)  # not locked: others need not wait for it
        with self._lock:
            self._compiled[form] = matcher
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        return matcher


def _compile(form: StructuredOutputsParams, vocabulary: Any) -> Any:
    import llguidance

    try:
        matcher = llguidance.LLMatcher(
            vocabulary,
            _grammar_text(llguidance.LLMatcher, form),
            log_level=0,
            limits=llguidance.LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False),
        )
        # Some impossible forms are found out only when a first token is looked for.
        first = matcher.deep_copy()
        first.compute_bitmask()
        failure = matcher.get_error() or first.get_error()
    except ValueError as error:
        failure = str(error)
    if failure:
        raise RequestError(f"{_name(form)} cannot be followed: {one_line(failure)}.")
    return matcher


def _grammar_text(matcher: Any, form: StructuredOutputsParams) -> str:
    """Return ``form`` in llguidance's own language."""
    text: str
    if form.json is not None:
        text = matcher.grammar_from_json_schema(form.json, overrides=JSON_OPTIONS)
    elif form.json_object:
        text = matcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
    elif form.regex is not None:
        text = matcher.grammar_from_regex(_with_ascii_classes(form.regex))
    elif form.choice is not None:
        # A string of Lark is written as one of JSON is.
        quoted = [json.dumps(text, ensure_ascii=False) for text in form.choice]
        text = matcher.grammar_from_lark("start: " + " | ".join(quoted))
    else:
        text = matcher.grammar_from_lark(form.grammar)
    return text


def _with_ascii_classes(regex: str) -> str:
    """Return ``regex`` with ``\\d``, ``\\w``, ``\\s`` and their opposites spelled out, in ASCII."""

    def spell(escape: re.Match[str]) -> str:
        members = _CLASSES.get(escape[1].lower())
        if members is None:
            return escape[0]
        return f"[{members}]" if escape[1].islower() else f"[^{members}]"

    return _ESCAPE.sub(spell, regex)


def _name(form: StructuredOutputsParams) -> str:
    given = {"JSON schema": form.json, "regex": form.regex, "choice": form.choice}
    return f"The {next((name for name, value in given.items() if value is not None), 'grammar')}"


def _read_vocabulary(tokenizer: Any, end_token_ids: Sequence[int], vocab_size: int) -> Any:
    """Return llguidance's view of a model's tokens."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "Structured output needs llguidance, which is not installed here. Install it with "
            "pip install 'kv8[server]'."
        ) from None
    if not end_token_ids:
        raise RequestError(
            "Structured output needs a model with an end token, to say that the output is "
            "complete. Neither this model's config nor its tokenizer names one."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"Structured output needs a tokenizer of the tokenizers library, one with a "
            f"tokenizer.json; this model has a {type(tokenizer).__name__}."
        )
    if len(tokenizer) > vocab_size:
        raise RequestError(
            f"Structured output needs a tokenizer that fits the model; this one has "
            f"{len(tokenizer)} tokens, and the model has logits for {vocab_size}."
        )
    try:
        return llguidance.LLTokenizer(
            backend.to_str(), n_vocab=vocab_size, eos_token=list(end_token_ids)
        )
    except ValueError as error:
        raise RequestError(
            f"Structured output is not possible with this model's tokenizer, which llguidance "
            f"cannot take: {error}."
        ) from None
