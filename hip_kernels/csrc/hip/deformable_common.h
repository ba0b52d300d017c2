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

// A chunk is the samples treated at once: `max_items` (point, camera) pairs of S scales and four corners each, one thread
// per corner.
struct Plan {
    int max_items;    // pairs of a chunk
    int max_entries;  // max_items * S * 4, at most kBlock
    int lanes;        // lanes that share a row, a power of two up to kBlock
    int tiles;        // how often those lanes go over a row
    int merge_lanes;  // neighbouring lanes of one group, a power of two up to 32
    size_t shared_bytes;
};

template <typename A>
struct Shared {
    int* items;      // [kBlock] pairs inside their image
    int* key;        // [max_entries] row, or -1 for padding
    int* next;       // [max_entries] next corner on the same row, or -1
    int* slot;       // [max_entries] place in `row`, -1 for padding
    int* row;        // [max_entries] distinct rows
    int* wave_sums;  // [kBlock / 32]
    A* corner;       // [max_entries] bilinear weight
    A* weight;       // [max_items * S * G]
    A* coefficient;  // [max_entries * G]; the forward's final sum reuses its place
    A* dot;          // [max_entries * G], backward only
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
    take(s.items, kBlock);
    take(s.key, plan.max_entries);
    take(s.next, plan.max_entries);
    take(s.slot, plan.max_entries);
    take(s.row, plan.max_entries);
    take(s.wave_sums, kBlock / 32);
    take(s.corner, plan.max_entries);
    take(s.weight, size_t(plan.max_items) * shape.scales * shape.groups);
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
    int x0, y0, width, height;
    A fx, fy;
};

template <typename A, typename Params>
__device__ inline Sample<A> sample_of(const Params& p, int64_t location, int level) {
    const A* locations = static_cast<const A*>(p.locations) + 2 * location;
    Sample<A> s;
    s.height = p.spatial_shapes[2 * level];
    s.width = p.spatial_shapes[2 * level + 1];
    const A px = locations[0] * A(s.width) - A(0.5), py = locations[1] * A(s.height) - A(0.5);
    const A bx = floor(px), by = floor(py);
    s.x0 = int(bx);
    s.y0 = int(by);
    s.fx = px - bx;
    s.fy = py - by;
    return s;
}

template <typename A>
__device__ inline bool pair_inside(const A* locations, int64_t pair) {
    const A x = locations[2 * pair], y = locations[2 * pair + 1];
    return x > A(0) && x < A(1) && y > A(0) && y < A(1);  // false for NaN
}

// Fills key, corner, next, row, coefficient (and, for the backward, slot) for `count` items from `first_item` on.
// Returns the number of distinct rows. Corners are laid out [scale][item][corner], so that those which can share a row are
// neighbours: only corners of one scale (and camera) can.
template <typename T, bool kKeepSlots>
__device__ inline int build_entries(const DeformableForward& p, const Shared<accumulate_t<T>>& s, int64_t anchor, int first_item,
                                    int count) {
    using A = accumulate_t<T>;
    const int scales = p.shape.scales, groups = p.shape.groups, cameras = p.shape.cameras;
    const int64_t pairs = p.shape.points * cameras;
    const int segment = count * 4, entries = segment * scales, tid = threadIdx.x;
    const int per_item = scales * groups;
    const T* weights = static_cast<const T*>(p.weights) + anchor * pairs * per_item;
    for (int i = tid; i < count * per_item; i += kBlock) {
        const int item = i / per_item;
        s.weight[i] = widen(weights[int64_t(s.items[first_item + item]) * per_item + (i - item * per_item)]);
    }
    int key = -1;
    const int scale = tid / max(segment, 1);
    if (tid < entries) {
        const int pair = s.items[first_item + (tid - scale * segment) / 4];
        const int level = (pair % cameras) * scales + scale;
        const Sample<A> at = sample_of<A>(p, anchor * pairs + pair, level);
        const int dx = tid & 1, dy = (tid >> 1) & 1;
        const int x = at.x0 + dx, y = at.y0 + dy;
        const int64_t row = p.scale_start[level] + int64_t(y) * at.width + x;
        if (x >= 0 && x < at.width && y >= 0 && y < at.height && row >= 0 && row < p.shape.rows) key = int(row);
        s.key[tid] = key;
        s.next[tid] = -1;
        s.corner[tid] = (dx ? at.fx : A(1) - at.fx) * (dy ? at.fy : A(1) - at.fy);
    }
    __syncthreads();
    int previous = -1;
    if (key >= 0) {
        for (int i = scale * segment; i < tid; i += 4) {
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
    const int slot = block_rank(leads, s.wave_sums, distinct);
    if (tid < entries) s.slot[tid] = leads ? slot : -1;
    if (leads) s.row[slot] = tid;  // for the moment, the corner that leads the chain
    __syncthreads();
    for (int i = tid; i < distinct * groups; i += kBlock) {
        const int place = i / groups, group = i - place * groups;
        A sum = A(0);
        for (int corner = s.row[place]; corner >= 0; corner = s.next[corner]) {
            const int of_scale = corner / segment, item = (corner - of_scale * segment) / 4;
            sum += s.corner[corner] * s.weight[(item * scales + of_scale) * groups + group];
            if (kKeepSlots && group == 0) s.slot[corner] = place;
        }
        s.coefficient[i] = sum;
        if (kKeepSlots) s.dot[i] = A(0);
    }
    __syncthreads();
    if (tid < distinct) s.row[tid] = s.key[s.row[tid]];
    __syncthreads();
    return distinct;
}

Plan plan_for(const DeformableShape& shape, int pack, int accumulate_bytes, bool backward);

}  // namespace hip_kernels::gpu
