// What the forward and the backward kernel of deformable aggregation share.
//
// One block serves one anchor. Its output is a sum over samples and their four corners,
//     out[e] = sum over corners k of weight[k, group(e)] * features[row[k], e],
// so corners that fall on the same row can be merged before any feature is read: `build_entries` makes the list of distinct
// rows with one summed coefficient per group. Points of an anchor lie close together, and at coarse scales most corners
// merge. The gradient uses the same list: all its parts follow from dot[row, group] = sum of grad * feature over the group,
// and a row receives coefficient * grad by one reduction per element, instead of one per sample and corner.
//
// Everything is in a fixed order, so equal inputs give equal bits in the forward pass.
#pragma once

#include "platform.h"

namespace hip_kernels::gpu {

// Division of n < 2^31 by a number that only the host knows, in three instructions.
struct Divisor {
    uint32_t multiplier, shift;
    __device__ int of(int n) const { return int((__umulhi(uint32_t(n), multiplier) + uint32_t(n)) >> shift); }
};

// A chunk is the samples treated at once: up to `max_items` (point, camera) pairs of S scales and four corners each, one
// thread per corner. Corners lie at scale * segment + item * 4 + corner, where segment = 4 * max_items is a power of two.
struct Plan {
    int max_items;      // pairs of a chunk, a power of two
    int segment_shift;  // log2(segment)
    int max_entries;    // segment * S, at most kBlock
    int lanes;          // lanes that share a row, a power of two up to kBlock
    int tiles;          // how often those lanes go over a row
    int merge_lanes;    // neighbouring lanes of one group, a power of two up to 32
    Divisor per_item;   // by S * G
    Divisor per_row;    // by G, or by G / 4 where four groups are treated at once
    size_t shared_bytes;
};

template <typename A>
struct Item {
    A x, y;
    int pair, level;  // level: the camera's first map
};

struct Level {
    int start, height, width;
};

template <typename A>
struct Shared {
    Item<A>* items;   // [min(kBlock, P * C)] pairs inside their image
    Level* levels;    // [C * S]
    int* key;         // [max_entries] row, or -1 for padding
    int* next;        // [max_entries] next corner on the same row, or -1
    int* slot;        // [max_entries] place among the distinct rows, -1 for padding; backward only
    int* row;         // [max_entries] distinct rows, as offset of their first element
    int* wave_sums;   // [kBlock / 32]
    A* corner;        // [max_entries] bilinear weight
    A* weight;        // [max_items * S * G]
    A* coefficient;   // [max_entries * G]; the forward's final sum reuses its place
    A* dot;           // [max_entries * G], backward only
};

template <typename A>
__host__ __device__ inline size_t carve(Shared<A>& s, char* base, const Plan& plan, const DeformableShape& shape, int pack,
                                        bool backward) {
    size_t used = 0;
    const auto take = [&](auto*& pointer, size_t count) {
        using Element = std::remove_reference_t<decltype(*pointer)>;
        pointer = reinterpret_cast<Element*>(base + used);
        used += (count * sizeof(Element) + 15) / 16 * 16;
    };
    const int pairs = shape.points * shape.cameras;
    take(s.items, pairs < kBlock ? pairs : kBlock);
    take(s.levels, shape.cameras * shape.scales);
    take(s.key, plan.max_entries);
    take(s.next, plan.max_entries);
    if (backward) take(s.slot, plan.max_entries);
    take(s.row, plan.max_entries);
    take(s.wave_sums, kBlock / 32);
    take(s.corner, plan.max_entries);
    take(s.weight, plan.max_items * shape.scales * shape.groups);
    const size_t coefficients = size_t(plan.max_entries) * shape.groups;
    const size_t sums = backward ? 0 : size_t(kBlock) * pack;
    take(s.coefficient, coefficients > sums ? coefficients : sums);
    if (backward) take(s.dot, coefficients);
    return used;
}

// Place of this thread's `flag` among the block's raised flags, and their number. Two barriers.
__device__ inline int block_rank(bool flag, int* wave_sums, int& total) {
    const uint64_t mask = wave_ballot(flag);
    const uint64_t below = (uint64_t(1) << wave_lane()) - 1;
    if (wave_lane() == 0) wave_sums[wave_index()] = count_bits(mask);
    __syncthreads();
    int rank = count_bits(mask & below);
    total = 0;
    for (int wave = 0; wave < kBlock / warpSize; ++wave) {
        const int sum = wave_sums[wave];
        if (wave < wave_index()) rank += sum;
        total += sum;
    }
    __syncthreads();
    return rank;
}

// One sampled location on one map: its upper left pixel and the fractions.
template <typename A>
struct Sample {
    int x0, y0;
    A fx, fy;
};

template <typename A>
__device__ inline Sample<A> sample_of(const Item<A>& item, const Level& level) {
    const A x = item.x * A(level.width) - A(0.5), y = item.y * A(level.height) - A(0.5);
    const A left = floor(x), top = floor(y);
    return {int(left), int(top), x - left, y - top};
}

template <typename A>
__device__ inline bool pair_inside(A x, A y) {
    return x > A(0) && x < A(1) && y > A(0) && y < A(1);  // false for NaN
}

// Copies the table of maps; a barrier of the caller's stands between this and its use.
template <typename A>
__device__ inline void read_levels(const DeformableForward& p, const Shared<A>& s) {
    for (int i = threadIdx.x; i < p.shape.cameras * p.shape.scales; i += kBlock) {
        s.levels[i] = {p.scale_start[i], p.spatial_shapes[2 * i], p.spatial_shapes[2 * i + 1]};
    }
}

// Lists the pairs of [first_pair, first_pair + kBlock) whose location is inside; returns their number. Ends with a barrier.
template <typename A>
__device__ inline int find_items(const DeformableForward& p, const Shared<A>& s, int64_t anchor, int first_pair) {
    const int pairs = p.shape.points * p.shape.cameras, pair = first_pair + threadIdx.x;
    Item<A> item = {A(0), A(0), pair, 0};
    if (pair < pairs) {
        const Pack<A, 2> at = load<A, 2>(static_cast<const A*>(p.locations) + 2 * (anchor * pairs + pair));
        item.x = at.at[0];
        item.y = at.at[1];
        item.level = pair % p.shape.cameras * p.shape.scales;
    }
    int found;
    const bool inside = pair < pairs && pair_inside(item.x, item.y);
    const int rank = block_rank(inside, s.wave_sums, found);
    if (inside) s.items[rank] = item;
    __syncthreads();
    return found;
}

// The sums of `kPack` groups' weights over the corners of each distinct row.
template <bool kKeepSlots, int kPack, typename A>
__device__ inline void sum_coefficients(const Shared<A>& s, const Plan& plan, int distinct, int scales, int groups) {
    const int parts = groups / kPack;
    for (int i = threadIdx.x; i < distinct * parts; i += kBlock) {
        const int place = plan.per_row.of(i), part = i - place * parts;
        Pack<A, kPack> sum = {}, zero = {};
        for (int corner = s.row[place]; corner >= 0; corner = s.next[corner]) {
            const int scale = corner >> plan.segment_shift, item = (corner & (4 * plan.max_items - 1)) >> 2;
            const Pack<A, kPack> weight = load<A, kPack>(s.weight + (item * scales + scale) * groups + part * kPack);
            const A factor = s.corner[corner];
#pragma unroll
            for (int g = 0; g < kPack; ++g) sum.at[g] += factor * weight.at[g];
            if (kKeepSlots && part == 0) s.slot[corner] = place;
        }
        store<A, kPack>(s.coefficient + i * kPack, sum);
        if (kKeepSlots) store<A, kPack>(s.dot + i * kPack, zero);
    }
}

// Fills row and coefficient (for the backward also slot and, with zeros, dot) for `count` items from `first_item` on.
// Returns the number of distinct rows. Only corners of one scale can share a row, and they are neighbours.
template <typename T, bool kKeepSlots>
__device__ inline int build_entries(const DeformableForward& p, const Plan& plan, const Shared<accumulate_t<T>>& s,
                                    int64_t anchor, int first_item, int count) {
    using A = accumulate_t<T>;
    const int scales = p.shape.scales, groups = p.shape.groups, tid = threadIdx.x, per_item = scales * groups;
    const Item<A>* items = s.items + first_item;
    const T* weights = static_cast<const T*>(p.weights) + anchor * p.shape.points * p.shape.cameras * per_item;
    for (int i = tid; i < count * per_item; i += kBlock) {
        const int item = plan.per_item.of(i);
        s.weight[i] = widen(weights[int64_t(items[item].pair) * per_item + (i - item * per_item)]);
    }
    const int scale = tid >> plan.segment_shift, segment_start = scale << plan.segment_shift;
    const int item = (tid - segment_start) >> 2;
    const bool exists = scale < scales && item < count;
    int key = -1;
    if (exists) {
        const Level level = s.levels[items[item].level + scale];
        const Sample<A> at = sample_of<A>(items[item], level);
        const int dx = tid & 1, dy = (tid >> 1) & 1, x = at.x0 + dx, y = at.y0 + dy;
        const int64_t row = level.start + int64_t(y) * level.width + x;
        if (x >= 0 && x < level.width && y >= 0 && y < level.height && row >= 0 && row < p.shape.rows) key = int(row);
        s.key[tid] = key;
        s.next[tid] = -1;
        if (kKeepSlots) s.slot[tid] = -1;
        s.corner[tid] = (dx ? at.fx : A(1) - at.fx) * (dy ? at.fy : A(1) - at.fy);
    }
    __syncthreads();
    int previous = -1;
    if (key >= 0) {
        for (int i = segment_start; i < tid; i += 4) {
            const int4 keys = *reinterpret_cast<const int4*>(s.key + i);
            if (keys.x == key) previous = i;
            if (keys.y == key && i + 1 < tid) previous = i + 1;
            if (keys.z == key && i + 2 < tid) previous = i + 2;
            if (keys.w == key && i + 3 < tid) previous = i + 3;
        }
        if (previous >= 0) s.next[previous] = tid;
    }
    int distinct;
    const bool leads = key >= 0 && previous < 0;
    const int place = block_rank(leads, s.wave_sums, distinct);
    if (leads) s.row[place] = tid;  // for the moment, the corner that leads the chain
    __syncthreads();
    if (groups % 4 == 0) {
        sum_coefficients<kKeepSlots, 4>(s, plan, distinct, scales, groups);
    } else {
        sum_coefficients<kKeepSlots, 1>(s, plan, distinct, scales, groups);
    }
    __syncthreads();
    if (leads) s.row[place] = key * p.shape.embed;
    __syncthreads();
    return distinct;
}

Plan plan_for(const DeformableShape& shape, int pack, int accumulate_bytes, bool backward);

}  // namespace hip_kernels::gpu
