"""Any walk along the token masks of a schema gives a text that fits it, wherever it is taken up."""

import json
import random
import re
from typing import Any

import hypothesis.strategies as st
import jsonschema_rs
import torch
from hypothesis import given, settings
from tests.text_tokenizers import byte_fallback, byte_level

from kv8.engine.grammars import Grammars
from kv8.structured_outputs import StructuredOutputsParams

TOKENIZERS = (byte_level(), byte_fallback())
MOST_TOKENS = 3000

names = st.text("abcé", min_size=1, max_size=3)


def objects(properties: dict[str, Any]) -> dict[str, Any]:
    required = sorted(properties)[::2]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "안녕"}]),
    st.integers(-99, 99).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 30}),
    st.integers(0, 5).map(lambda length: {"type": "string", "maxLength": length}),
    st.lists(st.one_of(names, st.integers(-5, 5)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=3).map(objects),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


def walk(compiled: Grammars, form: StructuredOutputsParams, end: int, seed: int) -> list[int]:
    """Return the tokens of a random walk along the masks of ``form``, without the end token."""
    chooser = random.Random(seed)
    mask = compiled.open(form)
    output: list[int] = []
    while len(output) < MOST_TOKENS:
        allowed = mask.allowed(output).nonzero()[:, 0].tolist()
        assert allowed, "a mask must leave a token"
        token = chooser.choice(allowed)
        if token == end:
            return output
        output.append(token)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens")


@settings(max_examples=60)
@given(schema=schemas, which=st.sampled_from([0, 1]), seed=st.integers(0, 2**32))
def test_a_walk_ends_in_a_text_of_the_schema(schema: Any, which: int, seed: int) -> None:
    tokenizer = TOKENIZERS[which]
    end = tokenizer.eos_token_id
    compiled = Grammars(tokenizer, {end}, len(tokenizer) + 3)
    form = StructuredOutputsParams(json=schema)
    output = walk(compiled, form, end, seed)
    text = tokenizer.decode(output)
    jsonschema_rs.validate(schema, json.loads(text))

    # A sequence that was preempted takes its mask up again somewhere, in one go.
    stop = random.Random(seed).randint(0, len(output))
    resumed, stepwise = compiled.open(form), compiled.open(form)
    for length in range(stop):
        stepwise.allowed(output[:length])
    assert torch.equal(resumed.allowed(output[:stop]), stepwise.allowed(output[:stop]))


atoms = st.sampled_from(["a", "[ab]", "[0-9]", "é", "안녕", "(the|an)", "(👩|c)"])
counts = st.sampled_from(["", "?", "{2}", "{1,3}"])


@settings(max_examples=60)
@given(parts=st.lists(st.tuples(atoms, counts), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_walk_along_a_regular_expression_matches_it(
    parts: list[tuple[str, str]], seed: int
) -> None:
    pattern = "".join(f"({atom}){count}" for atom, count in parts)
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    compiled = Grammars(tokenizer, {end}, len(tokenizer))
    output = walk(compiled, StructuredOutputsParams(regex=pattern), end, seed)
    assert re.fullmatch(pattern, tokenizer.decode(output))
