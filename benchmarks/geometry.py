"""Broadcasting matmul against one product per matrix: ``python benchmarks/geometry.py``.

The shapes are those of a bird's-eye-view model: 6 cameras, a grid of 200 x 200 x 4 points. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from autospeed_model.errors import UserError, run_entry
from autospeed_model.geometry import transform_points
from autospeed_model.runtime import Runtime


def broadcasting(matrix: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The usual way: the matrix is repeated for every point."""
    return matrix[:, :, None, None, None].matmul(points.unsqueeze(-1)).squeeze(-1)


def median_ms(function: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/geometry.py", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--grid", type=int, default=200, help="points along x and y (default 200)")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    Runtime(given.device)  # or a word why not
    if min(given.batch, given.grid, given.repeats) < 1:
        raise UserError("--batch, --grid and --repeats: allowed are whole numbers from 1")
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(given.batch, 6, 3, 3, generator=generator).to(given.device)
    points = torch.randn(given.batch, 6, given.grid, given.grid, 4, 3, generator=generator).to(given.device)
    torch.testing.assert_close(transform_points(matrix, points), broadcasting(matrix, points), rtol=1e-3, atol=1e-4)
    slow = median_ms(lambda: broadcasting(matrix, points), given.device, given.repeats)
    fast = median_ms(lambda: transform_points(matrix, points), given.device, given.repeats)
    print(f"{given.device}, {points[..., 0].numel()} points")
    print(f"broadcasting matmul    {slow:9.3f} ms")
    print(f"one product per matrix {fast:9.3f} ms   {slow / fast:.1f} times faster")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
