// The voxel of a point: one definition for the CPU and the GPU, so that both agree to the last bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"

#if defined(__HIPCC__) || defined(__CUDACC__)
#define HIP_KERNELS_BOTH __host__ __device__
#else
#define HIP_KERNELS_BOTH
#endif

namespace hip_kernels {

struct Cell {
    int32_t x, y, z;
    bool valid;
};

// Points outside the half-open range, NaN and infinities have no cell. The tests stand before the conversion to an
// integer, which is undefined for such values.
HIP_KERNELS_BOTH inline Cell cell_of(const VoxelGrid& grid, const float* point) {
    const float x = floorf((point[0] - grid.range_min[0]) / grid.voxel_size[0]);
    const float y = floorf((point[1] - grid.range_min[1]) / grid.voxel_size[1]);
    const float z = floorf((point[2] - grid.range_min[2]) / grid.voxel_size[2]);
    const bool valid = x >= 0.f && x < float(grid.size[0]) && y >= 0.f && y < float(grid.size[1]) && z >= 0.f &&
                       z < float(grid.size[2]);
    if (!valid) return {-1, -1, -1, false};
    return {int32_t(x), int32_t(y), int32_t(z), true};
}

HIP_KERNELS_BOTH inline uint32_t cell_count(const VoxelGrid& grid) {
    return uint32_t(grid.size[0]) * uint32_t(grid.size[1]) * uint32_t(grid.size[2]);
}

HIP_KERNELS_BOTH inline uint32_t cell_key(const VoxelGrid& grid, const Cell& cell) {
    return (uint32_t(cell.z) * uint32_t(grid.size[1]) + uint32_t(cell.y)) * uint32_t(grid.size[0]) + uint32_t(cell.x);
}

}  // namespace hip_kernels
