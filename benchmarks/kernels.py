"""Time the operations of hip_kernels beside the usual ways to compute them, and beside the fewest bytes they can move.

Needs a GPU and compiled kernels (``python -m hip_kernels.build``). One line per case: bytes that must move, the time
that takes at the copy bandwidth measured in the same run (the floor), the time taken, and the ratios.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import hip_kernels
from benchmarks import kernel_cases as cases

HERE = Path(__file__).resolve().parent
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Row:
    operation: str
    case: str
    megabytes: float
    floor_us: float
    time_us: float
    over_floor: float
    baseline: str
    baseline_us: float
    speedup: float


class Timer:
    """Median device time of a call with a cold cache: a long kernel in front hides what the host does meanwhile."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.bytes_per_us = 2 * source.numel() / self(lambda: target.copy_(source))

    def __call__(self, call: Callable[[], object], repeats: int = 15, warm: int = 3) -> float:
        for _ in range(warm):
            call()
        times = []
        for _ in range(repeats):
            self.flush.fill_(1)
            torch.cuda._sleep(2_000_000)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return sorted(times)[len(times) // 2]

    def host(self, call: Callable[[], object], repeats: int = 3) -> float:
        """Median time of a call that waits for the device in between, launch costs included."""
        call()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return sorted(times)[len(times) // 2]

    def row(self, operation: str, case: str, bytes_: float, time: float, baseline: str, baseline_time: float) -> Row:
        floor = bytes_ / self.bytes_per_us
        return Row(
            operation, case, bytes_ / 1e6, floor, time, time / floor, baseline, baseline_time, baseline_time / time
        )


def names(text: str) -> list[str]:
    return text.split()


class Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in names("batch rows embed anchors points cameras scales groups")]


class Forward(ctypes.Structure):
    _fields_ = [("shape", Shape), ("dtype", ctypes.c_int32)] + [
        (n, ctypes.c_void_p) for n in names("features spatial_shapes scale_start locations weights output")
    ]


class Backward(ctypes.Structure):
    _fields_ = [("forward", Forward)] + [
        (n, ctypes.c_void_p) for n in names("grad_output grad_features grad_locations grad_weights")
    ]


class Voxelize(ctypes.Structure):
    _fields_ = (
        [("grid_floats", ctypes.c_float * 6), ("grid_size", ctypes.c_int32 * 3)]
        + [(n, ctypes.c_int64) for n in names("count features max_points max_voxels")]
        + [(n, ctypes.c_void_p) for n in names("points voxels coordinates points_per_voxel point_index voxel_count")]
    )


def build_baselines(folder: Path) -> ctypes.CDLL:
    """Compile kernel_baselines.hip for the GPU that is there. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "kernel_baselines.so"
    source = str(HERE / "kernel_baselines.hip")
    if torch.version.hip:
        command = ["hipcc", "-O3", "-std=c++17", "-fPIC", "-shared", source, "-o", str(library)]
    else:
        major, minor = torch.cuda.get_device_capability()
        target = ["-x", "cu", f"-arch=sm_{major}{minor}"]
        command = ["nvcc", *target, "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-shared", source, "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def check_close(name: str, value: Tensor, expected: Tensor, limit: float) -> None:
    error = float((value.double() - expected.double()).norm() / expected.double().norm())
    if not error < limit:
        raise SystemExit(f"{name}: relative error {error:.2e} against the baseline; the times mean nothing")


def aggregation(timer: Timer, baselines: ctypes.CDLL) -> list[Row]:
    rows = []
    ours = torch.ops.hip_kernels
    plan = [(1, "fp32", True), (8, "fp32", True), (1, "bf16", True), (8, "bf16", True), (8, "fp32", False)]
    for batch, name, projected in plan:
        torch.cuda.empty_cache()
        case = cases.sampling(batch, DTYPES[name], "cuda", projected)
        wide = (
            case
            if name == "fp32"
            else cases.Sampling(*(t.float() if t.is_floating_point() else t for t in case.arguments))
        )
        output = torch.zeros(batch, 900, 256, device="cuda")
        grad = torch.randn_like(output)
        grads = [torch.zeros_like(t) for t in (wide.features, wide.locations, wide.weights)]
        pointers = [t.data_ptr() for t in wide.arguments]
        forward = Forward(Shape(batch, wide.features.shape[1], 256, 900, 13, 6, 4, 8), 0, *pointers, output.data_ptr())
        backward = Backward(forward, grad.data_ptr(), *(t.data_ptr() for t in grads))

        def usual_forward(params: Forward = forward, out: Tensor = output) -> None:
            out.zero_()
            baselines.baseline_deformable_forward(ctypes.byref(params), stream())

        def usual_backward(params: Backward = backward, out: list[Tensor] = grads) -> None:
            for tensor in out:
                tensor.zero_()
            baselines.baseline_deformable_backward(ctypes.byref(params), stream())

        typed_grad = grad.to(DTYPES[name])
        usual_forward()
        check_close("forward", ours.deformable_aggregation(*case.arguments), output, 2e-2 if name == "bf16" else 1e-5)
        usual_backward()
        for value, expected in zip(
            ours.deformable_aggregation_backward(typed_grad, *case.arguments), grads, strict=True
        ):
            check_close("backward", value, expected, 2e-2 if name == "bf16" else 1e-4)
        label = f"B {batch} {name}" + ("" if projected else " uniform")
        usual = "atomic per product, fp32"
        bytes_forward, bytes_backward = case.needed_bytes()
        time = timer(lambda c=case: ours.deformable_aggregation(*c.arguments))
        rows.append(timer.row("aggregation forward", label, bytes_forward, time, usual, timer(usual_forward, 5, 1)))
        time = timer(lambda c=case, g=typed_grad: ours.deformable_aggregation_backward(g, *c.arguments))
        rows.append(timer.row("aggregation backward", label, bytes_backward, time, usual, timer(usual_backward, 5, 1)))
    return rows


def voxels(timer: Timer, baselines: ctypes.CDLL) -> list[Row]:
    rows = []
    limits = [-51.2, -51.2, -3.0, 51.2, 51.2, 5.0]
    for name, size, max_points, max_voxels in (
        ("0.1x0.1x0.2 m", [0.1, 0.1, 0.2], 10, 160_000),
        ("pillars 0.2 m", [0.2, 0.2, 8.0], 20, 40_000),
    ):
        grid = [round((limits[a + 3] - limits[a]) / size[a]) for a in range(3)]
        bits = (grid[0] * grid[1] * grid[2]).bit_length()
        for count in (120_000, 300_000, 1_000_000):
            points = cases.lidar_points(count, "cuda")
            ours = hip_kernels.voxelize_padded(points, size, limits, max_points, max_voxels)
            usual = [torch.zeros_like(t) for t in ours]
            scratch = torch.empty(3 * count, dtype=torch.int32, device="cuda")
            floats = (ctypes.c_float * 6)(*size, *limits[:3])
            places = [t.data_ptr() for t in (points, *usual)]
            params = Voxelize(floats, (ctypes.c_int32 * 3)(*grid), count, 4, max_points, max_voxels, *places)

            def quadratic(p: Voxelize = params, x: Tensor = points, s: Tensor = scratch, v: list[float] = size) -> None:
                coordinates = hip_kernels.dynamic_voxelize(x, v, limits)
                pointer = ctypes.c_void_p(coordinates.data_ptr())
                baselines.baseline_voxelize(ctypes.byref(p), pointer, ctypes.c_void_p(s.data_ptr()), stream())

            quadratic()
            found = int(ours[4])
            for number in (0, 1, 2, 4):
                if not torch.equal(ours[number][:found], usual[number][:found]):
                    raise SystemExit(f"voxelize: result {number} differs from the quadratic one")
            time = timer(
                lambda x=points, v=size, p=max_points, m=max_voxels: hip_kernels.voxelize_padded(x, v, limits, p, m)
            )
            bytes_ = points.numel() * 4 + sum(t.numel() * 4 for t in ours)
            slow = timer(quadratic, 1, 0)
            rows.append(timer.row("voxelize", f"{count // 1000}k {name}", bytes_, time, "quadratic", slow))
            sort = sort_alone(timer, baselines, count, bits)
            rows.append(timer.row("voxelize", f"{count // 1000}k {name}", bytes_, time, "radix sort alone", sort))
    return rows


def sort_alone(timer: Timer, baselines: ctypes.CDLL, count: int, bits: int) -> float:
    keys = torch.randint(0, 2**bits - 1, (count,), dtype=torch.int32, device="cuda")
    arrays = [
        keys,
        torch.empty_like(keys),
        torch.arange(count, dtype=torch.int32, device="cuda"),
        torch.empty_like(keys),
    ]
    size = ctypes.c_size_t(0)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in arrays]
    baselines.baseline_sort(None, ctypes.byref(size), *pointers, count, bits, stream())
    workspace = torch.empty(size.value, dtype=torch.uint8, device="cuda")
    place = ctypes.c_void_p(workspace.data_ptr())
    return timer(lambda: baselines.baseline_sort(place, ctypes.byref(size), *pointers, count, bits, stream()))


def augmentation(timer: Timer, _: ctypes.CDLL) -> list[Row]:
    rows = []
    for size in ((512, 1024), (640, 640)):
        images = torch.randint(0, 256, (512, *size, 3), dtype=torch.uint8, device="cuda")
        images = torch.nn.functional.avg_pool2d(
            images.permute(0, 3, 1, 2).half(), 9, 1, 4
        ).byte()  # smooth, as pictures are
        images = images.permute(0, 2, 3, 1).contiguous()
        for batch in (32, 128):
            table = cases.mosaic_table(batch, 512, size, "cuda")
            for name in ("fp32", "bf16"):
                dtype = DTYPES[name]
                torch.cuda.empty_cache()
                value = hip_kernels.mosaic_augment(images, table, size, dtype, fill=114.0)
                check_close("mosaic_augment", value[:8], cases.torch_mosaic(images, table, size, dtype)[:8], 1e-2)
                bytes_ = cases.mosaic_needed_bytes(images, table, size, value.element_size())
                time = timer(
                    lambda i=images, t=table, s=size, d=dtype: hip_kernels.mosaic_augment(i, t, s, d, fill=114.0)
                )
                slow = timer.host(lambda i=images, t=table, s=size, d=dtype: cases.torch_mosaic(i, t, s, d))
                label = f"B {batch} {size[0]}x{size[1]} {name} NHWC"
                rows.append(timer.row("mosaic_augment", label, bytes_, time, "grid_sample + colour", slow))
    return rows


def suppression(timer: Timer, _: ctypes.CDLL) -> list[Row]:
    boxes, scores, classes = cases.detections(64, 10_752, "cuda")
    kept, count = hip_kernels.batched_nms(boxes, scores, classes, 0.65, 300)
    usual = cases.nms_per_image(boxes, scores, classes, 0.65, 300)
    same = sum(torch.equal(kept[i, : int(count[i])], usual[i]) for i in range(64))
    if same < 60:  # torchvision moves the classes apart by an offset, which rounds overlaps at the threshold
        raise SystemExit(f"batched_nms: {same} of 64 images agree with the baseline")
    bytes_ = boxes.numel() * 4 + scores.numel() * 4 + classes.numel() * 8 + kept.numel() * 8
    time = timer(lambda: hip_kernels.batched_nms(boxes, scores, classes, 0.65, 300))
    slow = timer.host(lambda: cases.nms_per_image(boxes, scores, classes, 0.65, 300))
    return [timer.row("batched_nms", "B 64, 10752 boxes, 300 kept", bytes_, time, "per image", slow)]


GROUPS = {"aggregation": aggregation, "voxels": voxels, "augmentation": augmentation, "suppression": suppression}


def show(rows: Sequence[Row]) -> None:
    head = f"{'operation':<21}{'case':<32}{'MB':>9}{'floor us':>10}{'time us':>10}{'x floor':>9}  "
    print(head + f"{'baseline':<25}{'us':>12}{'faster':>9}")
    for r in rows:
        print(f"{r.operation:<21}{r.case:<32}{r.megabytes:>9.1f}{r.floor_us:>10.1f}{r.time_us:>10.1f}", end="")
        print(f"{r.over_floor:>9.2f}  " + f"{r.baseline:<25}{r.baseline_us:>12.1f}{r.speedup:>8.1f}x", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Time hip_kernels beside its baselines on the GPU that is here.",
        epilog="example: python -m benchmarks.kernels aggregation voxels --csv kernels.csv",
    )
    parser.add_argument(
        "groups", nargs="*", choices=[*GROUPS, []], metavar="GROUP", help=f"some of {', '.join(GROUPS)} (default: all)"
    )
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder of the compiled baselines")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not hip_kernels.is_built("cuda"):
        print("needs a GPU and compiled kernels: python -m hip_kernels.build", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    baselines = build_baselines(chosen.work)
    timer = Timer()
    print(f"{torch.cuda.get_device_name()}: copies {timer.bytes_per_us / 1e6:.2f} TB/s, read and written")
    rows = [row for group in chosen.groups or GROUPS for row in GROUPS[group](timer, baselines)]
    show(rows)
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
