// Deformable aggregation, forward: one block per anchor, no atomics. See deformable_common.h.
#include <algorithm>

#include "deformable_common.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kUnroll = 4;  // rows in flight per lane before the first is used

template <typename T, int V>
__global__ __launch_bounds__(kBlock) void forward_kernel(DeformableForward p, Plan plan) {
    using A = accumulate_t<T>;
    extern __shared__ __align__(16) char memory[];
    Shared<A> s;
    carve(s, memory, plan, p.shape, V, false);
    const int64_t anchor = blockIdx.x;
    const int tid = threadIdx.x, lane = tid & (plan.lanes - 1), team = tid / plan.lanes, teams = kBlock / plan.lanes;
    const int groups = p.shape.groups, embed = p.shape.embed, pairs = p.shape.points * p.shape.cameras;
    const int channel = (int(blockIdx.y) * plan.lanes + lane) * V;
    const bool active = channel < embed;
    const int group = active ? channel / (embed / groups) : 0;
    const T* features = static_cast<const T*>(p.features) + (anchor / p.shape.anchors) * p.shape.rows * embed + channel;
    const A* locations = static_cast<const A*>(p.locations) + 2 * anchor * pairs;
    A sum[V] = {};

    for (int first_pair = 0; first_pair < pairs; first_pair += kBlock) {
        const int pair = first_pair + tid;
        const bool inside = pair < pairs && pair_inside(locations, pair);
        int found;
        const int rank = block_rank(inside, s.wave_sums, found);
        if (inside) s.items[rank] = pair;
        __syncthreads();
        for (int first = 0; first < found; first += plan.max_items) {
            const int rows = build_entries<T, false>(p, s, anchor, first, min(plan.max_items, found - first));
            if (active) {
                int i = team;
                for (; i + (kUnroll - 1) * teams < rows; i += kUnroll * teams) {
                    Pack<T, V> value[kUnroll];
                    A factor[kUnroll];
#pragma unroll
                    for (int u = 0; u < kUnroll; ++u) {
                        value[u] = load<T, V>(features + s.row[i + u * teams] * embed);
                        factor[u] = s.coefficient[(i + u * teams) * groups + group];
                    }
#pragma unroll
                    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
                        for (int v = 0; v < V; ++v) sum[v] += factor[u] * widen(value[u].at[v]);
                    }
                }
                for (; i < rows; i += teams) {
                    const Pack<T, V> value = load<T, V>(features + s.row[i] * embed);
                    const A factor = s.coefficient[i * groups + group];
#pragma unroll
                    for (int v = 0; v < V; ++v) sum[v] += factor * widen(value.at[v]);
                }
            }
            __syncthreads();
        }
    }

    Pack<A, V>* sums = reinterpret_cast<Pack<A, V>*>(s.coefficient);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[tid].at[v] = sum[v];
    __syncthreads();
    if (team == 0 && active) {
        for (int other = 1; other < teams; ++other) {
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v] += sums[other * plan.lanes + lane].at[v];
        }
        Pack<T, V> out;
#pragma unroll
        for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(sum[v]);
        store<T, V>(static_cast<T*>(p.output) + anchor * embed + channel, out);
    }
}

template <typename T, int V>
int launch(const DeformableForward& p, hipStream_t stream) {
    const Plan plan = plan_for(p.shape, V, sizeof(accumulate_t<T>), false);
    const dim3 grid(unsigned(p.shape.batch) * p.shape.anchors, unsigned(plan.tiles));
    forward_kernel<T, V><<<grid, kBlock, plan.shared_bytes, stream>>>(p, plan);
    return int(hipGetLastError());
}

// The widest pack that divides a group, so that a pack never straddles two groups.
template <typename T>
int launch_widest(const DeformableForward& p, hipStream_t stream) {
    constexpr int kWide = 16 / sizeof(T);
    return (p.shape.embed / p.shape.groups) % kWide == 0 ? launch<T, kWide>(p, stream) : launch<T, 1>(p, stream);
}

}  // namespace

const char* error_string(int error) { return hipGetErrorString(hipError_t(error)); }

Plan plan_for(const DeformableShape& shape, int pack, int accumulate_bytes, bool backward) {
    Plan plan{};
    // 16 KiB of coefficients at most keep several blocks on a compute unit of 64 KiB
    const int budget = int(16384 / accumulate_bytes / shape.groups);
    const int per_item = shape.scales * 4;
    plan.max_items = std::max(1, std::min(kBlock, budget) / per_item);
    plan.max_entries = plan.max_items * per_item;
    const int packs = shape.embed / pack;
    for (plan.lanes = 1; plan.lanes < packs && plan.lanes < kBlock;) plan.lanes *= 2;
    plan.tiles = (packs + plan.lanes - 1) / plan.lanes;
    const int group_packs = packs / shape.groups;
    for (plan.merge_lanes = 1; plan.merge_lanes < 32 && group_packs % (2 * plan.merge_lanes) == 0;) plan.merge_lanes *= 2;
    plan.merge_lanes = std::min(plan.merge_lanes, plan.lanes);
    if (accumulate_bytes == 8) {
        Shared<double> s;
        plan.shared_bytes = carve(s, nullptr, plan, shape, pack, backward);
    } else {
        Shared<float> s;
        plan.shared_bytes = carve(s, nullptr, plan, shape, pack, backward);
    }
    return plan;
}

int deformable_aggregation_forward(const DeformableForward& p, Stream stream) {
    if (p.shape.batch * p.shape.anchors == 0 || p.shape.embed == 0) return 0;
    switch (p.dtype) {
        case DType::kFloat32: return launch_widest<float>(p, native(stream));
        case DType::kFloat16: return launch_widest<Half>(p, native(stream));
        case DType::kBFloat16: return launch_widest<BFloat16>(p, native(stream));
        case DType::kFloat64: return launch_widest<double>(p, native(stream));
    }
    return int(hipErrorInvalidValue);
}

}  // namespace hip_kernels::gpu
