"""Records computations as CUDA graphs, all in one pool of memory."""

from collections.abc import Callable

import torch


class CudaGraphCapture:
    """Records computations on one GPU; see `kv8.engine.decode_graphs.Capture`.

    They share the memory of their intermediate results, so only one may be played back at a time,
    and what one leaves behind holds until the next.

    Args:
        device: the GPU, the current one while recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], None]) -> Callable[[], object]:
        """Run ``compute`` once, record it, and return what plays it back on the current stream.

        Raises:
            RuntimeError: it does something that a graph cannot hold.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # compiles kernels and makes workspaces, which must not happen in a graph
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: another engine in this process, for one.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        return graph.replay
