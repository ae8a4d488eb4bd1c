"""Tokenizers made from GGUF metadata: the rules by name, the order of merges, special tokens."""

import json
import unicodedata

import pytest
from tests.gguf_vocabularies import Judge, convert, random_texts, refused, sentencepiece_vocabulary
from tests.tiny_gguf import (
    CONTROL,
    NORMAL,
    byte_level_vocabulary,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kv8.errors import UnsupportedModelError
from kv8.models.gguf_tokenizer_bpe import PRE_TOKENIZERS

# Everything the rules tell apart: cases, digits of several scripts, signs, marks, white space.
WORDS = """
    the don't I'LL we've 'S 'x He'LLo Café naïve ẞ ﬁ Ünï ªº camelCase HTTPServer XMLHttp ABCdef
    1234567 3.14 ² ½ ٣٤ Ⅷ ① 𝟘 𝐀 一二三 日本語 한국어
    $100 a_b <|x|> foo/bar // ... !!! ?! — “q” 👩‍👩‍👧 🚀 ' " . - # < | ~ ^ + = `
"""
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u3000", "\x85", "\0"]
PIECES = [*WORDS.split(), *SPACES]
MARKS = ["e\u0301", "नमस्ते", "สวัสดี", "ǅ", "ʰ"]


@pytest.fixture(scope="module")
def crossing_vocabulary():
    """A byte-level BPE whose merges reach over all word borders, so that every cut shows."""
    specials = ["<pad>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        max_token_length=8,
        show_progress=False,
    )
    trained.train_from_iterator(random_texts(2000, PIECES + MARKS, seed=1), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return byte_level_vocabulary() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_words_are_cut_as_llama_cpp_cuts_them(tmp_path, crossing_vocabulary, pre):
    tokenizer = convert(tmp_path, crossing_vocabulary, **{"tokenizer.ggml.pre": pre})
    # llama.cpp knows no letter cases beyond A to Z and takes marks for no letters, which differs
    # from the tokenizers those two names stand for.
    cased = pre in ("gpt-4o", "tekken")
    latin = [piece for piece in PIECES if piece.isascii() or not piece[0].isalpha()]
    texts = list(random_texts(150, latin if cased else PIECES + MARKS))
    if PRE_TOKENIZERS[pre].compose:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    Judge(tmp_path / "vocabulary.gguf").check(tokenizer, texts)


CUTS = {
    "default": "don|'|t| |123|45|,| CamelCase|//|\n\n| x",
    "gpt-2": "don|'t| 12345|,| CamelCase|//|\n\n| x",
    "smollm": "don|'t| |1|2|3|4|5|,| CamelCase|//|\n\n| x",
    "llama-bpe": "don|'t| |123|45|,| CamelCase|//\n\n| x",
    "qwen2": "don|'t| |1|2|3|4|5|,| CamelCase|//\n\n| x",
    "gpt-4o": "don't| |123|45|,| Camel|Case|//\n\n| x",
    "tekken": "don|'t| |1|2|3|4|5|,| Camel|Case|//\n\n| x",
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_by_name(tmp_path, pre):
    """The cuts themselves, without any judge."""
    convert(tmp_path, byte_level_vocabulary(), **{"tokenizer.ggml.pre": pre})
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "don't 12345, CamelCase//\n\n x"
    pieces = [text[start:end] for _, (start, end) in saved.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(pieces) == CUTS[pre]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    refused(
        tmp_path, byte_level_vocabulary(), "'smollm9'", "tokenizer.ggml.pre", "smollm, stablelm2",
        kind=UnsupportedModelError, **{"tokenizer.ggml.pre": "smollm9"},
    )  # fmt: skip


def test_a_file_without_pre_tokenizer_gets_the_default_and_a_warning(tmp_path, caplog):
    convert(tmp_path, byte_level_vocabulary(), **{"tokenizer.ggml.pre": None})
    assert "does not name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "no_vocab"])
def test_an_unknown_kind_is_refused_by_name(tmp_path, kind):
    refused(
        tmp_path, byte_level_vocabulary(), repr(kind), "gpt2", "llama",
        kind=UnsupportedModelError, **{"tokenizer.ggml.model": kind},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a xyz"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges do not fit"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path, changes, word):
    refused(tmp_path, byte_level_vocabulary(), word, **changes)


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
@pytest.mark.parametrize(("kind", "default"), [("spm", True), ("gpt-2", False), ("tekken", True)])
def test_begin_and_end_tokens(tmp_path, kind, default, bos, eos):
    vocabulary = sentencepiece_vocabulary("ab") if kind == "spm" else byte_level_vocabulary()
    changes = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    if kind != "spm":
        changes["tokenizer.ggml.pre"] = kind
    tokenizer = convert(tmp_path, vocabulary, **changes)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    begin = [1] if (default if bos is None else bos) else []
    assert tokenizer.encode("ab") == begin + plain + ([2] if eos else [])


def test_the_chat_template_is_kept(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]\n{% endfor %}"
    tokenizer = convert(tmp_path, byte_level_vocabulary(), **{"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "é"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>[é]\n"
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.model_max_length == 64


def test_auto_tokenizer_reads_the_same(tmp_path):
    """The folder alone says what the tokenizer is, to whoever reads it."""
    ours = convert(tmp_path, byte_level_vocabulary(), **{"tokenizer.ggml.pre": "smollm"})
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert type(auto) is type(ours)
    assert auto.encode("don't 123") == ours.encode("don't 123")
