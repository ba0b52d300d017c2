// Voxelisation on the CPU: one pass over the points with a hash map from cell to voxel.
#include <algorithm>
#include <unordered_map>

#include "../cell.h"
#include "../kernels.h"
#include "parallel.h"

namespace hip_kernels::cpu {

void dynamic_voxelize(const DynamicVoxelize& p) {
    parallel_for(p.count, [&](int64_t i) {
        const Cell cell = cell_of(p.grid, p.points + i * p.features);
        p.coordinates[3 * i] = cell.z;
        p.coordinates[3 * i + 1] = cell.y;
        p.coordinates[3 * i + 2] = cell.x;
    });
}

void voxelize(const Voxelize& p) {
    std::fill_n(p.voxels, p.max_voxels * p.max_points * p.features, 0.f);
    std::fill_n(p.coordinates, p.max_voxels * 3, -1);
    std::fill_n(p.points_per_voxel, p.max_voxels, 0);
    std::fill_n(p.point_index, p.max_voxels * p.max_points, -1);
    std::unordered_map<uint32_t, int32_t> voxel_of;
    voxel_of.reserve(size_t(std::min<int64_t>(p.max_voxels, p.count)));
    for (int64_t i = 0; i < p.count; ++i) {
        const float* point = p.points + i * p.features;
        const Cell cell = cell_of(p.grid, point);
        if (!cell.valid) continue;
        const uint32_t key = cell_key(p.grid, cell);
        auto found = voxel_of.find(key);
        if (found == voxel_of.end()) {
            const auto next = int32_t(voxel_of.size());
            if (next >= p.max_voxels) continue;
            found = voxel_of.emplace(key, next).first;
            p.coordinates[3 * next] = cell.z;
            p.coordinates[3 * next + 1] = cell.y;
            p.coordinates[3 * next + 2] = cell.x;
        }
        int32_t& filled = p.points_per_voxel[found->second];
        if (filled >= p.max_points) continue;
        const int64_t slot = int64_t(found->second) * p.max_points + filled++;
        std::copy_n(point, p.features, p.voxels + slot * p.features);
        p.point_index[slot] = int32_t(i);
    }
    *p.voxel_count = int32_t(voxel_of.size());
}

}  // namespace hip_kernels::cpu
