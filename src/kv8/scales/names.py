"""Which KV cache scale a tensor name stands for: one table of spellings for every producer.

Runs before any other mapping of weight names, for every architecture alike. A weight's or a linear
layer's own scale (``weight_scale``, ``input_scale``) is none of its business. A name that looks
like a KV cache scale but fits no row is an error: a lost scale must never go unnoticed.
"""

import enum
import re
from dataclasses import dataclass

from kv8.errors import ScaleError
from kv8.scales.scale import Side


class Role(enum.Enum):
    """What a recognised tensor is to the KV cache."""

    SCALE = "scale"
    OFFSET = "zero point or affine bias"
    PROBABILITY = "softmax weight scale"


@dataclass(frozen=True)
class Spelling:
    """One way producers spell a tensor, as what follows ``layers.<n>.``.

    Attributes:
        example: one name, for people.
        tail: regular expression; ``{attention}`` stands for the path of the attention module,
            which may be missing. Group ``side`` is q, k, v, or kv for both.
        producers: who writes it.
        role: what it is.
        before_rope: the statistic was taken at the projection's output, before the rotary
            embedding turned it.
    """

    example: str
    tail: str
    producers: str
    role: Role = Role.SCALE
    before_rope: bool = False


SPELLINGS = (
    Spelling("self_attn.k_scale", r"{attention}(?P<side>[qkv])_scale", "compressed-tensors, vLLM"),
    Spelling("self_attn.kv_scale", r"{attention}(?P<side>kv)_scale", "AutoFP8, older vLLM"),
    Spelling(
        "self_attn.k_proj.k_scale",
        r"{attention}(?!q_proj\.[kv]|[kv]_proj\.q)"
        r"(?:[qkv]_proj|\w*qkv\w*|query_key_value|c_attn)\.(?P<side>[qkv])_scale",
        "ModelOpt; also on fused projections: the last letter decides",
    ),
    Spelling("self_attn.q.scale", r"{attention}(?P<side>q)\.scale", "HunYuan"),
    Spelling("self_attn.k_cache.scale", r"{attention}(?P<side>[kv])_cache\.scale", "HunYuan"),
    Spelling(
        "self_attn.k_proj.output_scale",
        r"{attention}(?P<side>[qkv])_proj\.output_scale",
        "Quark, AutoFP8, compressed-tensors of 2024",
        before_rope=True,
    ),
    Spelling(
        "self_attn.prob_output_scale",
        r"{attention}prob(?:_output)?_scale",
        "Quark, vLLM",
        Role.PROBABILITY,
    ),
    Spelling(
        "self_attn.k_zero_point",
        r"{attention}(?P<side>[qkv]|kv)_zero_point",
        "compressed-tensors",
        Role.OFFSET,
    ),
    Spelling(
        "self_attn.k_proj.output_zero_point",
        r"{attention}(?P<side>[qkv])_proj\.output_zero_point",
        "Quark",
        Role.OFFSET,
    ),
    Spelling(
        "self_attn.k_proj.k_bias",
        r"{attention}[kv]_proj\.(?P<side>[kv])_bias",
        "ModelOpt's affine formats",
        Role.OFFSET,
    ),
)

# The module that attends is named after attention nearly everywhere; hybrids call it mixer. Some
# exporters repeat it, or add vLLM's inner `attn`. Cross-attention has another cache, or none.
ATTENTION_MODULE = r"(?:(?!\w*(?:cross|enc))\w*att(?:n|ention)\w*|\w*SelfAttention|mixer)"
_ATTENTION = rf"(?:{ATTENTION_MODULE}\.){{0,3}}"
_TAILS = tuple(
    (re.compile(spelling.tail.format(attention=_ATTENTION)), spelling) for spelling in SPELLINGS
)
LAYER_NAME = re.compile(
    r"(?P<prefix>(?:\w+\.)*?)(?:layers|layer|decoder_layers|h|blocks|block)\.(?P<layer>\d+)\.(?P<tail>.+)"
)
# Parts of a checkpoint whose layers are numbered from 0 as well but are not the decoder's.
OTHER_PARTS = re.compile(r"vision|visual|image|video|audio|speech|encoder|talker|mtp|draft|eagle")
_LOOKS_LIKE_ONE = re.compile(
    r"(?:^|\.)(?:"
    r"(?:q|k|v|kv|qk|qkv|query|key|value|prob|softmax)_(?:cache_|global_|output_)?"
    r"(?:scales?|zero_points?)(?:_inv)?"
    r"|(?:q|k|v|kv)_cache\.\w+"
    r"|(?:\w*(?:q|k|v|kv)_proj|\w*qkv\w*|query_key_value|c_attn)\."
    r"(?:output_scale|output_zero_point|[qkv]_bias)"
    r")$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class BoundName:
    """What a tensor name stands for.

    Attributes:
        layer: the layer number in the name.
        sides: the sides it holds a value for; empty for a softmax weight scale.
        spelling: the row of the table that it fits.
    """

    layer: int
    sides: tuple[Side, ...]
    spelling: Spelling


def resolve_name(name: str) -> BoundName | None:
    """Return what tensor ``name`` is to the KV cache, or `None` if it has nothing to do with it.

    Raises:
        ScaleError: the name looks like a KV cache scale but fits no spelling.
    """
    match = LAYER_NAME.fullmatch(name)
    if match and not OTHER_PARTS.search(match["prefix"].lower()):
        for tail, spelling in _TAILS:
            found = tail.fullmatch(match["tail"])
            if found:
                sides = found.groupdict().get("side") or ""
                return BoundName(int(match["layer"]), tuple(sides), spelling)  # type: ignore[arg-type]
    if _LOOKS_LIKE_ONE.search(name):
        known = ", ".join(spelling.example for spelling in SPELLINGS)
        raise ScaleError(
            f"Tensor {name} looks like a KV cache scale but belongs to no attention layer that kv8 "
            f"runs, so its value would be lost. After the layer number kv8 knows: {known}. Rename "
            f"the tensor, or remove it if nothing needs it."
        )
    return None
