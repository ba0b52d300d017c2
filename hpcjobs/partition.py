"""The partition modes, logical GPUs and cores of this node; also the entry ``python -m hpcjobs.partition``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Mapping

from hpcjobs import amd, nvidia
from hpcjobs.cores import allowed_cpus, assign_cores, format_cpu_list, parse_cpu_list
from hpcjobs.errors import UserError, run_entry
from hpcjobs.logical_gpu import PARTITIONS, LogicalGpu, NodeDevices
from hpcjobs.text import counted, seconds

EXIT_FAILED = 1


def discover(vendor: str | None = None, environ: Mapping[str, str] = os.environ) -> NodeDevices:
    """The logical GPUs of this node that the job may use; ``vendor`` ``none`` and a ``note`` where there are none.

    Args:
        vendor: ``amd``, ``nvidia``, ``none``, or None to look for AMD's first, then NVIDIA's.
        environ: where Slurm says which GPUs the job was given.
    """
    if vendor == "none":
        return NodeDevices("none", note="the cluster's profile says that there are no GPUs")
    notes = []
    if vendor in (None, "amd"):
        try:
            with amd.AmdSmi() as smi:
                found = smi.node()
        except amd.AmdUnavailableError as error:
            notes.append(f"AMD: {error}")
        else:
            if found.gpus:
                return restrict(found, environ)
            notes.append("AMD: the library shows no GPU")
    if vendor in (None, "nvidia"):
        found = nvidia.find(environ.get("CUDA_VISIBLE_DEVICES"))
        if found.gpus:
            return found
        notes.append(f"NVIDIA: {found.note}")
    return NodeDevices("none", note="; ".join(notes))


def restrict(devices: NodeDevices, environ: Mapping[str, str]) -> NodeDevices:
    """Leave out GPUs that are not the job's, where Slurm gave it a part of the node.

    Slurm counts physical GPUs (SLURM_JOB_GPUS). Its ROCR_VISIBLE_DEVICES counts them too, although ROCR takes the
    numbers for logical GPUs, so that it is right in SPX alone and is not read here.
    """
    allocated = environ.get("SLURM_JOB_GPUS", "")
    physical = len({gpu.gpu for gpu in devices.gpus})
    if not re.fullmatch(r"\d+([,-]\d+)*", allocated):
        return devices
    numbers = set(parse_cpu_list(allocated))
    # as many as are visible: all of them, or a cgroup has hidden the rest and the runtime counts anew
    if len(numbers) >= physical:
        return devices
    return dataclasses.replace(devices, gpus=tuple(gpu for gpu in devices.gpus if gpu.gpu in numbers))


def current_mode() -> str | None:
    """The partition mode that all AMD GPUs of this node are in, in lower case, or None."""
    try:
        with amd.AmdSmi() as smi:
            return smi.node().mode
    except amd.AmdUnavailableError:
        return None


def describe(devices: NodeDevices, cores: Mapping[int, str]) -> list[str]:
    """Lines for a person: modes, then one line per logical GPU with memory in GiB, NUMA node and cores."""
    physical = len({gpu.gpu for gpu in devices.gpus})
    if not devices.gpus:
        return [f"no GPU found. {devices.note}"]
    mode = devices.mode or (", ".join(mode or "?" for mode in devices.modes) or "none")
    lines = [
        f"{physical} x {devices.model or devices.vendor}, {counted(len(devices.gpus), 'logical GPU')}",
        f"partition mode {mode}, memory mode {devices.memory_mode or 'none'}, "
        f"offered: {', '.join(devices.supported) or 'no switch'}",
    ]
    if devices.missing:
        lines.append(f"warning: {counted(devices.missing, 'logical GPU')} of this mode missing")
    lines.append(f"{'index':>5}  {'GPU':>3}.{'part':<4}  {'PCI':<14}{'NUMA':>4}  {'GiB':>6}  cores")
    for gpu in devices.gpus:
        numa = "-" if gpu.numa_node is None else gpu.numa_node
        memory = "-" if gpu.memory_gib is None else f"{gpu.memory_gib:g}"
        place = f"{gpu.index:>5}  {gpu.gpu:>3}.{gpu.partition_id:<4}  {gpu.bdf:<14}{numa:>4}  {memory:>6}"
        lines.append(f"{place}  {cores.get(gpu.index, '-')}")
    return lines


def _cores_by_gpu(gpus: tuple[LogicalGpu, ...], reserved: list[int]) -> dict[int, str]:
    shares = assign_cores([gpu.numa_node for gpu in gpus], allowed_cpus(), reserved)
    return {gpu.index: format_cpu_list(share) for gpu, share in zip(gpus, shares, strict=True)}


def _show(options: argparse.Namespace) -> None:
    devices = discover(options.vendor)
    if options.json:
        print(json.dumps({**dataclasses.asdict(devices), "mode": devices.mode, "missing": devices.missing}, indent=2))
        return
    near: dict[int | None, list[int]] = {}
    for cpu in allowed_cpus():
        near.setdefault(cpu.numa_node, []).append(cpu.number)
    cores = {gpu.index: format_cpu_list(near.get(gpu.numa_node, [])) for gpu in devices.gpus}
    print("\n".join(describe(devices, cores)))


def _plan(options: argparse.Namespace) -> None:
    try:
        reserved = parse_cpu_list(options.reserved)
    except ValueError:
        raise UserError(f"--reserved: found {options.reserved!r}; allowed: CPU numbers such as 0,8-15") from None
    devices = discover(options.vendor)
    if not devices.gpus:
        raise UserError(f"this node: found no GPU ({devices.note}); there is nothing to plan")
    print("one worker per logical GPU, with these cores of its own:")
    print("\n".join(describe(devices, _cores_by_gpu(devices.gpus, reserved))))


def _set(options: argparse.Namespace) -> int:
    mode = options.mode.lower()
    if mode not in PARTITIONS:
        raise UserError(f"MODE: found {options.mode!r}; allowed: {', '.join(PARTITIONS)}")
    try:
        devices = amd.set_mode(mode, patience_s=options.patience)
    except (amd.ModeError, amd.AmdUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    print("\n".join(describe(devices, {})[:3]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.partition",
        description="Show this node's logical GPUs, set their partition mode, or show which\ncores workers would get.",
        epilog="examples:\n  python -m hpcjobs.partition show\n  python -m hpcjobs.partition plan --reserved 0,8\n"
        "  sudo python -m hpcjobs.partition set cpx\n\nexit codes: 0 done, 1 the mode could not be set, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="modes, logical GPUs, memory, NUMA nodes, nearby cores")
    show.add_argument("--json", action="store_true", help="for programs")
    plan = commands.add_parser("plan", help="the cores of one worker per logical GPU")
    plan.add_argument("--reserved", default="", metavar="CPUS", help="leave these to the system, such as 0,8-15")
    for command in (show, plan):
        command.add_argument("--vendor", choices=["amd", "nvidia"], help="default: whichever is there")
    change = commands.add_parser("set", help="set the compute partition mode of every AMD GPU (root, idle GPUs)")
    change.add_argument("mode", metavar="MODE", help=", ".join(PARTITIONS))
    change.add_argument(
        "--patience", type=seconds, default=60.0, metavar="SECONDS", help="bear BUSY (default: %(default)s)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "set":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        return _set(options)
    if options.command == "show":
        _show(options)
    else:
        _plan(options)
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
