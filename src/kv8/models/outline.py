"""Whether a checkpoint's tensors are those of its model, told from the files' headers.

transformers knows how the names and shapes in a checkpoint become those of a model: it renames,
stacks experts, ties. So it is had to load the model as always, but from tensors without numbers,
and what it then says of them is what it will say when it loads in earnest.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kv8.models.build import account_for_every_tensor, build_model, checkpoint_tensors, explained
from kv8.models.config import read_config_json
from kv8.models.fp8_weights import expand_fp8_weights
from kv8.models.weight_storage import WeightStorage, check_weight_storage
from kv8.scales.header import TORCH_DTYPES, read_header

logger = logging.getLogger(__name__)


class Outline(torch.Tensor):
    """A tensor's shape and type without its numbers, wherever it is sent."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take on another type; there is nothing to bring to another device."""
        given = (*args, *kwargs.values())
        dtypes = [value for value in given if isinstance(value, torch.dtype)]
        return super().to(dtypes[0]) if dtypes else self


def check_tensors(folder: Path, config: Any, dtype: str) -> None:
    """Check names and shapes of a checkpoint's tensors against its config; reads no weights.

    Args:
        folder: a model folder.
        config: its config, from `load_config`.
        dtype: type that the weights will have in memory.

    Raises:
        ModelError: tensors are missing, are of another shape, or belong to nothing in the model;
            or the model cannot be built at all.
    """
    names = checkpoint_tensors(folder)
    tensors: Mapping[str, torch.Tensor] = read_outlines(names)
    content = read_config_json(folder)
    torch_dtype = getattr(torch, dtype)
    if check_weight_storage(folder, content) is WeightStorage.FP8:
        tensors = expand_fp8_weights(tensors, names, content, torch_dtype)
    try:
        _, info = build_model(
            folder,
            config,
            torch_dtype,
            tensors,
            device=torch.device("cpu"),
            # What a checkpoint lacks is drawn at random: minutes, if all of a large model lacks.
            attributes={"initialize_weights": lambda model: None},
        )
    except (ImportError, KeyError) as error:
        raise explained(folder, error) from error
    except Exception:
        # Not every model can be built without numbers. Loading will tell.
        logger.debug("Tensors of %s cannot be checked by their headers.", folder, exc_info=True)
        return
    account_for_every_tensor(folder, info)


def read_outlines(names: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Return the outline of every tensor, from the headers of the files that hold them.

    A type that torch cannot compute with is given as bytes: it is not what matters here.
    """
    outlines: dict[str, torch.Tensor] = {}
    for file in sorted(set(names.values())):
        for name, stored in read_header(file).tensors.items():
            dtype = TORCH_DTYPES.get(stored.dtype, torch.uint8)
            empty = torch.empty(stored.shape, dtype=dtype, device="meta")
            outlines[name] = empty.as_subclass(Outline)
    return outlines
