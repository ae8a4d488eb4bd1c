"""Decoder layers in a row as one native call: Python runs once a step, not several times a layer.

The model's own code still calls one layer after another. Each of a chain notes what it is called
with and hands on one tensor, which is written when the last layer runs them all, attention
included. Until then it holds NaN, so that whoever looks at it in between cannot go unnoticed; that
a model's own code does not is proven when it is loaded (`prove_chains`).
"""

import logging
from collections.abc import Sequence

import torch

from kv8.attention.cpu import CpuBackend
from kv8.attention.layer import LayerAttention
from kv8.errors import EngineError, KV8Error
from kv8.formats.base import FORMATS
from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import OperationList
from kv8.kernels.step_structs import Operation
from kv8.models.hook import HookedModel
from kv8.models.interface import BoundStep, open_step
from kv8.models.native_rows import NativeRows
from kv8.models.probe import probe_batch, probe_layer, probe_sequences

logger = logging.getLogger(__name__)

_PROBE_ROWS = 6


class LayerChain:
    """Fused layers, each of which is called with what the one before it returned.

    Args:
        layers: computed wholly by native operations (`NativeRows.whole`).
        kernels: the native operations.

    Attributes:
        enabled: whether the layers are computed at once.
        operations: of all layers.
    """

    def __init__(self, layers: Sequence[NativeRows], kernels: CpuKernels) -> None:
        self.enabled = True
        self._layers, self._kernels = layers, kernels
        self._most_rows = min(layer.most_rows for layer in layers)
        self._describe()
        self._given: tuple[torch.Tensor, ...] = ()  # what the noted operations read
        self._output: torch.Tensor | None = None  # of the chain, while its layers are noted
        self._next = 0

    def _describe(self) -> None:
        self._attentions = [layer.describe_attention() for layer in self._layers]
        operations: list[Operation] = []
        for layer, attention in zip(self._layers, self._attentions, strict=True):
            before, after = layer.operations
            operations += [*before, attention.store, attention.attend, *after]
        self.operations = tuple(operations)
        self._list = OperationList(self._kernels, operations)
        self._capacity = self._layers[0].space.capacity  # last: what failed is described again

    def reserve(self, num_rows: int) -> None:
        """Have room for so many rows; `operations` may be others then."""
        space = self._layers[0].space
        space.reserve(num_rows)
        if self._capacity == space.capacity:
            return
        for layer in self._layers:
            layer.reserve(num_rows)
        self._describe()

    def __len__(self) -> int:
        return len(self._layers)

    def call(
        self, index: int, hidden_states: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None
    ) -> torch.Tensor | None:
        """Note the call of layer ``index`` with [1, T, C], or run all if it is the last one.

        Returns the chain's output, [1, T, C], or `None` if each layer has to compute for itself.

        Raises:
            EngineError: the layer was not called with what the one before it returned.
        """
        layer = self._layers[index]
        step = open_step(layer.binding)
        if index == 0:
            self._output = None
            if not self.takes(step, hidden_states.shape[1]):
                return None
            self.reserve(hidden_states.shape[1])
            x = hidden_states.contiguous()
            self._output = torch.full_like(x, torch.nan)
            self._given = (x,)
        elif self._output is None:
            return None
        else:
            x = self._output
            if hidden_states is not x or index != self._next:
                raise EngineError(
                    f"Layer {layer.binding.geometry.layer} was not called with what the layer "
                    f"before it returned, although it was when the model was loaded."
                )
        output = self._output
        assert output is not None
        self.place(index, step, x, output, cos_sin)
        if cos_sin is not None:
            self._given += tuple(cos_sin)
        self._next = index + 1
        if self._next == len(self._layers):
            self.run(step, output.shape[1])
            self._output, self._given = None, ()
        return output

    def takes(self, step: BoundStep, num_rows: int) -> bool:
        """Whether the layers are computed at once for T = ``num_rows`` rows of this step."""
        # A backend that is more than `CpuBackend` wants to be asked.
        fast = 0 < num_rows <= self._most_rows
        return self.enabled and fast and type(step.backend) is CpuBackend

    def place(
        self,
        index: int,
        step: BoundStep,
        x: torch.Tensor,
        output: torch.Tensor,
        cos_sin: Sequence[torch.Tensor] | None,
    ) -> None:
        """Let layer ``index`` read ``x`` and write ``output``, [T, C], when the step is run.

        The tensors must be alive then.
        """
        layer, backend = self._layers[index], step.backend
        assert isinstance(backend, CpuBackend)
        number = layer.binding.geometry.layer
        layer.place(x.data_ptr(), output.data_ptr(), cos_sin)
        layer.read_attention()
        backend.prepare(self._attentions[index], step.layers[number], step.batch)
        step.attended.add(number)

    def run(self, step: BoundStep, num_rows: int, operations: OperationList | None = None) -> None:
        """Run the chain, or a list in which its operations are."""
        backend = step.backend
        assert isinstance(backend, CpuBackend)
        (operations or self._list).run(
            num_rows,
            torch.get_num_threads(),
            lambda needed: backend.give_scratch(self._attentions, needed),
        )


@torch.no_grad()
def prove_chains(
    model: HookedModel, chains: Sequence[LayerChain], kernels: CpuKernels
) -> torch.Tensor | None:
    """Return the logits of `run_few_rows` if the chains give them bit for bit as their layers do
    one by one; if not, disable the chains and return `None`.

    The operations are the same ones. What is proven is that the model hands each layer's output to
    the next one as it is, and looks at it nowhere else before the last one has run.
    """
    try:
        results = []
        for enabled in (False, True):
            for chain in chains:
                chain.enabled = enabled
            results.append(run_few_rows(model, kernels))
        if torch.equal(*results):
            return results[0]
        logger.debug("Layers computed at once give other results, so that each is computed apart")
    except (KV8Error, AssertionError, RuntimeError) as error:
        logger.debug("Layers cannot be computed at once: %s", error)
    for chain in chains:
        chain.enabled = False
    return None


def run_few_rows(model: HookedModel, kernels: CpuKernels) -> torch.Tensor:
    """Return the logits of a few tokens, all of them wanted, attended to by the native backend."""
    sequence = probe_sequences(model.geometry, model.device)[0]
    num_rows = min(sequence.length, _PROBE_ROWS)
    kv_format = FORMATS[str(model.dtype).removeprefix("torch.")]
    backend = CpuBackend(kernels)
    layers: dict[int, LayerAttention] = {}
    for geometry in model.geometry.layers:
        owner = None if geometry.owns_kv else layers[geometry.kv_source]
        layers[geometry.layer] = probe_layer(
            geometry, num_rows, model.device, kv_format=kv_format, owner=owner
        )
        reason = backend.refuses(layers[geometry.layer])
        assert reason is None, reason
    batch = probe_batch([num_rows], [num_rows], [num_rows], model.device)
    rows = torch.arange(num_rows, device=model.device)
    with model.bound(batch, layers, backend):
        return model.forward(sequence.token_ids[:num_rows], sequence.positions[:num_rows], rows)
