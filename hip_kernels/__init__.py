"""PyTorch operations for perception models: HIP kernels for AMD GPUs that compile for NVIDIA GPUs, and CPU versions."""

from hip_kernels.ops import (
    AugmentTable,
    batched_nms,
    deformable_aggregation,
    dynamic_voxelize,
    is_built,
    mosaic_augment,
    voxelize,
    voxelize_padded,
)

__all__ = [
    "AugmentTable",
    "batched_nms",
    "deformable_aggregation",
    "dynamic_voxelize",
    "is_built",
    "mosaic_augment",
    "voxelize",
    "voxelize_padded",
]
