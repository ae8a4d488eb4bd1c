"""Has transformers put a checkpoint's tensors into its own class; every tensor is accounted for."""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from kv8.errors import ModelError
from kv8.models.config import first_line, model_class, text_config
from kv8.models.interface import INTERFACE_NAME
from kv8.scales.names import resolve_name
from kv8.scales.tensors import tensor_names, weight_files

# Buffers that older versions of transformers saved and every version computes anew.
_RECOMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)$")
_MOST_NAMES = 5
# transformers replaces functions of its own while it builds a model, and puts back what it found:
# of two threads that do so at once, one puts back what the other had put in its place.
_BUILDING = threading.Lock()


def checkpoint_tensors(folder: Path) -> dict[str, Path]:
    """Return which file of ``folder`` holds each tensor that a model is built from.

    Raises:
        ModelError: there are no weights that kv8 reads, or a file of them is missing or damaged.
    """
    files = weight_files(folder)
    if not files:
        raise ModelError(
            f"{folder} has no safetensors weights (model.safetensors, or the files listed in "
            f"model.safetensors.index.json). kv8 reads no other format from a folder."
        )
    return tensor_names(files)


def build_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    tensors: Mapping[str, torch.Tensor] | None,
    *,
    device: torch.device,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model with its weights, and what became of the tensors.

    Args:
        folder: where the checkpoint is.
        config: its config, from `load_config`.
        dtype: type of the weights in memory.
        tensors: those of the checkpoint by name; `None` has transformers read them.
        device: where the weights go.
        attributes: what is to be other in the model's class.

    Raises:
        Exception: whatever transformers raises; `explained` says it in kv8's words.
    """
    built: Any = model_class(config)
    if attributes:
        built = type(built.__name__, (built,), {"__module__": built.__module__, **attributes})
    text = text_config(config)
    with _BUILDING, _quiet():
        model, info = built.from_pretrained(
            folder if tensors is None else None,
            config=text if built.config_class is type(text) else config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=INTERFACE_NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused by name
            local_files_only=True,
            output_loading_info=True,
            **({} if device.type == "cpu" else {"device_map": {"": device}}),
        )
    return model, info


def explained(folder: Path, error: Exception) -> ModelError:
    """Return what to say of an error that transformers raised while it built a model."""
    if isinstance(error, ImportError):
        return ModelError(f"{folder.name} needs a package: {first_line(error)}")
    if isinstance(error, KeyError):  # a name looked up in one of transformers' tables
        return ModelError(
            f"{folder / 'config.json'} names {error}, which transformers {transformers_version} "
            f"does not know. Correct the config, or fetch it again."
        )
    return ModelError(f"The weights in {folder} do not load: {first_line(error)}")


def account_for_every_tensor(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise unless every weight was in the checkpoint and every tensor in it was used.

    Args:
        folder: where the checkpoint is.
        info: what `build_model` says became of the tensors.

    Raises:
        ModelError: names the tensors and what is wrong with them.
    """
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
