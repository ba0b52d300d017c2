"""CUDA and HIP graphs: work that the host launches as a whole instead of kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Runs before the capture: they load kernels, choose convolution algorithms and compile.
WARM_UP_CALLS = 3


class GraphPool:
    """Memory that graphs share which never run at the same time."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)
        self.handle = torch.cuda.graph_pool_handle()


class Graphed:
    """Calls ``function`` for real a few times, then captures it, and from then on only replays it.

    ``function`` reads and writes tensors that stay where they are, and waits for nothing. Every call does its work
    once: the warm-up takes the place of the first replays.
    """

    def __init__(self, function: Callable[[], None], pool: GraphPool) -> None:
        self._function, self._pool = function, pool
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._calls < WARM_UP_CALLS:
            self._calls += 1
            self._run_beside()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls belong to the capture: others may copy or allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool.handle, stream=self._pool.stream, capture_error_mode="thread_local"
            ):
                self._function()
            self._graph = graph
        self._graph.replay()

    def _run_beside(self) -> None:
        """Run on the stream of the capture, as PyTorch asks for: its libraries keep workspaces per stream."""
        current = torch.cuda.current_stream(self._pool.device)
        self._pool.stream.wait_stream(current)
        with torch.cuda.stream(self._pool.stream):
            self._function()
        current.wait_stream(self._pool.stream)
