// Deformable aggregation, backward: gradients of features, locations and weights. See deformable_common.h.
//
// Reduction in three levels: lanes of a group by shuffles, the teams of a block through shared memory, blocks by one vector
// reduction per distinct row. The gradients of locations and weights belong to one block and need no global atomics.
#include "deformable_common.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kUnroll = 4;  // rows in flight per lane before the first is used

// Phase 2: for every distinct row, dot products with the output's gradient and the reduction into the row's own gradient.
template <typename T, int V>
__device__ inline void visit_rows(const DeformableBackward& b, const Plan& plan, const Shared<accumulate_t<T>>& s,
                                  int64_t anchor, int rows) {
    using A = accumulate_t<T>;
    const auto& shape = b.forward.shape;
    const int lane = threadIdx.x & (plan.lanes - 1), team = threadIdx.x / plan.lanes, teams = kBlock / plan.lanes;
    const int groups = shape.groups, embed = shape.embed, width = embed / groups;
    const int64_t image = (anchor / shape.anchors) * shape.rows * embed;
    const T* features = static_cast<const T*>(b.forward.features) + image;
    A* grad_features = static_cast<A*>(b.grad_features) + image;
    for (int tile = 0; tile < plan.tiles; ++tile) {
        const int channel = (tile * plan.lanes + lane) * V;
        const bool active = channel < embed;
        const int group = active ? channel / width : 0;
        A grad[V] = {};
        if (active) {
            const Pack<T, V> value = load<T, V>(static_cast<const T*>(b.grad_output) + anchor * embed + channel);
#pragma unroll
            for (int v = 0; v < V; ++v) grad[v] = widen(value.at[v]);
        }
        // the same number of rounds for every lane of a wave, as the shuffles ask
        for (int first = 0; first < rows; first += teams * kUnroll) {
            Pack<T, V> value[kUnroll];
            int place[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                place[u] = first + u * teams + team;
                if (!active || place[u] >= rows) place[u] = -1;
                value[u] = place[u] < 0 ? Pack<T, V>{} : load<T, V>(features + s.row[place[u]] + channel);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                A dot = A(0);
                if (place[u] >= 0) {
                    const A factor = s.coefficient[place[u] * groups + group];
                    A part[V];
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        dot += grad[v] * widen(value[u].at[v]);
                        part[v] = factor * grad[v];
                    }
                    atomic_add_pack<A, V>(grad_features + s.row[place[u]] + channel, part);
                }
                dot = sum_over_lanes(dot, plan.merge_lanes);
                if (place[u] >= 0 && (lane & (plan.merge_lanes - 1)) == 0) atomic_add(s.dot + place[u] * groups + group, dot);
            }
        }
    }
}

// Phase 3: gradients of the weights and the location of each (item, scale), from the dot products.
template <typename T>
__device__ inline void finish_samples(const DeformableBackward& b, const Plan& plan, const Shared<accumulate_t<T>>& s,
                                      int64_t anchor, int first_item, int count, accumulate_t<T>* partial) {
    using A = accumulate_t<T>;
    const auto& shape = b.forward.shape;
    const int scales = shape.scales, groups = shape.groups;
    const int64_t pairs = int64_t(shape.points) * shape.cameras;
    const Item<A>* items = s.items + first_item;
    T* grad_weights = static_cast<T*>(b.grad_weights) + anchor * pairs * scales * groups;
    for (int i = threadIdx.x; i < count * scales; i += kBlock) {
        const int item = i / scales, scale = i - item * scales;
        const Level level = s.levels[items[item].level + scale];
        const Sample<A> at = sample_of<A>(items[item], level);
        const int* slots = s.slot + (scale << plan.segment_shift) + item * 4;
        T* out = grad_weights + (int64_t(items[item].pair) * scales + scale) * groups;
        A along_x = A(0), along_y = A(0);
        for (int group = 0; group < groups; ++group) {
            A dot[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) dot[k] = slots[k] < 0 ? A(0) : s.dot[slots[k] * groups + group];
            const A top = dot[0] + at.fx * (dot[1] - dot[0]), bottom = dot[2] + at.fx * (dot[3] - dot[2]);
            out[group] = narrow<T>(top + at.fy * (bottom - top));
            const A weight = s.weight[i * groups + group];
            along_x += weight * ((A(1) - at.fy) * (dot[1] - dot[0]) + at.fy * (dot[3] - dot[2]));
            along_y += weight * (bottom - top);
        }
        partial[2 * i] = along_x * A(level.width);
        partial[2 * i + 1] = along_y * A(level.height);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * count; i += kBlock) {
        const int item = i / 2, axis = i & 1;
        A sum = A(0);
        for (int scale = 0; scale < scales; ++scale) sum += partial[2 * (item * scales + scale) + axis];
        static_cast<A*>(b.grad_locations)[2 * (anchor * pairs + items[item].pair) + axis] = sum;
    }
}

