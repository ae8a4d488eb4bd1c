"""Vocabularies of GGUF files, their conversion, and llama.cpp's reading of the same files."""

import random

import gguf
import pytest
from tests.tiny_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, write_entry
from transformers import PreTrainedTokenizerFast

from kv8.errors import ModelError
from kv8.models.gguf_file import open_gguf
from kv8.models.gguf_tokenizer import write_tokenizer


def random_texts(count, pieces, *, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        chosen = draw.choices(pieces, k=draw.randint(1, 14))
        yield "".join(piece + draw.choice(["", " ", " ", "  ", "\n"]) for piece in chosen)


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
