"""Whether decode steps are recorded as CUDA graphs, and the recording itself."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kv8.attention.backend import ReservesWorkspace
from kv8.engine.cuda_graph import CudaGraphCapture
from kv8.engine.decode_graphs import Capture, DecodeGraphs, bucket_sizes
from kv8.engine.devices import on_device
from kv8.engine.host_reads import host_reads
from kv8.engine.resolve import Decision, ResolvedConfig
from kv8.engine.runner import Runner
from kv8.engine.static_batch import StaticBatch
from kv8.errors import EngineError

logger = logging.getLogger(__name__)

MakeCapture = Callable[[torch.device], Capture]


def record_decoding(
    runner: Runner, config: ResolvedConfig, make_capture: MakeCapture | None = None
) -> ResolvedConfig:
    """Let ``runner`` play decode steps back from graphs, where it can; say so in the settings.

    Args:
        runner: the engine's, with the cache it serves from.
        config: of the engine.
        make_capture: records computations on a device; by default as CUDA graphs, on a GPU only.

    Raises:
        EngineError: the GPU refuses to record what could be expected to work.
    """
    device = runner.model.device
    if make_capture is None:
        if device.type != "cuda":
            return config
        make_capture = CudaGraphCapture
    with on_device(device):
        reason = why_not_recorded(runner, config)
        if reason is not None:
            return _with_decision(config, "off", reason)
        sizes = bucket_sizes(max_sequences(config))
        graphs = make_graphs(runner, config)
        reason = why_not_recordable(graphs, max(sizes))
        if reason is not None:
            return _with_decision(config, "off", reason)
        record(graphs, sizes, make_capture(device))
    runner.graphs = graphs
    return _with_decision(
        config,
        f"for {len(sizes)} batch sizes",
        f"decode steps of up to {max(sizes)} sequences are played back",
    )


def why_not_recorded(runner: Runner, config: ResolvedConfig) -> str | None:
    """Return why decode steps cannot be recorded, as far as can be told without trying."""
    if config.options.enforce_eager:
        return "as asked with enforce_eager"
    if not runner.backend.capturable:
        return f"the {runner.backend.name} backend looks at lengths on the host"
    return None


def why_not_recordable(graphs: DecodeGraphs, size: int) -> str | None:
    """Compute a step of ``size`` sequences; return what in it a graph cannot hold, if anything."""
    found = host_reads(partial(graphs.compute, size))
    if not found:
        return None
    return f"inside a step the model makes the host wait for the GPU ({', '.join(found)})"


def max_sequences(config: ResolvedConfig) -> int:
    """Return the most sequences that ever decode in one step."""
    return min(config.options.max_num_seqs, config.options.max_num_batched_tokens)


def make_graphs(runner: Runner, config: ResolvedConfig) -> DecodeGraphs:
    """Return graphs over buffers of the sizes that ``config`` needs, none recorded yet."""
    layout, most = config.layout, max_sequences(config)
    max_blocks = -(-config.max_model_len // layout.block_size)
    if isinstance(runner.backend, ReservesWorkspace):
        layers = list(runner.layers.values())
        runner.backend.reserve(layers, most, max_blocks * layout.block_size)
    batch = StaticBatch(
        most,
        num_groups=len(layout.groups),
        max_blocks=max_blocks,
        block_size=layout.block_size,
        max_context=config.max_model_len,
        device=runner.model.device,
    )
    return DecodeGraphs(runner.model, runner.layers, runner.backend, batch)


def record(graphs: DecodeGraphs, sizes: tuple[int, ...], capture: Capture) -> None:
    """Record batch sizes, the largest first: the others use the same memory.

    Raises:
        EngineError: one cannot be recorded.
    """
    for size in sorted(sizes, reverse=True):
        try:
            graphs.record(size, capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(
                f"The decode step of {size} sequences cannot be recorded as a CUDA graph: {error}. "
                f"Start with enforce_eager (--enforce-eager) to do without."
            ) from error


def _with_decision(config: ResolvedConfig, value: str, reason: str) -> ResolvedConfig:
    if value == "off":
        logger.info("CUDA graphs are off: %s.", reason)
    decisions = (*config.decisions, Decision("cuda_graphs", value, reason))
    return replace(config, decisions=decisions)
