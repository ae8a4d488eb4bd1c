"""How much of a GPU's memory the cache gets: what is left of the engine's share, all else measured.

The share is of what is free before anything is loaded. What the weights took is looked up after
loading. What work takes is found by working: the largest step is computed, and the two largest
decode graphs are recorded, over a cache just large enough; then all of that is given back, and the
cache gets what is left. So the capacity that is printed can be filled.
"""

import gc
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from kv8.engine.cuda_graph import CudaGraphCapture
from kv8.engine.decode_graphs import Capture, bucket_sizes
from kv8.engine.devices import on_device
from kv8.engine.largest_step import run_largest_step, with_room_for_largest_step
from kv8.engine.recording import (
    MakeCapture,
    make_graphs,
    max_sequences,
    record,
    why_not_recordable,
    why_not_recorded,
)
from kv8.engine.resolve import ResolvedConfig, useful_cache_memory, with_cache_memory
from kv8.engine.resolve_memory import GPU_SHARE
from kv8.engine.runner import Runner
from kv8.errors import CapacityError
from kv8.models.hook import HookedModel
from kv8.units import format_bytes


class MemoryMeter(Protocol):
    """Measures the memory of one device."""

    def free(self) -> int:
        """Return the bytes free, after giving back what only torch's allocator holds."""

    def forget_peak(self) -> None:
        """Start `peak` anew."""

    def peak(self) -> int:
        """Return the most bytes taken from the device beyond those when the peak was forgotten."""


class GpuMeter:
    """A `MemoryMeter` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = 0

    def free(self) -> int:
        """Return the bytes free, after giving back what only torch's allocator holds."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def forget_peak(self) -> None:
        """Start `peak` anew."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._reserved = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the most bytes taken from the device beyond those when the peak was forgotten."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._reserved


@dataclass(frozen=True)
class WorkingMemory:
    """What an engine takes of its GPU beside weights and cache.

    Attributes:
        step: bytes of the largest step, while it is computed.
        graphs: bytes of recorded decode steps and their buffers, for good.
    """

    step: int
    graphs: int


@dataclass(frozen=True)
class MemoryBudget:
    """An engine's share of a GPU, fixed before it loads anything.

    Attributes:
        meter: of the GPU.
        free: bytes free at the start.
        share: the engine's part of them.
    """

    meter: MemoryMeter
    free: int
    share: float

    def fit_cache(
        self, model: HookedModel, config: ResolvedConfig, make_capture: MakeCapture | None = None
    ) -> ResolvedConfig:
        """Return ``config`` with a cache of what weights and work leave of the share.

        Args:
            model: loaded; nothing else of the engine is.
            config: of the engine.
            make_capture: as for `kv8.engine.recording.record_decoding`.

        Raises:
            CapacityError: nothing is left, or too little for what was asked.
        """
        with on_device(model.device):
            capture = (make_capture or CudaGraphCapture)(model.device)
            try:
                work = measure_work(model, config, self.meter, capture)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"The largest step does not fit on {model.device} beside the weights: "
                    f"{error}. Give fewer max_num_batched_tokens or max_num_seqs."
                ) from error
            weights = self.free - self.meter.free()
        total = int(self.share * self.free)
        spent = (
            f"{100 * self.share:g} % of the {format_bytes(self.free)} free at the start, less "
            f"{format_bytes(weights)} of weights, {format_bytes(work.step)} for the largest step, "
            f"{format_bytes(work.graphs)} of CUDA graphs"
        )
        left = total - weights - work.step - work.graphs
        if left <= 0:
            raise CapacityError(
                f"Nothing is left for the KV cache: {spent}. Give a larger "
                f"gpu_memory_utilization, fewer max_num_batched_tokens or max_num_seqs, or free "
                f"memory."
            )
        useful = useful_cache_memory(config.options, config.geometry, config.layout)
        if useful <= left:
            spent = f"what max_num_seqs sequences of the greatest length need; of {spent}"
        return with_cache_memory(config, min(useful, left), spent)


def open_budget(config: ResolvedConfig, meter: MemoryMeter | None = None) -> MemoryBudget | None:
    """Return the engine's share of its GPU; `None` where the cache's size is known without.

    To be called before weights are loaded.
    """
    options = config.options
    if options.kv_cache_memory is not None or (meter is None and config.device.type != "cuda"):
        return None
    meter = meter or GpuMeter(config.device)
    share = GPU_SHARE if options.gpu_memory_utilization is None else options.gpu_memory_utilization
    return MemoryBudget(meter, meter.free(), share)


def measure_work(
    model: HookedModel, config: ResolvedConfig, meter: MemoryMeter, capture: Capture
) -> WorkingMemory:
    """Compute the largest step, record decode steps, and return what that took."""
    small = with_room_for_largest_step(config)
    runner = Runner(model, small)
    meter.free()
    meter.forget_peak()
    run_largest_step(runner, small)
    return WorkingMemory(meter.peak(), _measure_graphs(runner, small, meter, capture))


def _measure_graphs(
    runner: Runner, config: ResolvedConfig, meter: MemoryMeter, capture: Capture
) -> int:
    """Return what recorded decode steps take: the two largest, and the others like the second."""
    if why_not_recorded(runner, config) is not None:
        return 0
    sizes = bucket_sizes(max_sequences(config))
    free = [meter.free()]
    graphs = make_graphs(runner, config)
    if why_not_recordable(graphs, max(sizes)) is not None:
        return 0
    for size in sizes[-1:-3:-1]:
        record(graphs, (size,), capture)
        free.append(meter.free())
    taken = [before - after for before, after in pairwise(free)]
    return max(taken[0], graphs.num_bytes) + max(taken[-1], 0) * (len(sizes) - 1)