template <typename T, int V>
__global__ __launch_bounds__(kBlock) void backward_kernel(DeformableBackward b, Plan plan) {
    using A = accumulate_t<T>;
    extern __shared__ __align__(16) char memory[];
    Shared<A> s;
    const DeformableForward& p = b.forward;
    carve(s, memory, plan, p.shape, V, true);
    const int64_t anchor = blockIdx.x;
    const int tid = threadIdx.x, pairs = p.shape.points * p.shape.cameras, per_pair = p.shape.scales * p.shape.groups;
    const A* locations = static_cast<const A*>(p.locations) + 2 * anchor * pairs;
    A* grad_locations = static_cast<A*>(b.grad_locations) + 2 * anchor * pairs;
    T* grad_weights = static_cast<T*>(b.grad_weights) + anchor * pairs * per_pair;

    read_levels(p, s);
    for (int first_pair = 0; first_pair < pairs; first_pair += kBlock) {
        const int found = find_items(p, s, anchor, first_pair);
        const int here = min(kBlock, pairs - first_pair);
        for (int i = tid; i < here * per_pair; i += kBlock) {
            const int in_pair = plan.per_item.of(i), pair = first_pair + in_pair;
            if (pair_inside(locations[2 * pair], locations[2 * pair + 1])) continue;
            grad_weights[int64_t(first_pair) * per_pair + i] = narrow<T>(A(0));
            if (i == in_pair * per_pair) grad_locations[2 * pair] = grad_locations[2 * pair + 1] = A(0);
        }
        for (int first = 0; first < found; first += plan.max_items) {
            const int count = min(plan.max_items, found - first);
            const int rows = build_entries<T, true>(p, plan, s, anchor, first, count);
            visit_rows<T, V>(b, plan, s, anchor, rows);
            __syncthreads();
            // the coefficients are spent; their place takes the partial sums over scales
            finish_samples<T>(b, plan, s, anchor, first, count, s.coefficient);
            __syncthreads();
        }
    }
}

template <typename T, int V>
int launch(const DeformableBackward& b, hipStream_t stream) {
    const auto& shape = b.forward.shape;
    const Plan plan = plan_for(shape, V, sizeof(accumulate_t<T>), true);
    backward_kernel<T, V><<<unsigned(shape.batch) * shape.anchors, kBlock, plan.shared_bytes, stream>>>(b, plan);
    return int(hipGetLastError());
}

// Four float32 sums are what one reduction takes, so the half types are read by 8 bytes and not by 16.
template <typename T>
int launch_widest(const DeformableBackward& b, hipStream_t stream) {
    constexpr int kWide = sizeof(T) == 8 ? 2 : 4;
    const auto& shape = b.forward.shape;
    return (shape.embed / shape.groups) % kWide == 0 ? launch<T, kWide>(b, stream) : launch<T, 1>(b, stream);
}

}  // namespace

int deformable_aggregation_backward(const DeformableBackward& b, Stream stream) {
    if (b.forward.shape.batch * b.forward.shape.anchors == 0) return 0;
    switch (b.forward.dtype) {
        case DType::kFloat32: return launch_widest<float>(b, native(stream));
        case DType::kFloat16: return launch_widest<Half>(b, native(stream));
        case DType::kBFloat16: return launch_widest<BFloat16>(b, native(stream));
        case DType::kFloat64: return launch_widest<double>(b, native(stream));
    }
    return int(hipErrorInvalidValue);
}

}  // namespace hip_kernels::gpu
