"""Whether two processes can use the GPU at once through hpcjobs.mps: exit code 0 if so, and a line why not.

A service that starts and then fails its clients would cost everything that runs beside it: try it before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcjobs.mps import shared_gpus

TIMEOUT_S = 45
WORK = """
import torch
pinned = torch.ones(1024, 1024).pin_memory()
a = pinned.to("cuda", non_blocking=True)
graph = torch.cuda.CUDAGraph()
a @ a
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    b = a @ a
graph.replay()
torch.cuda.synchronize()
assert b[0, 0].item() == 1024
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mps-") as folder, shared_gpus(Path(folder)) as shared:
        if not shared:
            print("MPS does not start")
            return 1
        both = [subprocess.Popen([sys.executable, "-c", WORK], stdout=sys.stderr) for _ in range(2)]
        try:
            codes = [process.wait(TIMEOUT_S) for process in both]
        finally:
            for process in both:
                process.kill()
        print(f"two processes through MPS end with {codes}")
        return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
