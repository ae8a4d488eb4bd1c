"""Rotary position parameters of a GGUF file, as transformers spells them."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv8.errors import UnsupportedModelError
from kv8.models.gguf_metadata import ArchitectureMetadata

_FREQUENCIES = "rope_freqs.weight"
# Llama 3.1's rule, see transformers' rope_type "llama3". Not in the file, which holds only the
# resulting divisors; every released model has these numbers.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The divisors are float32, computed in float32: a few units in the last place (2**-23) apart.
_TOLERANCE = 1e-5


def read_rope(metadata: ArchitectureMetadata, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters, for heads of ``head_dim`` values.

    Raises:
        UnsupportedModelError: a kind of scaling that cannot be converted.
    """
    name = metadata.file.path.name
    metadata.require("rope.dimension_count", head_dim, "only a part of each head is rotated")
    metadata.get("rope.scaling.finetuned")  # says how the model was trained, changes nothing
    theta = metadata.number("rope.freq_base", 10000.0)
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if any(tensor.startswith("rope_factors") for tensor in metadata.file.tensors):
        raise UnsupportedModelError(f"{name}: rotary scaling 'longrope' cannot be converted.")
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    metadata.get("rope.scaling.factor")
    if kind != "none":
        raise UnsupportedModelError(
            f"{name}: rotary scaling {kind!r} cannot be converted; supported: none, linear, and "
            f"Llama 3's ({_FREQUENCIES})."
        )
    if _FREQUENCIES in metadata.file.tensors:
        return base | _llama3(metadata, theta, head_dim)
    return base


def _llama3(metadata: ArchitectureMetadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the parameters whose divisors are those in the file."""
    divisors = metadata.file.values(_FREQUENCIES).astype(np.float64)
    parameters = _LLAMA3 | {"rope_type": "llama3", "factor": float(divisors.max())}
    expected = _llama3_divisors(parameters, theta, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=_TOLERANCE):
        raise UnsupportedModelError(
            f"{metadata.file.path.name}: the rotary frequencies in {_FREQUENCIES} follow no known "
            f"rule (Llama 3's, factor {parameters['factor']:g})."
        )
    return parameters


def _llama3_divisors(
    parameters: dict[str, Any], theta: float, head_dim: int
) -> NDArray[np.float64]:
    """Return what each frequency is divided by: 1 for short waves, ``factor`` for long ones."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    waves = parameters["original_max_position_embeddings"] / wave_lengths
    smooth = np.clip((waves - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / parameters["factor"] + smooth)
    return divisors
