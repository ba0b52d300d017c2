"""Tune MIOpen's convolutions for AutoSpeed on an AMD GPU: ``python -m autospeed_model.tune_miopen OUT``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from autospeed_model.accelerator import TUNED_MIOPEN, prepare_process
from autospeed_model.errors import UserError, run_entry

EXAMPLES = f"""\
examples:
  python -m autospeed_model.tune_miopen /shared/miopen-mi300x
  python -m autospeed_model.tune_miopen /shared/miopen-mi300x --variant autospeed --batch-sizes 8,16,32

Then set {TUNED_MIOPEN}=/shared/miopen-mi300x in the environment of a cluster's profile: every worker begins with a
copy of its own.
Tune in each partition mode that is used: the best kernels depend on the number of compute units.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.tune_miopen",
        description="Search the fastest convolution kernels for AutoSpeed's shapes and keep them\n"
        "as a MIOpen database.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the database; an existing one is extended")
    parser.add_argument("--variant", default="autospeed-2", help="autospeed-2 (default) or autospeed")
    parser.add_argument("--size", default="n", help="size of the network (default n)")
    parser.add_argument("--batch-sizes", default="8,32", help="comma-separated (default 8,32)")
    parser.add_argument("--precision", default="bf16", help="bf16 (default), fp16 or fp32")
    return parser.parse_args(arguments)


def batch_sizes(text: str) -> list[int]:
    """:raises UserError: when ``text`` is no list of positive whole numbers."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(f"--batch-sizes is {text!r}; allowed are positive whole numbers such as 8,32")
    return sizes


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    sizes = batch_sizes(given.batch_sizes)
    from autospeed_model.packed import VARIANTS

    if given.variant not in VARIANTS:
        raise UserError(f"--variant is {given.variant!r}; allowed are {', '.join(VARIANTS)}")
    import torch

    if torch.version.hip is None:
        raise UserError(
            f"this PyTorch ({torch.__version__}) is not built for ROCm: there is no MIOpen to tune; run this on an AMD "
            "GPU, with PyTorch's build for it"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    # MIOpen reads these at its first use.
    os.environ["MIOPEN_USER_DB_PATH"] = str(given.out.resolve())
    os.environ["MIOPEN_FIND_ENFORCE"] = "search_db_update"
    prepare_process()
    from autospeed_model.tuning import tune

    for size in sizes:
        print(f"{given.variant}, size {given.size}, batch {size}: searching", flush=True)
        tune(*VARIANTS[given.variant], given.size, size, given.precision)
    print(f"{given.out}: set {TUNED_MIOPEN} to it in the environment of the cluster's profile")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
