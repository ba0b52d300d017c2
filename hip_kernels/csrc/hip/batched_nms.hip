// Non-maximum suppression of a batch: one sort of all candidates, then one block per image.
//
// The block goes through its candidates in tiles of one per thread, by falling score. A tile is first tested against the
// boxes kept so far. Then its waves take turns: a wave settles its own candidates (a box that is still standing is kept and
// strikes out later ones), and the waves after it test against what it kept. The block stops at the first empty tile or when
// it has kept enough, so its cost follows the boxes kept, not the square of the candidates.
#include "primitives.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kTile = 512;

struct Arrays {
    uint64_t *keys, *sorted_keys;
    uint32_t *index, *sorted_index;
    void* library;
    size_t library_bytes;
};

// Rises as the score falls; places without a candidate come last.
__device__ inline uint32_t falling(float score) {
    if (!(score > -INFINITY)) return 0xffffffffu;  // NaN too
    const float positive_zero = score == 0.f ? 0.f : score;
    uint32_t bits;
    memcpy(&bits, &positive_zero, 4);
    const uint32_t rising = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return ~rising;
}

__global__ __launch_bounds__(kBlock) void key_kernel(const float* scores, int count, int candidates, uint64_t* keys, uint32_t* index) {
    const int i = blockIdx.x * kBlock + threadIdx.x;
    if (i >= count) return;
    const int image = i / candidates;
    keys[i] = (uint64_t(image) << 32) | falling(scores[i]);
    index[i] = uint32_t(i - image * candidates);
}

struct Box {
    float x1, y1, x2, y2;
    int64_t label;
};

__device__ inline bool strikes(const Box& better, const Box& box, float threshold) {
    if (better.label != box.label) return false;
    const float width = fmaxf(0.f, sub_exact(fminf(better.x2, box.x2), fmaxf(better.x1, box.x1)));
    const float height = fmaxf(0.f, sub_exact(fminf(better.y2, box.y2), fmaxf(better.y1, box.y1)));
    const float both = mul_exact(width, height);
    const float area_a = mul_exact(sub_exact(better.x2, better.x1), sub_exact(better.y2, better.y1));
    const float area_b = mul_exact(sub_exact(box.x2, box.x1), sub_exact(box.y2, box.y1));
    return both / sub_exact(add_exact(area_a, area_b), both) > threshold;
}

__device__ inline Box box_of_lane(const Box& box, int lane) {
    return {from_lane(box.x1, lane), from_lane(box.y1, lane), from_lane(box.x2, lane), from_lane(box.y2, lane),
            from_lane(static_cast<long long>(box.label), lane)};
}

__device__ inline bool struck_by(const Box* kept, int from, int to, const Box& box, float threshold) {
    for (int i = from; i < to; ++i) {
        if (strikes(kept[i], box, threshold)) return true;
    }
    return false;
}

__global__ __launch_bounds__(kTile) void select_kernel(BatchedNms p, const uint64_t* sorted_keys, const uint32_t* sorted_index) {
    extern __shared__ __align__(16) char memory[];
    Box* kept = reinterpret_cast<Box*>(memory);
    __shared__ int kept_count;
    const int64_t image = blockIdx.x, first = image * p.candidates;
    const int tid = threadIdx.x, most = int(p.max_detections), candidates = int(p.candidates);
    if (tid == 0) kept_count = 0;
    __syncthreads();
    for (int tile = 0; tile < candidates; tile += kTile) {
        const int at = tile + tid;
        bool standing = at < candidates && uint32_t(sorted_keys[first + at]) != 0xffffffffu;
        uint32_t candidate = 0;
        Box box = {0.f, 0.f, 0.f, 0.f, -1};
        if (standing) {
            candidate = sorted_index[first + at];
            const Pack<float, 4> corners = load<float, 4>(p.boxes + (first + candidate) * 4);
            box = {corners.at[0], corners.at[1], corners.at[2], corners.at[3], p.classes[first + candidate]};
        }
        if (__syncthreads_or(standing) == 0) break;
        int tested = kept_count;
        standing = standing && !struck_by(kept, 0, tested, box, p.iou_threshold);
        for (int turn = 0; turn < kTile / warpSize; ++turn) {
            if (wave_index() == turn) {
                int count = kept_count;
                uint64_t mask = wave_ballot(standing);
                while (mask != 0 && count < most) {
                    const int lane = first_bit(mask);
                    const Box best = box_of_lane(box, lane);
                    if (wave_lane() == lane) {
                        kept[count] = box;
                        p.kept[image * most + count] = int64_t(candidate);
                        standing = false;
                    }
                    ++count;
                    if (standing && strikes(best, box, p.iou_threshold)) standing = false;
                    mask = wave_ballot(standing);
                }
                if (wave_lane() == 0) kept_count = count;
            }
            __syncthreads();
            const int now = kept_count;
            if (wave_index() > turn) standing = standing && !struck_by(kept, tested, now, box, p.iou_threshold);
            tested = now;
        }
        if (tested == most) break;
        __syncthreads();
    }
    __syncthreads();
    for (int i = kept_count + tid; i < most; i += kTile) p.kept[image * most + i] = -1;
    if (tid == 0) p.kept_count[image] = kept_count;
}

int key_bits(const BatchedNms& p) { return 32 + bits_for(uint64_t(p.batch)); }

int arrange(const BatchedNms& p, void* workspace, Arrays& a, size_t& total) {
    const size_t count = size_t(p.batch * p.candidates);
    size_t bytes = 0;
    if (const int e = sort_pairs<uint64_t>(nullptr, bytes, nullptr, nullptr, nullptr, nullptr, int(count), key_bits(p), nullptr)) return e;
    Workspace space(workspace);
    a.keys = space.take<uint64_t>(count);
    a.sorted_keys = space.take<uint64_t>(count);
    a.index = space.take<uint32_t>(count);
    a.sorted_index = space.take<uint32_t>(count);
    a.library_bytes = bytes;
    a.library = space.take<char>(bytes);
    total = space.used();
    return 0;
}

}  // namespace

int batched_nms_workspace_bytes(const BatchedNms& p, size_t* bytes) {
    Arrays arrays;
    return arrange(p, nullptr, arrays, *bytes);
}

int batched_nms(const BatchedNms& p, void* workspace, size_t, Stream stream_pointer) {
    if (p.batch == 0) return 0;
    const hipStream_t stream = native(stream_pointer);
    const int count = int(p.batch * p.candidates);
    Arrays a;
    size_t total = 0;
    if (const int e = arrange(p, workspace, a, total)) return e;
    if (count > 0) {
        key_kernel<<<blocks_for(count), kBlock, 0, stream>>>(p.scores, count, int(p.candidates), a.keys, a.index);
        size_t bytes = a.library_bytes;
        if (const int e = sort_pairs(a.library, bytes, a.keys, a.sorted_keys, a.index, a.sorted_index, count, key_bits(p), stream)) {
            return e;
        }
    }
    const size_t shared = size_t(p.max_detections) * sizeof(Box);
    select_kernel<<<unsigned(p.batch), kTile, shared, stream>>>(p, a.sorted_keys, a.sorted_index);
    return int(hipGetLastError());
}

}  // namespace hip_kernels::gpu
