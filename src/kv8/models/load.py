"""Loads a model's weights, hooks the model, and checks it before anybody uses it."""

import importlib.util
import logging
from typing import Any

import torch
from safetensors import SafetensorError

from kv8.errors import UnsupportedModelError
from kv8.geometry import ModelGeometry
from kv8.models.build import account_for_every_tensor, build_model, checkpoint_tensors, explained
from kv8.models.config import read_config_json
from kv8.models.fp8_weights import expand_fp8_weights, read_tensors
from kv8.models.fuse import fuse_model
from kv8.models.fuse_gpu import fuse_gpu_model
from kv8.models.hook import HookedModel
from kv8.models.source import ModelSource
from kv8.models.verify import verify_model
from kv8.models.weight_storage import WeightStorage, check_weight_storage

logger = logging.getLogger(__name__)

# What transformers raises for weights it cannot use.
_LOAD_ERRORS = (
    ImportError, KeyError, OSError, SafetensorError, RuntimeError, ValueError, TypeError,
)  # fmt: skip


def load_model(
    source: ModelSource,
    config: Any,
    geometry: ModelGeometry,
    dtype: str,
    *,
    device: str | torch.device = "cpu",
    verify: bool = True,
    fuse: bool = False,
) -> HookedModel:
    """Load the weights of ``source`` and return the model, hooked and checked.

    Args:
        source: where the model is.
        config: its config, from `load_config`.
        geometry: from `read_geometry`.
        dtype: type of the weights in memory (``bfloat16``).
        device: where to put them.
        verify: run `verify_model` before returning.
        fuse: let native kernels compute what they can; see `kv8.models.fuse`.

    Raises:
        ModelError: a file is missing or damaged, or the tensors are not those of the model.
        UnsupportedModelError: the model cannot be served correctly.
    """
    folder = source.folder
    content = read_config_json(folder)
    storage = check_weight_storage(folder, content)
    names = checkpoint_tensors(folder)
    torch_dtype = getattr(torch, dtype)
    device = torch.device(device)
    at_once = _first_stop(device)
    tensors = None
    if storage is WeightStorage.FP8:
        tensors = expand_fp8_weights(read_tensors(names, at_once), names, content, torch_dtype)
        logger.info("The weights stored as FP8 were expanded to %s.", dtype)
    try:
        module, info = build_model(folder, config, torch_dtype, tensors, device=at_once)
    except _LOAD_ERRORS as error:
        raise explained(folder, error) from error
    account_for_every_tensor(folder, info)
    module.requires_grad_(False)
    module.eval().to(device)
    return hook_model(module, geometry, verify=verify, fuse=fuse)


def hook_model(
    module: Any, geometry: ModelGeometry, *, verify: bool = True, fuse: bool = False
) -> HookedModel:
    """Return a model whose weights are where they should be, hooked and checked.

    Args:
        module: transformers' model, for evaluation, without gradients.
        geometry: as for `load_model`, like the rest.
        verify: likewise.
        fuse: likewise.

    Raises:
        UnsupportedModelError: the model cannot be served correctly.
    """
    model = HookedModel(module, geometry)
    if fuse and model.device.type == "cpu":
        fuse_model(model)
    elif fuse:
        fuse_gpu_model(model)
    if verify:
        _verify(model)
    return model


def _verify(model: HookedModel) -> None:
    """Verify; if native kernels are what makes the difference, go on without them."""
    try:
        verify_model(model)
    except UnsupportedModelError as error:
        if model.fusion is None:
            raise
        model.fusion.disable()
        model.fusion = None
        verify_model(model)
        logger.warning(
            "Native kernels gave other results than transformers, so that transformers' own code "
            "computes all but attention, slowly: %s",
            error,
        )


def _first_stop(device: torch.device) -> torch.device:
    """Return where weights are read to: their device at once, if transformers can do that."""
    if device.type == "cpu" or importlib.util.find_spec("accelerate") is not None:
        return device
    logger.warning(
        "The weights are read into the computer's memory first and then moved to %s. With the "
        "package accelerate installed they are read to it at once.",
        device,
    )
    return torch.device("cpu")
