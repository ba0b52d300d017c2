// The usual ways to compute what hip_kernels computes, written from the public descriptions of the algorithms, for
// benchmarks/kernels.py to compare with. Not part of the product.
//
// The functions are called through ctypes with device pointers and the current stream.
#include "../hip_kernels/csrc/cell.h"
#include "../hip_kernels/csrc/hip/platform.h"
#include "../hip_kernels/csrc/hip/primitives.h"

using namespace hip_kernels;
using namespace hip_kernels::gpu;

namespace {

// Where one (image, anchor, point, camera, scale, channel) samples, or nothing.
struct Place {
    int64_t channel, scale, camera, pair, anchor, image;
    bool inside;
    int height, width, x0, y0;
    float fx, fy;
};

__device__ Place place_of(const DeformableForward& p, int64_t thread) {
    Place at;
    const auto& s = p.shape;
    at.channel = thread % s.embed;
    at.scale = thread / s.embed % s.scales;
    at.camera = thread / s.embed / s.scales % s.cameras;
    at.pair = thread / s.embed / s.scales;
    at.anchor = at.pair / s.cameras / s.points;
    at.image = at.anchor / s.anchors;
    const float* location = static_cast<const float*>(p.locations) + 2 * at.pair;
    at.inside = location[0] > 0 && location[0] < 1 && location[1] > 0 && location[1] < 1;
    const int64_t level = at.camera * s.scales + at.scale;
    at.height = p.spatial_shapes[2 * level];
    at.width = p.spatial_shapes[2 * level + 1];
    const float x = location[0] * at.width - 0.5f, y = location[1] * at.height - 0.5f;
    at.x0 = int(floorf(x));
    at.y0 = int(floorf(y));
    at.fx = x - at.x0;
    at.fy = y - at.y0;
    return at;
}

__device__ int64_t feature_of(const DeformableForward& p, const Place& at, int k) {
    const int x = at.x0 + (k & 1), y = at.y0 + (k >> 1);
    if (x < 0 || x >= at.width || y < 0 || y >= at.height) return -1;
    const int64_t row = p.scale_start[at.camera * p.shape.scales + at.scale] + int64_t(y) * at.width + x;
    return (at.image * p.shape.rows + row) * p.shape.embed + at.channel;
}

// One thread per product, one atomic per thread.
__global__ void atomic_forward(DeformableForward p, int64_t threads) {
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    const Place at = place_of(p, thread);
    if (!at.inside) return;
    const float* features = static_cast<const float*>(p.features);
    float sum = 0;
    for (int k = 0; k < 4; ++k) {
        const int64_t feature = feature_of(p, at, k);
        if (feature >= 0) sum += (k & 1 ? at.fx : 1 - at.fx) * (k >> 1 ? at.fy : 1 - at.fy) * features[feature];
    }
    const int64_t group = at.channel / (p.shape.embed / p.shape.groups);
    const float weight = static_cast<const float*>(p.weights)[(at.pair * p.shape.scales + at.scale) * p.shape.groups + group];
    atomic_add(static_cast<float*>(p.output) + at.anchor * p.shape.embed + at.channel, sum * weight);
}

// One thread per product, up to seven atomics per thread.
__global__ void atomic_backward(DeformableBackward b, int64_t threads) {
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    const DeformableForward& p = b.forward;
    const Place at = place_of(p, thread);
    if (!at.inside) return;
    const float* features = static_cast<const float*>(p.features);
    const int64_t group = at.channel / (p.shape.embed / p.shape.groups);
    const int64_t weight_at = (at.pair * p.shape.scales + at.scale) * p.shape.groups + group;
    const float weight = static_cast<const float*>(p.weights)[weight_at];
    const float grad = static_cast<const float*>(b.grad_output)[at.anchor * p.shape.embed + at.channel];
    float sum = 0, along_x = 0, along_y = 0;
    for (int k = 0; k < 4; ++k) {
        const int64_t feature = feature_of(p, at, k);
        if (feature < 0) continue;
        const float wx = k & 1 ? at.fx : 1 - at.fx, wy = k >> 1 ? at.fy : 1 - at.fy, value = features[feature];
        sum += wx * wy * value;
        along_x += (k & 1 ? wy : -wy) * value;
        along_y += (k >> 1 ? wx : -wx) * value;
        atomic_add(static_cast<float*>(b.grad_features) + feature, wx * wy * weight * grad);
    }
    atomic_add(static_cast<float*>(b.grad_weights) + weight_at, grad * sum);
    atomic_add(static_cast<float*>(b.grad_locations) + 2 * at.pair, at.width * along_x * weight * grad);
    atomic_add(static_cast<float*>(b.grad_locations) + 2 * at.pair + 1, at.height * along_y * weight * grad);
}

int64_t thread_count(const DeformableShape& s) {
    return int64_t(s.batch) * s.anchors * s.points * s.cameras * s.scales * s.embed;
}

// For every point, the first point of its voxel, by looking at all points before it; and its place in the voxel.
__global__ void look_back(const int32_t* coordinates, int count, int max_points, int* first, int* place) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int x = coordinates[3 * i], y = coordinates[3 * i + 1], z = coordinates[3 * i + 2];
    first[i] = place[i] = -1;
    if (x < 0) return;
    int before = 0;
    for (int j = 0; j < i; ++j) {
        if (coordinates[3 * j] == x && coordinates[3 * j + 1] == y && coordinates[3 * j + 2] == z) {
            if (before == 0) first[i] = j;
            if (++before == max_points) return;
        }
    }
    if (before == 0) first[i] = i;
    place[i] = before;
}

