"""Where a checkpoint's attention modules stand, told from the names of its own weights.

A scale is written beside the projections of its layer, under whatever prefix they have there
(``model.layers.3.self_attn``, ``language_model.model.layers.3.self_attn``): every loader then maps
both to the same module.
"""

import re
from collections.abc import Iterable

from kv8.errors import ScaleError
from kv8.geometry import ModelGeometry
from kv8.scales.names import ATTENTION_MODULE, LAYER_NAME, OTHER_PARTS
from kv8.scales.wording import layer_list

# A module with modules in it: `self_attn.o_proj.weight`, but not the norm
# `post_attention_layernorm.weight`.
_INSIDE = re.compile(rf"(?P<module>{ATTENTION_MODULE})\.\w+\..+")


def attention_paths(names: Iterable[str], geometry: ModelGeometry) -> dict[int, str]:
    """Return the name of each layer's attention module, by layer number.

    Args:
        names: the names of all weights.
        geometry: whose layers are wanted.

    Raises:
        ScaleError: a layer has no such module, or the names leave open which it is.
    """
    found: dict[int, set[str]] = {layer.layer: set() for layer in geometry.layers}
    for name in names:
        match = LAYER_NAME.fullmatch(name)
        if match is None or OTHER_PARTS.search(match["prefix"].lower()):
            continue
        inside = _INSIDE.fullmatch(match["tail"])
        if inside and int(match["layer"]) in found:
            path = f"{name[: match.start('tail')]}{inside['module']}"
            found[int(match["layer"])].add(path)
    unclear = {layer: paths for layer, paths in found.items() if len(paths) != 1}
    if unclear:
        seen = sorted(path for paths in unclear.values() for path in paths)
        raise ScaleError(
            f"The names of the weights do not tell where the scales of {layer_list(unclear)} "
            f"belong: found {', '.join(seen[:4]) or 'no attention module'}. A checkpoint cannot be "
            f"written for this model; the scales file works (leave checkpoint, --checkpoint, out)."
        )
    return {layer: paths.pop() for layer, paths in found.items()}
