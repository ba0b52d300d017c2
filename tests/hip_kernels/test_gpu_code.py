"""The kernels compile for AMD and NVIDIA GPUs, and the code for gfx942 is what was planned. No GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import hip_kernels

from . import debian_rocm

SOURCES = sorted((Path(hip_kernels.__file__).parent / "csrc" / "hip").glob("*.hip"))
needs_clang = pytest.mark.skipif(bool(debian_rocm.MISSING), reason=f"not installed: {', '.join(debian_rocm.MISSING)}")

# Kernel, and how many waves a SIMD has to hold at least (512 vector registers shared among them).
PLANNED_WAVES = {
    "forward_kernel": 5,
    "backward_kernel": 5,
    "augment_kernel": 5,
    "select_kernel": 4,
    "key_kernel": 8,
    "fill_kernel": 8,
}


class Kernel(NamedTuple):
    name: str
    body: str
    registers: int
    scratch_bytes: int
    spilled: int


def kernels_of(text: str) -> list[Kernel]:
    """Our kernels (not the library's) in an assembly text, with the figures of its metadata."""
    found = []
    for entry in re.split(r"^  - \.agpr_count:", text[text.index("amdhsa.kernels:") :], flags=re.MULTILINE)[1:]:
        symbol = re.search(r"\.name: +(\S+)", entry)
        assert symbol is not None
        if "hip_kernels" not in symbol[1] or "rocprim" in symbol[1]:
            continue
        figures = {key: int(value) for key, value in re.findall(r"\.(\w+): +(\d+)$", entry, flags=re.MULTILINE)}
        start = text.index(f"\n{symbol[1]}:")
        body = text[start : text.index("\n.Lfunc_end", start)]
        figure = figures["private_segment_fixed_size"], figures["vgpr_spill_count"]
        found.append(Kernel(symbol[1], body, figures["vgpr_count"], *figure))
    return found


@pytest.fixture(scope="module")
def gfx942(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kernel]]:
    folder = tmp_path_factory.mktemp("gfx942")
    root = debian_rocm.make_root(folder / "rocm")
    texts = {source: debian_rocm.assembly(source, "gfx942", root, folder / f"{source.stem}.s") for source in SOURCES}
    return {source.stem: kernels_of(text) for source, text in texts.items()}


@needs_clang
def test_no_kernel_uses_scratch_memory(gfx942: dict[str, list[Kernel]]) -> None:
    assert set(gfx942) == {source.stem for source in SOURCES}
    for kernels in gfx942.values():
        assert kernels
        for kernel in kernels:
            assert (kernel.scratch_bytes, kernel.spilled) == (0, 0), kernel.name
            assert "scratch_" not in kernel.body, kernel.name


@needs_clang
def test_registers_allow_the_planned_occupancy(gfx942: dict[str, list[Kernel]]) -> None:
    seen = set()
    for kernel in (kernel for kernels in gfx942.values() for kernel in kernels):
        for name, waves in PLANNED_WAVES.items():
            if name in kernel.name:
                seen.add(name)
                assert 512 // (-(-kernel.registers // 8) * 8) >= waves, f"{kernel.name}: {kernel.registers} registers"
    assert seen == set(PLANNED_WAVES)


@needs_clang
@pytest.mark.parametrize(
    ("source", "kernel", "instruction", "at_least"),
    [
        # four rows in flight, 16 bytes a lane
        ("deformable_aggregation", "forward_kernelIfLi4", "global_load_dwordx4", 4),
        ("deformable_aggregation", "forward_kernelIDF16_Li8", "global_load_dwordx4", 4),
        ("deformable_aggregation", "BFloat16ELi8", "global_load_dwordx4", 4),
        ("deformable_aggregation_backward", "backward_kernelIfLi4", "global_load_dwordx4", 4),
        ("deformable_aggregation_backward", "backward_kernelIfLi4", "global_atomic_add_f32", 4),
        ("deformable_aggregation_backward", "backward_kernelIDF16_Li4", "global_load_dwordx2", 4),
        # two rows of two pixels, for four pixels
        ("mosaic_augment", "augment_kernelIfLb1ELb1", "global_load_dwordx2", 8),
        ("mosaic_augment", "augment_kernelIfLb1ELb1", "global_store_dwordx4", 3),
        ("mosaic_augment", "augment_kernelIDF16_Lb1ELb1", "global_store_dwordx[234]", 2),
        ("voxelize", "fill_kernel", "global_load_dwordx4", 1),
        ("voxelize", "fill_kernel", "global_store_dwordx4", 1),
        ("batched_nms", "select_kernel", "global_load_dwordx4", 1),
    ],
)
def test_hot_loops_use_wide_loads_and_stores(
    gfx942: dict[str, list[Kernel]], source: str, kernel: str, instruction: str, at_least: int
) -> None:
    chosen = [candidate for candidate in gfx942[source] if kernel in candidate.name]
    assert chosen
    for candidate in chosen:
        assert len(re.findall(rf"{instruction}\b", candidate.body)) >= at_least, candidate.name


@needs_clang
def test_the_forward_pass_has_no_global_atomics_and_no_slow_addressing(gfx942: dict[str, list[Kernel]]) -> None:
    for kernel in gfx942["deformable_aggregation"]:
        assert "global_atomic" not in kernel.body
        assert "flat_load" not in kernel.body
    for kernel in gfx942["deformable_aggregation_backward"]:
        assert "global_atomic_cmpswap" not in kernel.body, "a compare-and-swap loop in place of an addition"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_every_kernel_compiles_for_nvidia_without_spills(tmp_path: Path) -> None:
    for source in SOURCES:
        command = ["nvcc", "-x", "cu", "-arch=sm_90", "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", str(source)]
        done = subprocess.run([*command, "-o", str(tmp_path / "out.cubin")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kernels = done.stderr.split("Compiling entry function")[1:]
        # float64 is for checking gradients; what it spills costs nobody anything
        ours = [text for text in kernels if "_kernel" in text and "kernelId" not in text and "3cub" not in text]
        assert ours
        for text in ours:
            assert "0 bytes spill stores, 0 bytes spill loads" in text, text
