// Deformable aggregation, forward: one block per anchor, no atomics. See deformable_common.h.
#include <algorithm>

#include "deformable_common.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kUnroll = 4;  // rows in flight per lane before the first is used, as many as one int4 names

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
    A sum[V] = {};

    read_levels(p, s);
    for (int first_pair = 0; first_pair < pairs; first_pair += kBlock) {
        const int found = find_items(p, s, anchor, first_pair);
        for (int first = 0; first < found; first += plan.max_items) {
            const int rows = build_entries<T, false>(p, plan, s, anchor, first, min(plan.max_items, found - first));
            if (active) {
                const A* coefficient = s.coefficient + group;
                int i = team * kUnroll;
                for (; i + kUnroll <= rows; i += teams * kUnroll) {
                    const int4 row = *reinterpret_cast<const int4*>(s.row + i);
                    const Pack<T, V> value[kUnroll] = {load<T, V>(features + row.x), load<T, V>(features + row.y),
                                                       load<T, V>(features + row.z), load<T, V>(features + row.w)};
#pragma unroll
                    for (int u = 0; u < kUnroll; ++u) {
                        const A factor = coefficient[(i + u) * groups];
#pragma unroll
                        for (int v = 0; v < V; ++v) sum[v] += factor * widen(value[u].at[v]);
                    }
                }
                for (; i < rows; ++i) {  // one team has the rest
                    const Pack<T, V> value = load<T, V>(features + s.row[i]);
                    const A factor = coefficient[i * groups];
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

static Divisor divisor(int by) {
    Divisor d{0, 0};
    while ((int64_t(1) << d.shift) < by) ++d.shift;
    d.multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << d.shift) - uint64_t(by))) / uint64_t(by) + 1);
    return d;
}

Plan plan_for(const DeformableShape& shape, int pack, int accumulate_bytes, bool backward) {
    Plan plan{};
    // 8 KiB of coefficients at most let several blocks share a compute unit of 64 KiB
    const int budget = std::min(kBlock, 8192 / accumulate_bytes / shape.groups);
    plan.max_items = 1;
    while (plan.max_items * 2 * shape.scales * 4 <= budget) plan.max_items *= 2;
    while ((1 << plan.segment_shift) < 4 * plan.max_items) ++plan.segment_shift;
    plan.max_entries = 4 * plan.max_items * shape.scales;
    const int packs = shape.embed / pack;
    for (plan.lanes = 1; plan.lanes < packs && plan.lanes < kBlock;) plan.lanes *= 2;
    plan.tiles = (packs + plan.lanes - 1) / plan.lanes;
    const int group_packs = packs / shape.groups;
    for (plan.merge_lanes = 1; plan.merge_lanes < 32 && group_packs % (2 * plan.merge_lanes) == 0;) plan.merge_lanes *= 2;
    plan.merge_lanes = std::min(plan.merge_lanes, plan.lanes);
    plan.per_item = divisor(shape.scales * shape.groups);
    plan.per_row = divisor(shape.groups % 4 == 0 ? shape.groups / 4 : shape.groups);
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
