// Voxelisation in order of first appearance, by one stable radix sort.
//
//   1. key of each point = its cell; points without one get a key past the last cell
//   2. sort (key, index): a voxel's points are neighbours now, in their own order, the first of them in front
//   3. mark the first point of each voxel at its original place; a running sum over the marks numbers the voxels by first
//      appearance
//   4. note where each wanted voxel starts in the sorted order
//   5. fill the outputs, one thread per slot: the padding too, so nothing is cleared before
//
// No step depends on the order in which threads run.
#include "../cell.h"
#include "primitives.h"

namespace hip_kernels::gpu {
namespace {

constexpr uint32_t kNone = 0xffffffffu;

struct Arrays {
    uint32_t *keys, *index, *sorted_keys, *sorted_index, *marks, *rank, *start;
    void* library;
    size_t library_bytes;
};

__global__ __launch_bounds__(kBlock) void key_kernel(VoxelGrid grid, const float* points, int count, int features,
                                                     uint32_t* keys, uint32_t* index, uint32_t* marks) {
    const int i = blockIdx.x * kBlock + threadIdx.x;
    if (i > count) return;
    marks[i] = 0;  // one more than points: the sum's last element is the number of voxels
    if (i == count) return;
    const Cell cell = cell_of(grid, points + int64_t(i) * features);
    keys[i] = cell.valid ? cell_key(grid, cell) : cell_count(grid);
    index[i] = i;
}

__device__ inline bool starts_voxel(const uint32_t* sorted_keys, int i, uint32_t cells) {
    return sorted_keys[i] < cells && (i == 0 || sorted_keys[i - 1] != sorted_keys[i]);
}

__global__ __launch_bounds__(kBlock) void mark_kernel(const uint32_t* sorted_keys, const uint32_t* sorted_index, int count,
                                                      uint32_t cells, uint32_t* marks) {
    const int i = blockIdx.x * kBlock + threadIdx.x;
    if (i < count && starts_voxel(sorted_keys, i, cells)) marks[sorted_index[i]] = 1;
}

__global__ __launch_bounds__(kBlock) void start_kernel(const uint32_t* sorted_keys, const uint32_t* sorted_index, int count,
                                                       uint32_t cells, const uint32_t* rank, uint32_t max_voxels,
                                                       uint32_t* start, int32_t* voxel_count) {
    const int i = blockIdx.x * kBlock + threadIdx.x;
    if (i == 0) *voxel_count = int32_t(min(rank[count], max_voxels));
    if (i < count && starts_voxel(sorted_keys, i, cells)) {
        const uint32_t voxel = rank[sorted_index[i]];
        if (voxel < max_voxels) start[voxel] = i;
    }
}

__global__ __launch_bounds__(kBlock) void fill_kernel(Voxelize p, const uint32_t* sorted_keys, const uint32_t* sorted_index,
                                                      const uint32_t* start) {
    const int64_t slot_index = int64_t(blockIdx.x) * kBlock + threadIdx.x;
    if (slot_index >= p.max_voxels * p.max_points) return;
    const int max_points = int(p.max_points), features = int(p.features);
    const int voxel = int(slot_index / max_points), slot = int(slot_index - int64_t(voxel) * max_points);
    const bool used = voxel < *p.voxel_count;
    const int64_t at = used ? int64_t(start[voxel]) + slot : 0;
    const uint32_t key = used ? sorted_keys[start[voxel]] : kNone;
    const bool filled = used && at < p.count && sorted_keys[at] == key;
    const int32_t source = filled ? int32_t(sorted_index[at]) : -1;
    p.point_index[slot_index] = source;
    float* out = p.voxels + slot_index * features;
    const float* in = p.points + int64_t(filled ? source : 0) * features;
    if (features % 4 == 0) {
        for (int f = 0; f < features; f += 4) {
            store<float, 4>(out + f, filled ? load<float, 4>(in + f) : Pack<float, 4>{});
        }
    } else {
        for (int f = 0; f < features; ++f) out[f] = filled ? in[f] : 0.f;
    }
    const bool more = filled && slot + 1 < max_points && at + 1 < p.count && sorted_keys[at + 1] == key;
    if (filled && !more) p.points_per_voxel[voxel] = slot + 1;
    if (slot != 0) return;
    if (!used) p.points_per_voxel[voxel] = 0;
    const uint32_t row = key / uint32_t(p.grid.size[0]), plane = row / uint32_t(p.grid.size[1]);
    p.coordinates[3 * voxel] = used ? int32_t(plane) : -1;
    p.coordinates[3 * voxel + 1] = used ? int32_t(row - plane * p.grid.size[1]) : -1;
    p.coordinates[3 * voxel + 2] = used ? int32_t(key - row * p.grid.size[0]) : -1;
}

__global__ __launch_bounds__(kBlock) void dynamic_kernel(DynamicVoxelize p) {
    const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
    if (i >= p.count) return;
    const Cell cell = cell_of(p.grid, p.points + i * p.features);
    p.coordinates[3 * i] = cell.z;
    p.coordinates[3 * i + 1] = cell.y;
    p.coordinates[3 * i + 2] = cell.x;
}

// The arrays inside `workspace`; with null only the library's and the total size are found.
int arrange(const Voxelize& p, void* workspace, Arrays& a, size_t& total) {
    const int count = int(p.count);
    size_t sort_bytes = 0, sum_bytes = 0;
    const int bits = bits_for(cell_count(p.grid));
    if (const int e = sort_pairs<uint32_t>(nullptr, sort_bytes, nullptr, nullptr, nullptr, nullptr, count, bits, nullptr)) return e;
    if (const int e = exclusive_sum(nullptr, sum_bytes, nullptr, nullptr, count + 1, nullptr)) return e;
    Workspace space(workspace);
    for (uint32_t** array : {&a.keys, &a.index, &a.sorted_keys, &a.sorted_index, &a.marks, &a.rank}) {
        *array = space.take<uint32_t>(size_t(count) + 1);
    }
    a.start = space.take<uint32_t>(size_t(p.max_voxels));
    a.library_bytes = sort_bytes > sum_bytes ? sort_bytes : sum_bytes;
    a.library = space.take<char>(a.library_bytes);
    total = space.used();
    return 0;
}

}  // namespace

int voxelize_workspace_bytes(const Voxelize& p, size_t* bytes) {
    Arrays arrays;
    return arrange(p, nullptr, arrays, *bytes);
}

int voxelize(const Voxelize& p, void* workspace, size_t, Stream stream_pointer) {
    const hipStream_t stream = native(stream_pointer);
    const int count = int(p.count);
    Arrays a;
    size_t total = 0;
    if (const int e = arrange(p, workspace, a, total)) return e;
    const uint32_t cells = cell_count(p.grid);
    key_kernel<<<blocks_for(p.count + 1), kBlock, 0, stream>>>(p.grid, p.points, count, int(p.features), a.keys, a.index, a.marks);
    if (count > 0) {
        size_t bytes = a.library_bytes;
        if (const int e = sort_pairs(a.library, bytes, a.keys, a.sorted_keys, a.index, a.sorted_index, count, bits_for(cells),
                                     stream)) {
            return e;
        }
        mark_kernel<<<blocks_for(p.count), kBlock, 0, stream>>>(a.sorted_keys, a.sorted_index, count, cells, a.marks);
    }
    size_t bytes = a.library_bytes;
    if (const int e = exclusive_sum(a.library, bytes, a.marks, a.rank, count + 1, stream)) return e;
    start_kernel<<<blocks_for(p.count + 1), kBlock, 0, stream>>>(a.sorted_keys, a.sorted_index, count, cells, a.rank,
                                                                 uint32_t(p.max_voxels), a.start, p.voxel_count);
    fill_kernel<<<blocks_for(p.max_voxels * p.max_points), kBlock, 0, stream>>>(p, a.sorted_keys, a.sorted_index, a.start);
    return int(hipGetLastError());
}

int dynamic_voxelize(const DynamicVoxelize& p, Stream stream) {
    if (p.count == 0) return 0;
    dynamic_kernel<<<blocks_for(p.count), kBlock, 0, native(stream)>>>(p);
    return int(hipGetLastError());
}

}  // namespace hip_kernels::gpu
