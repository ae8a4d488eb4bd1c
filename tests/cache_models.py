"""Models as the cache sees them, without weights: geometry and plans for the cache's tests."""

from collections.abc import Sequence

from kv8.formats.base import FORMATS
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.layer_plan import LayerFormat, LayerPlan


def make_geometry(
    windows: Sequence[int | None],
    *,
    num_kv_heads: int | Sequence[int] = 2,
    head_dim: int | Sequence[int] = 16,
    kv_sources: dict[int, int] | None = None,
    model_dtype: str = "bfloat16",
    max_position: int = 8192,
) -> ModelGeometry:
    """One layer for each entry of ``windows``; other arguments for all layers or one a layer."""

    def of(value: int | Sequence[int], index: int) -> int:
        return value if isinstance(value, int) else value[index]

    layers = tuple(
        LayerGeometry(
            layer=index,
            type="full_attention" if window is None else "sliding_attention",
            num_heads=2 * of(num_kv_heads, index),
            num_kv_heads=of(num_kv_heads, index),
            head_dim=of(head_dim, index),
            window=window,
            kv_source=(kv_sources or {}).get(index, index),
        )
        for index, window in enumerate(windows)
    )
    return ModelGeometry("TestForCausalLM", model_dtype, max_position, 256, layers)


def make_plan(geometry: ModelGeometry, formats: str | Sequence[str]) -> LayerPlan:
    """The same format for all layers, or one a layer."""
    names = [formats] * len(geometry.layers) if isinstance(formats, str) else formats
    return LayerPlan(
        tuple(
            LayerFormat(layer.layer, FORMATS[name])
            for layer, name in zip(geometry.layers, names, strict=True)
        )
    )


def smollm2() -> ModelGeometry:
    """SmolLM2-135M: 30 equal layers."""
    return make_geometry([None] * 30, num_kv_heads=3, head_dim=64)


def gemma3_270m() -> ModelGeometry:
    """Gemma 3 270M: five sliding layers, one full, three times."""
    windows = ([512] * 5 + [None]) * 3
    return make_geometry(windows, num_kv_heads=1, head_dim=256, max_position=32768)


def skip_sliding(geometry: ModelGeometry, quantized: str = "fp8_e4m3") -> LayerPlan:
    """Window layers in the model's dtype, the others quantized."""
    return make_plan(
        geometry,
        [quantized if layer.window is None else geometry.model_dtype for layer in geometry.layers],
    )