// One thread numbers the voxels.
__global__ void number_voxels(const int* first, const int* place, int count, int max_voxels, int* voxel_of, int* voxel_count) {
    int voxels = 0;
    for (int i = 0; i < count; ++i) {
        voxel_of[i] = -1;
        if (place[i] == 0) {
            if (voxels < max_voxels) voxel_of[i] = voxels++;
        } else if (place[i] > 0) {
            voxel_of[i] = voxel_of[first[i]];
        }
    }
    *voxel_count = voxels;
}

__global__ void copy_points(Voxelize p, const int32_t* coordinates, const int* place, const int* voxel_of) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.count || voxel_of[i] < 0 || place[i] < 0) return;
    for (int64_t f = 0; f < p.features; ++f) {
        p.voxels[(voxel_of[i] * p.max_points + place[i]) * p.features + f] = p.points[i * p.features + f];
    }
    atomicAdd(p.points_per_voxel + voxel_of[i], 1);
    if (place[i] == 0) {
        for (int axis = 0; axis < 3; ++axis) p.coordinates[3 * voxel_of[i] + axis] = coordinates[3 * i + axis];
    }
}

}  // namespace

extern "C" {

int baseline_deformable_forward(const DeformableForward* p, void* stream) {
    const int64_t threads = thread_count(p->shape);
    atomic_forward<<<unsigned((threads + 127) / 128), 128, 0, native(stream)>>>(*p, threads);
    return int(hipGetLastError());
}

int baseline_deformable_backward(const DeformableBackward* b, void* stream) {
    const int64_t threads = thread_count(b->forward.shape);
    atomic_backward<<<unsigned((threads + 127) / 128), 128, 0, native(stream)>>>(*b, threads);
    return int(hipGetLastError());
}

// `scratch`: three arrays of count integers. `coordinates`: (count, 3), from dynamic_voxelize. Outputs are zeroed before.
int baseline_voxelize(const Voxelize* p, const int32_t* coordinates, int* scratch, void* stream) {
    const int count = int(p->count);
    int *first = scratch, *place = scratch + count, *voxel_of = scratch + 2 * count;
    look_back<<<blocks_for(count), kBlock, 0, native(stream)>>>(coordinates, count, int(p->max_points), first, place);
    number_voxels<<<1, 1, 0, native(stream)>>>(first, place, count, int(p->max_voxels), voxel_of, p->voxel_count);
    copy_points<<<blocks_for(count), kBlock, 0, native(stream)>>>(*p, coordinates, place, voxel_of);
    return int(hipGetLastError());
}

// The radix sort that voxelize uses, alone. With a null workspace it only tells its size.
int baseline_sort(void* workspace, size_t* bytes, const uint32_t* keys, uint32_t* sorted, const uint32_t* values,
                  uint32_t* sorted_values, int count, int bits, void* stream) {
    return sort_pairs<uint32_t>(workspace, *bytes, keys, sorted, values, sorted_values, count, bits, native(stream));
}

}  // extern "C"
