"""Which format each layer stores its keys and values in: decided here, once, for everybody.

The planner, the allocator, `kv8 inspect` and the layer table all read the plan made here.
"""

from kv8.layer_plan.cache_format import resolve_cache_format
from kv8.layer_plan.make import make_layer_plan
from kv8.layer_plan.plan import LayerFormat, LayerPlan

__all__ = ["LayerFormat", "LayerPlan", "make_layer_plan", "resolve_cache_format"]
