"""Several trainings on one GPU, which is what a logical GPU is where hardware has no modes.

    python benchmarks/several_trainings.py --data OUT --processes 1,4,8 --mps both

Every process is a ``training_speed.py``; all measure during the same seconds. With MPS, where it exists, their kernels
run side by side; without it the GPU serves one process after another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autospeed_model.errors import UserError, run_entry

BENCHMARK = Path(__file__).with_name("training_speed.py")


@contextmanager
def multi_process_service(folder: Path) -> Iterator[dict[str, str]]:
    """Variables of processes that share the GPU through NVIDIA's MPS, whose daemon runs meanwhile."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield variables
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)


def run(count: int, arguments: Sequence[str], variables: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """Start ``count`` processes; the sum and the extremes of what they measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for number in range(count):
            command = [sys.executable, str(BENCHMARK), *arguments, "--json", str(folder / f"{number}.json")]
            command += ["--barrier", str(folder / "barrier"), "--processes", str(count)]
            log = (folder / f"{number}.log").open("w")
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables})
            )
        try:
            codes = _codes(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            return {"processes": count, "error": (folder / f"{failed[0]}.log").read_text()[-800:]}
        if None in codes:
            return {"processes": count, "error": f"timed out after {timeout_s:g} s"}
        found = [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]
    return {
        "processes": count,
        "end_to_end": sum(one["end_to_end"] for one in found),
        "compute_only": sum(one["compute_only"] for one in found),
        "host_ms_per_image": max(one["host_ms_per_image"] for one in found),
        "memory_gb": max(one["memory_gb"] for one in found),
        "start_to_first_step_s": max(one["start_to_first_step_s"] for one in found),
    }


def _codes(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended, one has failed (the others would wait for it), or the time is over."""
    end = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > end:
            return codes
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--processes", default="1,4,8", help="how many, comma-separated (default 1,4,8)")
    parser.add_argument("--mps", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a round may take (default 300)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given, others = parser.parse_known_args()
    if given.mps != "no" and shutil.which("nvidia-cuda-mps-control") is None:
        print("there is no MPS here (nvidia-cuda-mps-control is not on the PATH)", file=sys.stderr)
        given.mps = "no"
    try:
        counts = [int(part) for part in given.processes.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--processes is {given.processes!r}; allowed are positive whole numbers such as 1,4,8")
    arguments = ["--data", str(given.data), *others]
    rows = []
    for service in (False, True) if given.mps == "both" else (given.mps == "yes",):
        for count in counts:
            if service:
                with tempfile.TemporaryDirectory() as folder, multi_process_service(Path(folder)) as variables:
                    row = run(count, arguments, variables, given.timeout)
            else:
                row = run(count, arguments, {}, given.timeout)
            rows.append({"mps": service, **row})
            print(json.dumps(rows[-1]), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
