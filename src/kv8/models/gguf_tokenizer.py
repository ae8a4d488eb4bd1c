"""Write a GGUF file's tokenizer as the tokenizer files of a Hugging Face folder."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from kv8.errors import UnsupportedModelError
from kv8.models.gguf_file import GGUFFile
from kv8.models.gguf_tokenizer_bpe import byte_level_bpe
from kv8.models.gguf_tokenizer_spm import sentencepiece_bpe
from kv8.models.gguf_vocabulary import TokenType, Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)

_NAMED_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelled so in the format
    "cls_token": "cls",
    "mask_token": "mask",
}

# A turn or a document ends with one of these, whatever single end token the file names.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<eos>",
)


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, the chat template included.

    Raises:
        UnsupportedModelError: a kind of tokenizer or a pre-tokenizer that is not known.
        ModelError: the vocabulary is missing or damaged.
    """
    vocabulary = read_vocabulary(file)
    named = {
        ours: vocabulary.text(file.metadata.get(f"tokenizer.ggml.{theirs}_token_id"))
        for ours, theirs in _NAMED_TOKENS.items()
    }
    tokenizer, add_bos = _build(file, vocabulary, named["unk_token"])
    tokenizer.add_tokens(_added_tokens(file, vocabulary))
    _surround(tokenizer, vocabulary, file.metadata, named, add_bos=add_bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.metadata.get(f"{file.architecture}.context_length"),
        **{name: token for name, token in named.items() if token is not None},
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )


def end_tokens(file: GGUFFile) -> list[int]:
    """Return the numbers of all tokens that end an answer, the file's end token first."""
    vocabulary = read_vocabulary(file)
    named = [
        number
        for name in ("eos", "eot", "eom")
        if vocabulary.text(number := file.metadata.get(f"tokenizer.ggml.{name}_token_id"))
    ]
    controls = {token: number for number, token in vocabulary.of_type(TokenType.CONTROL)}
    known = [controls.get(token) for token in _ENDS]
    return list(dict.fromkeys(number for number in named + known if number is not None))


def _added_tokens(file: GGUFFile, vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are cut out of the raw text before anything else happens to it.

    Unused and byte tokens are not among them: the model may emit them, text never becomes them.
    """
    # Phi-3's special tokens swallow the white space after them. The file does not say so; its name
    # is what llama.cpp goes by, too.
    is_phi3 = re.search("phi-?3", str(file.metadata.get("general.name", "")), re.IGNORECASE)
    keeps_space = ("<unk>", "<s>", "<|endoftext|>") if is_phi3 else vocabulary.ids
    kinds = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [
        AddedToken(token, special=special, normalized=False, rstrip=token not in keeps_space)
        for kind, special in kinds.items()
        for _, token in vocabulary.of_type(kind)
    ]


def _build(file: GGUFFile, vocabulary: Vocabulary, unknown: str | None) -> tuple[Tokenizer, bool]:
    """Return the bare tokenizer and whether prompts start with the begin token by default."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        return sentencepiece_bpe(vocabulary, unknown, prefix=prefix), True
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre")
        if pre is None:
            pre = "default"
            logger.warning(
                "%s does not name its pre-tokenizer; using the format's default, which may cut "
                "words otherwise than the model was trained with.",
                file.path.name,
            )
        return byte_level_bpe(vocabulary, metadata.get("tokenizer.ggml.merges"), pre)
    raise UnsupportedModelError(
        f"{file.path.name}: the tokenizer kind {kind!r} (tokenizer.ggml.model) cannot be "
        f"converted; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)."
    )


def _surround(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    metadata: dict[str, Any],
    named: dict[str, str | None],
    *,
    add_bos: bool,
) -> None:
    """Let the begin and end tokens be added around a text where the file wants them."""
    bos, eos = named["bos_token"], named["eos_token"]
    wanted_bos = bos if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    wanted_eos = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (wanted_bos, "$A", wanted_eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around,
        pair=[*around, *(f"{part}:1" for part in ("$B" if p == "$A" else p for p in around))],
        special_tokens=[
            (token, vocabulary.ids[token]) for token in {wanted_bos, wanted_eos} if token
        ],
    )
