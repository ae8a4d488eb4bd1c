"""The class names of a model's attention modules, without its weights.

compressed-tensors names what a scheme is for by class, so a checkpoint with q scales must.
"""

from typing import Any

import torch

from kv8.geometry import ModelGeometry
from kv8.models.config import model_class, text_config
from kv8.models.hook import find_attention_modules


def attention_classes(config: Any, geometry: ModelGeometry) -> tuple[str, ...]:
    """Return the class names, sorted, of the decoder's attention modules in transformers.

    Args:
        config: from `kv8.models.config.load_config`.
        geometry: from `kv8.models.geometry.read_geometry`.

    Raises:
        UnsupportedModelError: a layer has no attention module, or more than one.
    """
    built: Any = model_class(config)
    text = text_config(config)
    with torch.device("meta"):
        module = built(text if built.config_class is type(text) else config)
    modules = find_attention_modules(module, geometry)
    return tuple(sorted({type(found).__name__ for found in modules.values()}))
