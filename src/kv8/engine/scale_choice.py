"""Where an engine's scales come from: given, the checkpoint's, or measured before it serves."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kv8.errors import RequestError
from kv8.geometry import ModelGeometry
from kv8.layer_plan import LayerPlan
from kv8.models.fingerprint import weights_fingerprint
from kv8.options import EngineOptions
from kv8.scales.checkpoint import CheckpointScales
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.resolve import ResolvedScales, resolve_scales
from kv8.scales.scale import ModelScales
from kv8.scales.scales_file import read_scales_file

# Names of the settings that scales decide, in the order of the log.
SCALE_SETTINGS = ("k and v scales", "queries")


def choose_scales(
    options: EngineOptions,
    geometry: ModelGeometry,
    plan: LayerPlan,
    checkpoint: CheckpointScales,
    folder: Path,
) -> ResolvedScales:
    """Return the scales to serve with; none yet if they are to be measured at start-up.

    ``folder`` holds the weights, which a scales file says whether it was measured with.

    Raises:
        ScaleError: a scale is missing, unbound or invalid.
        RequestError: scales were asked for, but no layer has a use for them.
    """
    if not options.measures_scales:
        explicit = explicit_scales(options.kv_scales, geometry, folder)
        return resolve_scales(
            geometry, plan, checkpoint, explicit, options.missing_scales, options.query_dtype
        )
    if not plan.quantized_layers:
        asked = "calculate_kv_scales" if options.calculate_kv_scales else "calibrate_on"
        raise RequestError(
            f"{asked} was given, but no layer's cache is quantized. Quantize the cache with "
            f"kv_cache_dtype=fp8 (--kv-cache-dtype fp8), or leave it out."
        )
    return ResolvedScales()


def explicit_scales(
    kv_scales: str | Path | Mapping[str, Any] | None, geometry: ModelGeometry, folder: Path
) -> ModelScales | None:
    """Return what `EngineOptions.kv_scales` gives, `None` if it gives nothing.

    Raises:
        ScaleError: a scale is unbound or invalid.
        ModelError: the file cannot be read.
    """
    if kv_scales is None:
        return None
    if isinstance(kv_scales, Mapping):
        return scales_from_mapping(kv_scales, geometry)
    path = Path(kv_scales).expanduser()
    return read_scales_file(path, geometry, partial(weights_fingerprint, folder))


def describe_scales(
    plan: LayerPlan, resolved: ResolvedScales, options: EngineOptions
) -> tuple[tuple[str, str], ...]:
    """Return value and reason for each of `SCALE_SETTINGS`; nothing for a 16-bit cache."""
    layers = plan.quantized_layers
    if not layers:
        return ()
    scales = [s for n in layers for s in (resolved.scales.layer(n).k, resolved.scales.layer(n).v)]
    known = [scale for scale in scales if scale is not None]
    if not known:
        text = options.calibrate_on or "random tokens"
        return (
            ("to be measured", f"on {text}, before anything is served"),
            ("to be decided", "once the scales are known"),
        )
    origins = Counter(scale.origin.kind.value for scale in known)
    granularity = "per head" if any(scale.per_head for scale in known) else "per tensor"
    computed = "FP8 attention" if resolved.fp8_queries else "decoded to float32 for attention"
    return (
        (
            f"{granularity}, static",
            ", ".join(f"{count} from {origin}" for origin, count in origins.items()),
        ),
        ("fp8_e4m3" if resolved.fp8_queries else "native", computed),
    )
