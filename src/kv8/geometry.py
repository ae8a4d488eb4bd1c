"""What of a model the KV cache depends on: layers, heads, head sizes, windows. Data only.

`kv8.models` fills it from a model's config, without weights, and checks it against the loaded
model; the planner, the cache and the attention backends read it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer's attention, numbered as the model numbers its layers.

    Attributes:
        layer: the model's own layer number, from 0.
        type: the layer type as the model's config spells it (``full_attention``,
            ``sliding_attention``).
        num_heads: H, query heads.
        num_kv_heads: K, key and value heads; divides H.
        head_dim: D, values a head holds.
        window: tokens a query sees, itself included (key k is visible to query p if
            ``p - window < k <= p``); ``None`` when it sees everything before it.
        kv_source: the layer whose stored keys and values this layer reads. Equal to ``layer``
            except in models that share KV between layers.
    """

    layer: int
    type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    kv_source: int

    @property
    def owns_kv(self) -> bool:
        """Whether this layer stores keys and values of its own."""
        return self.kv_source == self.layer

    @property
    def values_per_token(self) -> int:
        """Values stored for one token, K and V together (0 when another layer stores them)."""
        return 2 * self.num_kv_heads * self.head_dim if self.owns_kv else 0


@dataclass(frozen=True)
class ModelGeometry:
    """A whole model as the KV cache sees it.

    Attributes:
        architecture: class name of the model, for messages (``LlamaForCausalLM``).
        model_dtype: name of the floating-point type of the weights (``bfloat16``).
        max_position: longest sequence the model was made for, in tokens.
        vocab_size: entries of the output distribution.
        layers: every layer with attention, in the model's order. Layers without attention do
            not appear, so numbers may have gaps.
    """

    architecture: str
    model_dtype: str
    max_position: int
    vocab_size: int
    layers: tuple[LayerGeometry, ...]

    def layer(self, number: int) -> LayerGeometry:
        """Return the layer with the model's number ``number``; raises `KeyError` if none has."""
        for layer in self.layers:
            if layer.layer == number:
                return layer
        raise KeyError(number)

    @property
    def kv_layers(self) -> tuple[LayerGeometry, ...]:
        """The layers that store keys and values of their own."""
        return tuple(layer for layer in self.layers if layer.owns_kv)
