"""Tokenizers made from GGUF metadata: the rules by name, the order of merges, special tokens."""

import json
import random
import unicodedata

import gguf
import pytest
from tests.tiny_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level_vocabulary,
    write_entry,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.gguf_file import open_gguf
from kv8.models.gguf_tokenizer import write_tokenizer
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


def random_texts(count, pieces=PIECES, *, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        chosen = draw.choices(pieces, k=draw.randint(1, 14))
        yield "".join(piece + draw.choice(["", " ", " ", "  ", "\n"]) for piece in chosen)


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


def sentencepiece_vocabulary(*words, **changes):
    """A vocabulary with scores: specials, bytes, single letters, then ``words``, best first."""
    letters = sorted({letter for word in words for letter in word} | {"▁"})
    tokens = ["<pad>", "<s>", "</s>", "<unk>"]
    types = [CONTROL] * 3 + [UNKNOWN]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    longer = [word for word in words if len(word) > 1]
    scores = [-1000.0] * len(tokens) + [-100.0] * len(letters)
    scores += [-float(rank) for rank in range(len(longer))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + letters + longer,
        "tokenizer.ggml.token_type": types + [NORMAL] * (len(letters) + len(longer)),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        **changes,
    }


def with_tokens(vocabulary, *tokens, kind):
    """Return ``vocabulary`` with ``tokens`` of type ``kind`` added at its end."""
    more = {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [kind] * len(tokens),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    return vocabulary | {key: vocabulary[key] + more[key] for key in more if key in vocabulary}


def write_vocabulary(folder, vocabulary, **changes):
    """Write a GGUF file of a tokenizer alone and return its path."""
    entries = vocabulary | changes
    writer = gguf.GGUFWriter(folder / "vocabulary.gguf", "llama")
    for key, value in {
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **entries,
    }.items():
        write_entry(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "vocabulary.gguf"


def convert(folder, vocabulary, **changes):
    path = write_vocabulary(folder, vocabulary, **changes)
    with open_gguf(path) as file:
        write_tokenizer(file, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tokens(tokenizer, text, **options):
    return tokenizer.convert_ids_to_tokens(
        tokenizer.encode(text, add_special_tokens=False, **options)
    )


def refused(folder, vocabulary, *words, kind=ModelError, **changes):
    with pytest.raises(kind) as caught:
        convert(folder, vocabulary, **changes)
    assert "\n" not in str(caught.value)
    for word in ("vocabulary.gguf", *words):
        assert word in str(caught.value)


class Judge:
    """llama.cpp's tokenizer of the same file."""

    def __init__(self, path):
        llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        self.model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def encode(self, text, *, special, bos=False):
        return self.model.tokenize(text.encode(), add_bos=bos, special=special)

    def check(self, tokenizer, texts):
        for text in texts:
            for special in (True, False):
                ours = tokenizer.encode(
                    text, add_special_tokens=False, split_special_tokens=not special
                )
                assert ours == self.encode(text, special=special), (text, special)
            with_bos = self.encode(text, special=True, bos=True)
            assert tokenizer.encode(text) == with_bos


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


def test_sentencepiece_without_scores_is_refused(tmp_path):
    refused(tmp_path, sentencepiece_vocabulary("ab"), "scores", **{"tokenizer.ggml.scores": None})


def test_the_best_score_is_merged_first(tmp_path):
    tokenizer = convert(tmp_path, sentencepiece_vocabulary("bc", "ab", "abc"))
    assert tokens(tokenizer, "abc") == ["▁", "abc"]
    tokenizer = convert(tmp_path, sentencepiece_vocabulary("bc", "ab", "abcd", "abd"))
    assert tokens(tokenizer, "abcd") == ["▁", "a", "bc", "d"]
    tokenizer = convert(tmp_path, sentencepiece_vocabulary("ab", "bc", "abcd", "abd"))
    assert tokens(tokenizer, "abcd") == ["▁", "ab", "c", "d"]


def test_sentencepiece_is_llama_cpps(tmp_path):
    words = [f"{a}{b}" for a in "▁abcde" for b in "abcde"] + ["▁abc", "abcd", "cde", "▁a▁", "▁▁"]
    random.Random(0).shuffle(words)
    for prefix in (True, False):
        vocabulary = with_tokens(sentencepiece_vocabulary(*words), "<eot>", kind=CONTROL)
        vocabulary = with_tokens(vocabulary, "\n", "\n\n", "  ", "<b>", kind=USER_DEFINED)
        tokenizer = convert(tmp_path, vocabulary, **{"tokenizer.ggml.add_space_prefix": prefix})
        pieces = ["abcde", "edcba", "aab", " ", "\n", "  ", "é", "👩", "<eot>", "<b>", "<0x41>"]
        Judge(tmp_path / "vocabulary.gguf").check(tokenizer, random_texts(200, pieces))


def test_characters_outside_the_vocabulary_become_bytes(tmp_path):
    tokenizer = convert(tmp_path, sentencepiece_vocabulary("ab"))
    assert tokens(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é👩 ab", add_special_tokens=False)) == "ab é👩 ab"


@pytest.mark.parametrize("prefix", [True, False])
def test_the_space_put_in_front_is_taken_away_again(tmp_path, prefix):
    tokenizer = convert(
        tmp_path, sentencepiece_vocabulary("ab"), **{"tokenizer.ggml.add_space_prefix": prefix}
    )
    for text in ("ab", " ab", "  ab ", "", "ab  ab"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (tokens(tokenizer, "ab")[0] == "▁") is prefix


def test_control_tokens_come_from_parsed_text_only(tmp_path):
    vocabulary = sentencepiece_vocabulary("</", "</s", "s>")
    tokenizer = convert(tmp_path, vocabulary)
    assert 2 in tokenizer.encode("</s>", add_special_tokens=False)
    assert 2 not in tokenizer.encode("</s>", add_special_tokens=False, split_special_tokens=True)


def test_user_defined_tokens_are_always_cut_out_longest_first(tmp_path):
    vocabulary = with_tokens(sentencepiece_vocabulary("ab"), "\n", "\n\n", kind=USER_DEFINED)
    tokenizer = convert(tmp_path, vocabulary, **{"tokenizer.ggml.add_space_prefix": False})
    for split in (True, False):
        assert tokens(tokenizer, "\n\n\nab", split_special_tokens=split) == ["\n\n", "\n", "ab"]


def test_phi3s_special_tokens_swallow_space(tmp_path):
    vocabulary = with_tokens(
        sentencepiece_vocabulary("ab"), "<|user|>", "<|endoftext|>", kind=CONTROL
    )
    texts = ["<|user|>\n ab<s>\n ab</s> ab<|user|>", "<unk> ab <|endoftext|> ab"]
    for name, swallowed in (("Phi 3 Mini", False), ("Phi-3 Mini 4k", True), ("phi3", True)):
        tokenizer = convert(tmp_path, vocabulary, **{"general.name": name})
        assert (tokens(tokenizer, "<|user|> \nab") == ["<|user|>", "▁", "ab"]) is swallowed
        Judge(tmp_path / "vocabulary.gguf").check(tokenizer, texts)


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
