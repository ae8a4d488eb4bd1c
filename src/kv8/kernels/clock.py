"""How long work takes where it runs: by the host's clock, or by a GPU's own between two events."""

import time
from collections.abc import Callable
from typing import Final

import torch

Work = Callable[[], object]

_HEAD_START: Final = 400_000  # cycles of the GPU: a fifth of a millisecond


def seconds_of(work: Work, device: torch.device | None = None) -> float:
    """Return how long ``work`` takes once, on the host or on a GPU.

    On a GPU, what was started before is waited for first, and the time is that between an event
    before and one after the work. The GPU is kept busy for a moment before, so that the host is
    ahead of it: starting the work is part of the time only where it takes longer than the work.
    """
    if device is None or device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = (make_event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def recorded(work: Work, device: torch.device) -> Work:
    """Return ``work`` as one CUDA graph, after running it once; on a CPU as it is.

    So a kernel is timed without what it takes to start it. ``work`` must keep its tensors alive.
    """
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph.replay
