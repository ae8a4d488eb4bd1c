"""Token masks by llguidance: what may come next, how an output ends, and what is refused."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.text_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kv8.engine.grammars import Grammars
from kv8.errors import RequestError
from kv8.structured_outputs import StructuredOutputsParams

TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def grammars(tokenizer=None, *, extra: int = 0) -> Grammars:
    """Return the grammars of a model with ``extra`` more logits than its tokenizer has tokens."""
    tokenizer = tokenizer or byte_level()
    return Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer) + extra)


def form(**given) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def tokens(text: str, tokenizer=None) -> list[int]:
    return (tokenizer or byte_level()).encode(text, add_special_tokens=False)


def texts(allowed: torch.Tensor, tokenizer=None) -> set[str]:
    tokenizer = tokenizer or byte_level()
    return {tokenizer.decode([token]) for token in allowed.nonzero()[:, 0].tolist()}


def end() -> int:
    return byte_level().eos_token_id


def test_a_mask_has_a_place_for_every_logit() -> None:
    allowed = grammars(extra=7).open(form(regex="[ab]")).allowed([])
    assert allowed.dtype == torch.bool
    assert allowed.shape == (len(byte_level()) + 7,)
    assert texts(allowed) == {"a", "b"}  # nothing of what has no text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_several_characters_are_allowed_where_they_fit(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    mask = grammars(tokenizer).open(form(regex="(and|the)!"))
    assert texts(mask.allowed([]), tokenizer) == {"a", "an", "and", "t", "th", "the"}
    first = tokenizer.convert_tokens_to_ids("th")
    assert texts(mask.allowed([first]), tokenizer) == {"e"}


def test_a_complete_output_is_followed_by_the_end_token_alone() -> None:
    mask = grammars().open(form(choice=["cat"]))
    assert end() not in mask.allowed([]).nonzero()
    assert mask.allowed(tokens("cat")).nonzero()[:, 0].tolist() == [end()]


def test_an_output_that_may_go_on_may_also_end() -> None:
    mask = grammars().open(form(regex="a+"))
    assert texts(mask.allowed(tokens("a"))) == {"a", "<end>"}


def test_every_end_token_of_the_model_ends_an_output() -> None:
    tokenizer = byte_level()
    ends = set(tokenizer.all_special_ids)
    assert len(ends) == 2
    mask = Grammars(tokenizer, {*ends, len(tokenizer) + 5}, len(tokenizer)).open(form(regex="a"))
    assert set(mask.allowed(tokens("a")).nonzero()[:, 0].tolist()) == ends


def test_a_special_token_is_no_text() -> None:
    """Its letters may be written out, letter by letter; the token itself would end the output."""
    allowed = grammars().open(form(regex="<end>|<begin>")).allowed([])
    assert texts(allowed) == {"<"}


def test_masks_follow_from_the_tokens_however_they_were_fed() -> None:
    compiled = grammars()
    schema = form(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    output = tokens('{"a": 12}')
    stepwise = compiled.open(schema)
    for length in range(len(output) + 1):
        expected = stepwise.allowed(output[:length])
        assert torch.equal(compiled.open(schema).allowed(output[:length]), expected)
        assert torch.equal(stepwise.allowed(output[:length]), expected)


def test_masks_of_one_form_go_their_own_ways() -> None:
    compiled = grammars()
    one, other = (compiled.open(form(choice=["ab", "cd"])) for _ in range(2))
    assert texts(one.allowed(tokens("a"))) == {"b"}
    assert texts(other.allowed(tokens("c"))) == {"d"}
    assert texts(compiled.open(form(choice=["ab", "cd"])).allowed([])) >= {"a", "c"}


def test_a_token_that_was_not_allowed_is_told_and_stays_told() -> None:
    mask = grammars().open(form(choice=["cat"]))
    for _ in range(2):
        with pytest.raises(RequestError, match="could not be followed beyond token 1 of the"):
            mask.allowed(tokens("x"))


@pytest.mark.parametrize("text", ['say "no"', "a\\b", "a/b", "line\nbreak", "안녕 👩", "'"])
def test_a_choice_is_taken_as_it_is_written(text: str) -> None:
    mask = grammars().open(form(choice=[text, "x"]))
    assert mask.allowed(tokens(text)).nonzero()[:, 0].tolist() == [end()]


def test_any_json_object() -> None:
    mask = grammars().open(form(json_object=True))
    assert texts(mask.allowed([])) == {"{"}
    assert end() in mask.allowed(tokens('{"a": [1, null, {"b": "é"}]}')).nonzero()


@pytest.mark.parametrize(
    ("regex", "text", "other"),
    [
        (r"\d+", "2026", "٣"),
        (r"[\d.]+", "20.26", "🯸"),
        (r"[\d-]x", "-x", "é"),
        (r"[^\d]", "é", "1"),
        (r"\w+", "a_9", "é"),
        (r"\D", "٣", "3"),
        (r"a\sb", "a\tb", "a\u2003b"),
        (r"[\S]", "é", " "),
        (r"\\d", "\\d", "1"),
        (r"\\\d", "\\1", "\\d"),
    ],
)
def test_classes_of_regular_expressions_are_ascii(regex: str, text: str, other: str) -> None:
    compiled = grammars()
    assert compiled.open(form(regex=regex)).allowed(tokens(text))[end()]
    with pytest.raises(RequestError):
        compiled.open(form(regex=regex)).allowed(tokens(other))


def test_blanks_in_json_come_to_an_end() -> None:
    mask = grammars().open(form(json_object=True))
    assert {" ", "\n", '"'} <= texts(mask.allowed(tokens("{")))
    assert not texts(mask.allowed(tokens("{ "))) & {" ", "\n", "\t"}
    mask = grammars().open(form(json_object=True))
    assert {" ", "\t", '"'} <= texts(mask.allowed(tokens("{\n" + 31 * " ")))
    assert not texts(mask.allowed(tokens("{\n" + 32 * " "))) & {" ", "\n", "\t"}


def test_a_grammar_in_lark() -> None:
    mask = grammars().open(form(grammar='start: "cat" | "c" NUMBER\nNUMBER: /[0-9]/'))
    assert {"a", "0", "9"} <= texts(mask.allowed(tokens("c")))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"json": {"type": "text"}}, "The JSON schema cannot be followed: .*text"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: .*"not"'),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, 'Unimplemented keys: .*"not"'),
        ({"json": "{"}, "The JSON schema cannot be followed"),
        ({"json": "false"}, "The JSON schema cannot be followed"),
        ({"json": {"anyOf": []}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "The JSON schema cannot be followed"),
        ({"json": {"$ref": "http://example.org/schema"}}, "does not fetch"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"regex": "(?=a)b"}, "The regex cannot be followed: .*look-around"),
        ({"grammar": "start: missing"}, "The grammar cannot be followed: .*missing"),
    ],
)
def test_a_form_nobody_can_follow_is_refused_with_the_reason(bad: dict, said: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){said}"):
        grammars().compile(form(**bad))


def test_a_schema_beyond_all_bounds_is_refused() -> None:
    huge = {"allOf": [{"anyOf": [{"pattern": f"{i}{j}"} for i in range(9)]} for j in range(9)]}
    with pytest.raises(RequestError, match="too large"):
        grammars().compile(form(json=huge))
    deep = '{"items":' * 50_000 + "{}" + "}" * 50_000
    with pytest.raises(RequestError, match="recursion"):
        grammars().compile(form(json=deep))


def test_more_tokens_than_logits_are_refused_with_both_numbers() -> None:
    tokenizer = byte_level()
    with pytest.raises(RequestError, match=f"{len(tokenizer)} tokens, .* logits for 200"):
        Grammars(tokenizer, {0}, 200).compile(form(regex="a"))


@pytest.mark.parametrize("ends", [(), (10_000,)])
def test_a_model_without_an_end_token_is_refused(ends: tuple[int, ...]) -> None:
    tokenizer = byte_level()
    with pytest.raises(RequestError, match="needs a model with an end token"):
        Grammars(tokenizer, ends, len(tokenizer)).compile(form(regex="a"))


def test_a_tokenizer_of_another_make_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="SimpleNamespace"):
        Grammars(SimpleNamespace(), {0}, 10).compile(form(regex="a"))


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")
    with pytest.raises(RequestError, match="not possible with this model's tokenizer"):
        Grammars(tokenizer, {1}, len(tokenizer)).compile(form(regex="a"))


def test_without_the_extra_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'kv8\[server\]'"):
        grammars().compile(form(regex="a"))


def test_the_engine_does_not_import_llguidance() -> None:
    program = "import sys, kv8.llm; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_the_last_forms_are_kept() -> None:
    compiled = grammars()
    for number in range(100):
        compiled.compile(form(regex=f"a{number}"))
    assert len(compiled._compiled) == 64
    assert form(regex="a99") in compiled._compiled


def test_many_threads_compile_and_open_at_once() -> None:
    compiled = grammars()

    def work(number: int) -> None:
        for turn in range(40):
            text = f"a{(number + turn) % 70}"
            allowed = compiled.open(form(choice=[text])).allowed(tokens(text))
            assert allowed.nonzero()[:, 0].tolist() == [end()]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_masks_looked_ahead_are_those_of_one_by_one() -> None:
    compiled = grammars()
    forms = [form(regex="[ab]+"), form(choice=["cat", "cow"]), form(json_object=True)]
    outputs = [tokens("ab"), tokens("c"), tokens('{"a": ')]
    alone, together = ([compiled.open(one) for one in forms] for _ in range(2))
    expected = [mask.allowed(output) for mask, output in zip(alone, outputs, strict=True)]
    compiled.look_ahead(list(zip(together, outputs, strict=True)))
    for mask, output, allowed in zip(together, outputs, expected, strict=True):
        assert torch.equal(mask.allowed(output), allowed)
    # One that was looked ahead for goes on like any other.
    assert texts(together[1].allowed(tokens("co"))) == {"w"}


def test_a_form_that_cannot_be_followed_further_harms_no_other_looked_ahead_for() -> None:
    compiled = grammars()
    broken, sound = compiled.open(form(choice=["ab"])), compiled.open(form(choice=["ab"]))
    compiled.look_ahead([(broken, tokens("x")), (sound, tokens("a"))])
    with pytest.raises(RequestError, match="beyond token 1"):
        broken.allowed(tokens("x"))
    assert texts(sound.allowed(tokens("a"))) == {"b"}
