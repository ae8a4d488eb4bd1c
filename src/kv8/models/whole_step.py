"""A step from token numbers to logits in one native call, or two if not all logits are wanted.

Around its layers (`kv8.models.layer_chain`) a model looks up embeddings, computes angles, norms
what comes out and multiplies it with the output head. Where it does just that, which is proven bit
for bit when it is loaded, its own code need not run in between: for one short sequence that was
measured to take a tenth of the step.
"""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import OperationList, linear_struct, most_rows, norm_struct
from kv8.models.decoder_parts import Norm, is_plain_linear
from kv8.models.fusion import Fusion
from kv8.models.fusion_proof import PROOF_ERRORS
from kv8.models.hook import HookedModel
from kv8.models.interface import BoundStep
from kv8.models.layer_chain import LayerChain, run_few_rows
from kv8.models.workspace import Workspace

logger = logging.getLogger(__name__)


class WholeStep:
    """Computes what the model computes.

    Args:
        model: whose embedding, output head and rotary embedding are used.
        chain: all of its layers.
        norm: what comes after them.
        rotary: the module that computes the angles; `None` if no layer rotates.
        kernels: the native operations.
        workspace: shared with the layers.
    """

    def __init__(
        self,
        model: HookedModel,
        chain: LayerChain,
        norm: Norm,
        rotary: nn.Module | None,
        kernels: CpuKernels,
        workspace: Workspace,
    ) -> None:
        self._chain, self._norm, self._rotary = chain, norm, rotary
        self._kernels, self._workspace = kernels, workspace
        self._embedding = model.module.get_input_embeddings()
        self._head = model.module.get_output_embeddings()
        self._most_logits = most_rows(kernels, self._head.weight)
        self._describe()
        self._hooks = [
            hooks
            for module in model.module.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def _describe(self) -> None:
        weight, space, norm = self._head.weight, self._workspace, self._norm
        self._hidden = space.rows("hidden", weight.shape[1])
        self._normed = space.rows("normed", weight.shape[1])
        self._scratch = space.scratch(weight.shape[1], space.capacity)
        nowhere = torch.empty(1, weight.shape[0], dtype=weight.dtype)  # replaced with each step
        self._product = linear_struct(weight, self._head.bias, self._normed, nowhere, self._scratch)
        self._last = norm_struct(
            norm.weight,
            self._hidden,
            self._normed,
            num_heads=1,
            epsilon=norm.epsilon,
            order=norm.order,
        )
        head = (self._last, self._product)
        self._all = OperationList(self._kernels, [*self._chain.operations, *head])
        self._after = OperationList(self._kernels, head)
        self._all_rows = torch.arange(space.capacity)
        self._operations = self._chain.operations  # last: what failed is described again

    @property
    def hooked(self) -> bool:
        """Whether somebody wants to be told when a module is called."""
        return any(self._hooks)

    def run(
        self, step: BoundStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return logits [R, V], or `None` if the model has to compute for itself.

        Args:
            step: the batch, not yet worked on.
            input_ids: int64 [T].
            positions: int64 [T].
            rows: int64 [R], whose logits are wanted.
        """
        num_rows = len(input_ids)
        if self.hooked or not self._chain.takes(step, num_rows):
            return None
        if len(rows) > min(num_rows, self._most_logits):
            return None
        self._chain.reserve(num_rows)
        if self._operations is not self._chain.operations:
            self._describe()
        x = self._embedding(input_ids).contiguous()
        cos_sin: Sequence[torch.Tensor] | None = None
        if self._rotary is not None:
            cos_sin = self._rotary(x.unsqueeze(0), positions.unsqueeze(0))
        for index in range(len(self._chain)):
            given = self._hidden if index else x
            self._chain.place(index, step, given, self._hidden, cos_sin)
        logits = torch.empty(len(rows), self._head.weight.shape[0], dtype=x.dtype)
        self._product.weight = self._head.weight.data_ptr()  # may be tied, and be exchanged with it
        self._product.out = logits.data_ptr()
        if torch.equal(rows, self._all_rows[:num_rows]):
            self._last.x = self._hidden.data_ptr()
            self._chain.run(step, num_rows, self._all)
            return logits
        self._chain.run(step, num_rows)
        if len(rows):
            wanted = self._hidden[rows]
            self._last.x = wanted.data_ptr()
            self._after.run(len(rows), torch.get_num_threads())
        return logits


def find_whole_step(
    model: HookedModel,
    chains: Sequence[LayerChain],
    norms: Sequence[Norm],
    kernels: CpuKernels,
    workspace: Workspace,
) -> WholeStep | None:
    """Return the model's whole step if it may have one; `prove_whole_step` tells whether it has.

    Args:
        model: its layers are chained.
        chains: of layers.
        norms: those outside of layers.
        kernels: the native operations.
        workspace: shared with the layers.
    """
    head = model.module.get_output_embeddings()
    rotaries = [m for name, m in model.module.named_modules() if name.endswith("rotary_emb")]
    if len(chains) != 1 or len(chains[0]) != len(model.geometry.layers):
        return None
    if len(norms) != 1 or len(rotaries) > 1 or not is_plain_linear(head):
        return None
    if not head.weight.dtype == norms[0].weight.dtype == model.dtype:
        return None
    rotary = rotaries[0] if rotaries else None
    return WholeStep(model, chains[0], norms[0], rotary, kernels, workspace)


@torch.no_grad()
def prove_whole_step(
    model: HookedModel,
    fusion: Fusion,
    whole: WholeStep,
    kernels: CpuKernels,
    expected: torch.Tensor,
) -> None:
    """Use ``whole`` from now on if `run_few_rows` gives the ``expected`` bits with it.

    The model is fused, and ``expected`` is what it gives without.
    """
    if whole.hooked:  # it would not be run now
        return
    fusion.whole = whole
    try:
        if torch.equal(run_few_rows(model, kernels), expected):
            return
        logger.debug("The model computes more than its layers, so that its own code runs, too")
    except PROOF_ERRORS as error:
        logger.debug("A step cannot be computed in one call: %s", error)
    fusion.whole = None
