"""SentencePiece tokenizers made from GGUF metadata: order of merges, special tokens, spaces."""

import random

import pytest
from tests.gguf_vocabularies import (
    Judge,
    convert,
    random_texts,
    refused,
    sentencepiece_vocabulary,
    tokens,
    with_tokens,
)
from tests.tiny_gguf import CONTROL, USER_DEFINED


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
