"""Reads a decoder layer of transformers into its parts, where it has the well-known structure.

The structure is told by the names and kinds of the modules inside; what they compute is proven
afterwards (`kv8.models.fuse`). Anything unknown in a layer, and it is left alone.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kv8.kernels.step import can_multiply

_PROBE_ROWS = 8
# How a norm multiplies and rounds, by the numbers of `csrc/cpu/step.h`; n is float32.
_NORM_ORDERS: tuple[Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor], ...] = (
    lambda w, n, dtype: w * n.to(dtype),
    lambda w, n, dtype: (n * (1.0 + w.float())).to(dtype),
    lambda w, n, dtype: (w * n).to(dtype),
)
_ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
)
_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class Norm:
    """A root mean square norm: its module, and how it multiplies and rounds."""

    module: nn.Module
    epsilon: float
    order: int

    @property
    def weight(self) -> torch.Tensor:
        """Its weight, [D]."""
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        return weight


@dataclass(frozen=True)
class DecoderParts:
    """One decoder layer.

    Attributes:
        qkv: the projections of q, k and v, or the one of all three.
        output: the projection of what attention gives.
        q_norm: of the queries, and ``k_norm`` of the keys; a weight as long as a head, or as all.
        before_attention, after_attention, before_mlp, after_mlp: norms of what goes in and comes
            out, before it is added to the residual.
        gate_up: the projections of gate and up, or the one of both; empty for an unknown MLP.
        down: the projection after the activation.
        activation: an index of silu, gelu by tanh.
        mlp: the module as it is.
        multiplier: of what is added to the residual.
    """

    attention: nn.Module
    qkv: tuple[nn.Linear, ...]
    output: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear | None
    activation: int
    mlp: nn.Module
    multiplier: float

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """Every projection."""
        return (*self.qkv, self.output, *self.gate_up, *([self.down] if self.down else []))


def read_layer(layer: nn.Module) -> DecoderParts | None:
    """Return the parts of a decoder layer, or `None` if it has more, or others, than known."""
    children = dict(layer.named_children())
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    if attention is None or mlp is None or _own_tensors(layer) or _own_tensors(attention):
        return None
    norms = {name: read_norm(children.pop(name)) for name in _LAYER_NORMS if name in children}
    inside = dict(attention.named_children())
    qkv = _pick(inside, ("qkv_proj",)) or _pick(inside, ("q_proj", "k_proj", "v_proj"))
    output = _pick(inside, ("o_proj",))
    head_norms = {n: read_norm(inside.pop(n)) for n in ("q_norm", "k_norm") if n in inside}
    unknown = [m for m in (*children.values(), *inside.values()) if not isinstance(m, nn.Dropout)]
    if unknown or not qkv or not output or None in (*norms.values(), *head_norms.values()):
        return None
    if len(head_norms) == 1:
        return None
    sandwich = "pre_feedforward_layernorm" in norms or "input_layernorm" not in norms
    gate_up, down, activation = _read_mlp(mlp)
    return DecoderParts(
        attention=attention,
        qkv=qkv,
        output=output[0],
        q_norm=head_norms.get("q_norm"),
        k_norm=head_norms.get("k_norm"),
        before_attention=norms.get("input_layernorm"),
        after_attention=norms.get("post_attention_layernorm") if sandwich else None,
        before_mlp=norms.get(
            "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        ),
        after_mlp=norms.get("post_feedforward_layernorm"),
        gate_up=gate_up,
        down=down,
        activation=activation,
        mlp=mlp,
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def read_norm(module: nn.Module) -> Norm | None:
    """Return what a norm does, found by trying; `None` if it is none of the known ones."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    parameters = [name for name, _ in module.named_parameters()]
    more = [name for name, _ in (*module.named_buffers(), *module.named_children())]
    if parameters != ["weight"] or more or not isinstance(epsilon, float):
        return None
    if weight is None or weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(8)
    trial = copy.deepcopy(module).to("cpu", torch.bfloat16)
    # Rows of very different size: in the small ones epsilon counts.
    sizes = torch.logspace(-4, 2, _PROBE_ROWS)[:, None]
    x = (torch.randn(_PROBE_ROWS, len(weight), generator=generator) * sizes).to(torch.bfloat16)
    with torch.no_grad():
        drawn = torch.randn(len(weight), generator=generator).to(torch.bfloat16)
        trial.get_parameter("weight").copy_(drawn)
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
        found = trial(x)
        for order, rule in enumerate(_NORM_ORDERS):
            if torch.equal(found, rule(drawn, n, torch.bfloat16)):
                return Norm(module, epsilon, order)
    return None


def _read_mlp(mlp: nn.Module) -> tuple[tuple[nn.Linear, ...], nn.Linear | None, int]:
    """Return gate and up, down, and the activation's number; empty if the MLP is another kind."""
    inside = dict(mlp.named_children())
    gate_up = _pick(inside, ("gate_up_proj",)) or _pick(inside, ("gate_proj", "up_proj"))
    down = _pick(inside, ("down_proj",))
    names = [name for name in ("act_fn", "activation_fn") if name in inside]
    activation = _read_activation(inside.pop(names[0])) if len(names) == 1 else None
    if _own_tensors(mlp) or inside or not gate_up or not down or activation is None:
        return (), None, 0
    return gate_up, down[0], activation


def _read_activation(module: nn.Module) -> int | None:
    x = torch.linspace(-12.0, 12.0, 999)
    found = module(x)
    for number, function in enumerate(_ACTIVATIONS):
        if torch.allclose(found, function(x), rtol=1e-6, atol=1e-7):
            return number
    return None


def _pick(children: dict[str, nn.Module], names: tuple[str, ...]) -> tuple[nn.Linear, ...]:
    """Take the named linear layers out of ``children``; nothing unless all are there and plain."""
    found = (children.get(name) for name in names)
    linears = tuple(m for m in found if isinstance(m, nn.Linear) and is_plain_linear(m))
    if len(linears) != len(names):
        return ()
    for name in names:
        del children[name]
    return linears


def is_plain_linear(module: Any) -> bool:
    """Whether a module is a linear layer, nothing less and nothing more, that kernels can take."""
    if type(module) is not nn.Linear:
        return False
    return module.weight.device.type != "cpu" or can_multiply(module.weight)


def _own_tensors(module: nn.Module) -> bool:
    """Whether a module holds parameters or buffers itself, beside those of its children."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return bool(own)
