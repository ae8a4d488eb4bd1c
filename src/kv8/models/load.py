"""Loads a model's weights into transformers' own class, hooked; every tensor is accounted for."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from kv8.errors import ModelError, UnsupportedModelError
from kv8.geometry import ModelGeometry
from kv8.models.config import first_line, model_class, read_config_json, text_config
from kv8.models.fp8_weights import expand_fp8_weights
from kv8.models.fuse import fuse_model
from kv8.models.fuse_gpu import fuse_gpu_model
from kv8.models.hook import HookedModel
from kv8.models.interface import INTERFACE_NAME
from kv8.models.source import ModelSource
from kv8.models.verify import verify_model
from kv8.models.weight_storage import WeightStorage, check_weight_storage
from kv8.scales.names import resolve_name
from kv8.scales.tensors import tensor_names, weight_files

logger = logging.getLogger(__name__)

# Buffers that older versions of transformers saved and every version computes anew.
_RECOMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)$")
_MOST_NAMES = 5


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
    storage = check_weight_storage(folder, read_config_json(folder))
    files = weight_files(folder)
    if not files:
        raise ModelError(
            f"{folder} has no safetensors weights (model.safetensors, or the files listed in "
            f"model.safetensors.index.json). kv8 reads no other format from a folder."
        )
    names = tensor_names(files)
    torch_dtype = getattr(torch, dtype)
    device = torch.device(device)
    at_once = _first_stop(device)
    expanded = None
    if storage is WeightStorage.FP8:
        expanded = expand_fp8_weights(names, read_config_json(folder), torch_dtype, at_once)
    with _quiet():
        module, info = _load(folder, config, torch_dtype, expanded, at_once)
    _account_for_every_tensor(folder, info)
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


def _load(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    state: dict[str, torch.Tensor] | None,
    device: torch.device,
) -> tuple[Any, dict[str, Any]]:
    built: Any = model_class(config)
    text = text_config(config)
    try:
        model, info = built.from_pretrained(
            folder if state is None else None,
            config=text if built.config_class is type(text) else config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=INTERFACE_NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below by name
            local_files_only=True,
            output_loading_info=True,
            **({} if device.type == "cpu" else {"device_map": {"": device}}),
        )
    except ImportError as error:
        raise ModelError(f"{folder.name} needs a package: {first_line(error)}") from error
    except KeyError as error:  # a name looked up in one of transformers' tables
        raise ModelError(
            f"{folder / 'config.json'} names {error}, which transformers {transformers_version} "
            f"does not know. Correct the config, or fetch it again."
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"The weights in {folder} do not load: {first_line(error)}") from error
    return model, info


def _account_for_every_tensor(folder: Path, info: dict[str, Any]) -> None:
    """Raise unless every weight was in the file and every tensor in the file was used."""
    mismatched = sorted(
        f"{name} ({tuple(stored)}, not {tuple(wanted)})"
        for name, stored, wanted in info.get("mismatched_keys") or ()
    )
    unused = sorted(
        name
        for name in info.get("unexpected_keys") or ()
        if not _RECOMPUTED.search(name) and resolve_name(name) is None
    )
    for names, problem in (
        (sorted(info.get("missing_keys") or ()), "are missing from the checkpoint"),
        (mismatched, "have another shape than the config says"),
        (unused, "belong to nothing in the model"),
        (sorted(map(str, info.get("error_msgs") or ())), "failed to load"),
    ):
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise ModelError(
                f"{folder}: tensors that {problem}: "
                f"{', '.join(names[:_MOST_NAMES])}{more}. The weights and config.json "
                f"do not belong together; download the model again."
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars: what matters of them kv8 says itself."""
    verbosity = transformers_logging.get_verbosity()
    progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress_bar:
            transformers_logging.enable_progress_bar()
