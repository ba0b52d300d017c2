"""NVIDIA GPUs and their MIG instances through ``nvidia-smi``. MIG is set up by the site: here it is only found."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.logical_gpu import LogicalGpu, NodeDevices

_GPU = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[0-9a-f-]+)\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
_MIG_MEMORY = re.compile(r"\.(\d+)gb")
TIMEOUT_S = 60


def find(visible: str | None = None) -> NodeDevices:
    """The GPUs of this node, or in their place their MIG instances.

    Args:
        visible: the job's ``CUDA_VISIBLE_DEVICES``; what it does not name is left out.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return NodeDevices("none", note="no nvidia-smi")
    query = ["--query-gpu=uuid,memory.total,pci.bus_id", "--format=csv,noheader,nounits"]
    texts = []
    for options in (["-L"], query):
        try:
            code, out, err = _answer([program, *options])
        except subprocess.TimeoutExpired:
            return NodeDevices(
                "none", note=f"nvidia-smi gives no answer within {TIMEOUT_S} s; see dmesg for the driver"
            )
        if code != 0:
            return NodeDevices("none", note=f"nvidia-smi fails: {(err or out).strip()}")
        texts.append(out)
    return parse(texts[0], texts[1], visible)


def _answer(command: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors. What hangs in the driver is not waited for, since no signal ends it.

    Raises:
        subprocess.TimeoutExpired: there is no answer in time.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def parse(listing: str, details: str, visible: str | None = None) -> NodeDevices:
    """Pure part of :func:`find`: from ``nvidia-smi -L`` and its CSV of UUID, memory in MiB and PCI address."""
    rows = [[field.strip() for field in line.split(",")] for line in details.splitlines() if line.count(",") == 2]
    memory = {uuid: float(mib) / 1024 for uuid, mib, _ in rows if mib.replace(".", "").isdigit()}
    address = {uuid: bdf.lower() for uuid, _, bdf in rows}
    found = [gpu for gpu in _devices(listing, memory, address) if _is_visible(gpu, visible)]
    model = next((match[2] for match in map(_GPU.match, listing.splitlines()) if match), "")
    return NodeDevices("nvidia" if found else "none", tuple(found), model=model, note="" if found else "no GPU visible")


def _devices(listing: str, memory: dict[str, float], address: dict[str, str]) -> Iterator[LogicalGpu]:
    index = 0
    for block in re.split(r"(?m)^(?=GPU )", listing):
        gpu = _GPU.match(block)
        if gpu is None:
            continue
        number, uuid = int(gpu[1]), gpu[3]
        instances = _MIG.findall(block) or [("", "0", uuid)]
        for profile, part, name in instances:
            size = _MIG_MEMORY.search(profile)
            bdf = address.get(uuid, "")
            yield LogicalGpu(
                index=index,
                gpu=number,
                partition_id=int(part),
                bdf=bdf,
                uuid=name,
                visible_by=("CUDA_VISIBLE_DEVICES", name),
                numa_node=_numa_node(bdf),
                memory_gib=float(size[1]) if size else memory.get(uuid) if not profile else None,
            )
            index += 1


def _is_visible(gpu: LogicalGpu, visible: str | None) -> bool:
    """CUDA takes indices of whole GPUs, UUIDs, or unambiguous beginnings of UUIDs."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(name == str(gpu.gpu) or (not name.isdigit() and gpu.uuid.startswith(name)) for name in names)


def _numa_node(bdf: str) -> int | None:
    # nvidia-smi writes the PCI domain with eight digits, the kernel with four
    path = Path("/sys/bus/pci/devices") / re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bdf) / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
