"""Byte-level BPE from a GGUF file (``tokenizer.ggml.model`` is ``gpt2``).

How text is cut into words before merging is not in the file; it gives a name for it
(``tokenizer.ggml.pre``), and the rules behind the names are part of llama.cpp. Those written here
are checked against it, name by name.
"""

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.gguf_vocabulary import Vocabulary

_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# GPT-2's words: a space belongs to the letters, digits or signs after it.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Words as Llama 3 and Qwen 2 cut them: any one sign may lead letters, digits stand apart."""
    return (
        rf"(?:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, suffix: str = "") -> str:
    """Words that also end where lower case turns to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words.

    Attributes:
        patterns: each cuts the pieces the one before left, into its matches and what lies between.
        ignore_merges: a word that is a token as a whole is taken as it is.
        add_bos: whether a prompt starts with the begin token when the file does not say.
        compose: text is brought to Unicode's composed form (NFC) first. llama.cpp leaves that
            out; the tokenizers these models were trained with do not.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), compose=True)
_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "mpt": _GPT2_WORDS,
    "olmo": _GPT2_WORDS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": PreTokenizer((_words(r"\p{N}"),)),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"(?:{_CONTRACTIONS})?"),)),
    "tekken": PreTokenizer((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
}


def byte_level_bpe(vocabulary: Vocabulary, merges: object, pre: object) -> tuple[Tokenizer, bool]:
    """Build the tokenizer of ``vocabulary``, without special tokens.

    Returns:
        The tokenizer, and whether prompts start with the begin token unless the file says.

    Raises:
        UnsupportedModelError: ``pre`` is not known.
        ModelError: the merges do not fit the vocabulary.
    """
    rules = PRE_TOKENIZERS.get(str(pre))
    if rules is None:
        raise UnsupportedModelError(
            f"{vocabulary.name}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known, and "
            f"guessing would give other tokens. Known: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ModelError(f"{vocabulary.name} lacks tokenizer.ggml.merges.")
    cuts = [merge.find(" ", 1) for merge in merges]
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]
    try:
        model = BPE(
            vocab=vocabulary.ids,
            merges=pairs,
            ignore_merges=rules.ignore_merges,
        )
    except Exception as error:
        raise ModelError(
            f"{vocabulary.name}: the merges do not fit the tokens: {error}."
        ) from error
    tokenizer = Tokenizer(model)
    if rules.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos
