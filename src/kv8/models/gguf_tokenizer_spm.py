"""SentencePiece-style BPE from a GGUF file (``tokenizer.ggml.model`` is ``llama``).

Such a file has no merges: any two neighbours whose joint text is a token may be merged, the token
with the highest score first, the leftmost first among equals. Listing the pairs in that order makes
an ordinary BPE that does the same.
"""

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from kv8.errors import ModelError
from kv8.models.gguf_vocabulary import TokenType, Vocabulary

SPACE = "▁"


def sentencepiece_bpe(vocabulary: Vocabulary, unknown: str | None, *, prefix: bool) -> Tokenizer:
    """Build the tokenizer of ``vocabulary``, without special tokens.

    Args:
        vocabulary: tokens with scores.
        unknown: text of the token for what nothing else covers.
        prefix: put a space before the text, and after each special token.

    Raises:
        ModelError: the vocabulary has no scores to merge by.
    """
    if not vocabulary.scores:
        raise ModelError(f"{vocabulary.name} lacks tokenizer.ggml.scores, needed to merge tokens.")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=merges_by_score(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(vocabulary.of_type(TokenType.BYTE)),
        )
    )
    escape = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix else escape
    )
    restore = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*restore, decoders.Strip(" ", 1, 0)] if prefix else restore
    )
    return tokenizer


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, the best-scored result first.

    Only ordinary tokens take part: control tokens must not arise from plain text, and user-defined
    ones are cut out before any merging.
    """
    parts = {token for _, token in vocabulary.of_type(TokenType.NORMAL)}
    ranked = sorted(
        vocabulary.of_type(TokenType.NORMAL),
        key=lambda entry: (-vocabulary.scores[entry[0]], entry[0]),
    )
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
