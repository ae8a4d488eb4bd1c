"""Which kernels attend, where there is a choice: measured once, before memory is divided up.

What the model asks of attention (a softcap, sinks) it says only when it calls; so two made-up
tokens go through it first, in a cache of their own. Then each kind of layer is measured on made-up
tensors. Prompts and steps of both kinds go by the one measurement, decoding by the other.
"""

import logging
from collections import defaultdict
from dataclasses import replace

import torch

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.kernel_choice import (
    ChoosesKernels,
    KernelChoice,
    LayerKind,
    MadeUpWork,
    Timer,
    kind_of,
)
from kv8.attention.layer import LayerAttention
from kv8.engine.devices import on_device
from kv8.engine.largest_step import build_prompts, with_room_for
from kv8.engine.resolve import Decision, ResolvedConfig
from kv8.engine.runner import Runner
from kv8.models.hook import HookedModel

logger = logging.getLogger(__name__)


class _NotingBackend:
    """Wraps a backend and notes what each layer asks of it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name, self.capturable = backend.name, False
        self.store, self.refuses = backend.store, backend.refuses
        self.subjects: dict[int, tuple[LayerAttention, AttentionCall]] = {}

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        self.subjects[layer.geometry.layer] = (layer, call)
        return self._backend.attend(layer, query, batch, call)


def choose_kernels(
    model: HookedModel, config: ResolvedConfig, timer: Timer | None = None
) -> ResolvedConfig:
    """Return ``config`` with the kernels that were measured to be fastest, if there is a choice.

    Args:
        model: loaded; nothing else of the engine is.
        config: of the engine.
        timer: by default the clock of a GPU, and nothing is measured elsewhere.
    """
    if timer is None and config.device.type != "cuda":
        return config
    lengths = [min(2, config.max_model_len)]
    small = with_room_for(config, lengths)
    with on_device(model.device):
        runner = Runner(model, small)
        chooser = runner.backend
        if not isinstance(chooser, ChoosesKernels):
            return config
        noting = runner.backend = _NotingBackend(runner.backend)
        runner.run(build_prompts(small, lengths, model.device))
        options = config.options
        work = MadeUpWork.within(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        with torch.inference_mode():
            choice = chooser.measure([*noting.subjects.values()], work, model.dtype, timer)
    decision = Decision("attention_kernels", *_describe(choice, noting.subjects, work))
    return replace(config, kernel_choice=choice, decisions=(*config.decisions, decision))


def _describe(
    choice: KernelChoice,
    subjects: dict[int, tuple[LayerAttention, AttentionCall]],
    work: MadeUpWork,
) -> tuple[str, str]:
    """Return what was chosen in short, and what was measured."""
    layers: dict[LayerKind, list[int]] = defaultdict(list)
    for number, (layer, call) in subjects.items():
        layers[kind_of(layer, call)].append(number)
    used = {
        (kinds.kernels(decodes=False), kinds.kernels(decodes=True))
        for kinds in choice.by_kind.values()
    }
    value = "by kind of layer"
    if len(used) == 1:
        prefill, decode = used.pop()
        value = prefill if prefill == decode else f"{prefill} for prompts, {decode} for decoding"
    found = "; ".join(
        f"{len(numbers)} {'layer' if len(numbers) == 1 else 'layers'} in {kind}: "
        f"{choice.by_kind[kind]}"
        for kind, numbers in layers.items()
    )
    if all(chosen.prefill is None for chosen in choice.by_kind.values()):
        return value, found
    return value, (
        f"measured on a step with a prompt of {work.prompt:,} tokens and on decoding "
        f"{work.sequences} x {work.context:,}; recorded decode steps are triton's. {found}"
    )
