"""Makes the plan: the cache's format everywhere but where the skip list says otherwise."""

from collections.abc import Sequence

from kv8.errors import LayerPlanError
from kv8.formats.base import FORMATS, KVFormat
from kv8.geometry import ModelGeometry
from kv8.layer_plan.plan import LayerFormat, LayerPlan
from kv8.layer_plan.skip_list import OPTION, skipped_layers


def make_layer_plan(
    geometry: ModelGeometry,
    format: KVFormat,  # noqa: A002
    skip: Sequence[str] = (),
) -> LayerPlan:
    """Return the format of every layer: ``format``, or the model's dtype where ``skip`` says so.

    Args:
        geometry: the model.
        format: the cache's format, quantized or not.
        skip: entries of the language in `kv8.layer_plan.skip_list`; one string may hold several.
            They are checked, and a note says so, also where the model's dtype is the format
            anyway.

    Raises:
        LayerPlanError: an entry fits no layer of this model, or the model's dtype is no format.
    """
    plain = FORMATS.get(geometry.model_dtype)
    if plain is None or plain.quantized:
        raise LayerPlanError(f"The model's dtype {geometry.model_dtype!r} is no cache format.")
    skipped = skipped_layers(geometry, skip)
    entries = []
    for layer in geometry.layers:
        entry = skipped.get(layer.kv_source)
        entries.append(LayerFormat(layer.layer, plain if entry else format, entry))
    notes: tuple[str, ...] = ()
    if skipped and format == plain:
        notes = (f"{OPTION} changes nothing: every layer has the model's dtype, {plain.name}.",)
    return LayerPlan(tuple(entries), notes)
