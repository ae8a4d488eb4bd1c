"""Small tokenizers of the two kinds that tear characters apart, built on the spot."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<begin>", "<end>"]
# A few words, so that tokens of several characters occur beside single bytes.
WORDS = ["th", "the", "an", "and", "ok", "안녕", "한국", "세요", "é", "cat"]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    )


@cache
def byte_level() -> Any:
    """GPT-2's kind: every byte a letter, tokens of one or more bytes, characters torn anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = []
    for word in [*WORDS, " the", " cat", "👩"]:
        letters = as_letters.pre_tokenize_str(word)[0][0]
        # Cut off the last byte of words beyond ASCII: such tokens end inside a character.
        letters = letters if word.isascii() else letters[:-1]
        for length in range(2, len(letters) + 1):
            if letters[:length] not in vocab:
                vocab[letters[:length]] = len(vocab)
                merges.append((letters[: length - 1], letters[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = as_letters
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


@cache
def byte_fallback() -> Any:
    """Llama 2's kind: words with a space mark, characters it does not know as tokens ``<0x..>``."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    merges = []
    for word in ["▁", *"abcdefghijklmnopqrstuvwxyz", *WORDS, "▁the", "▁cat"]:
        for end in range(1, len(word) + 1):
            vocab.setdefault(word[end - 1], len(vocab))
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(tokenizer)
