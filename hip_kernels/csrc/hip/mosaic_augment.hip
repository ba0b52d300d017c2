// The fused augmentation: every output pixel is computed once, from the source pixels it needs and nothing else.
//
// A thread makes kPixels neighbours of a row. Where their taps all lie inside one tile, which is looked up once for the
// group, nothing but arithmetic is left per pixel; where they all lie outside, nothing at all; the few groups on an edge
// are done by the whole wave, one lane per tap. Two neighbouring source pixels are six bytes and are read as one window, not
// as six loads.
#include "../mosaic.h"
#include "platform.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kPixels = 4;
constexpr int kRuns = 32;  // groups of a row in a block
constexpr int kRows = 4;
constexpr int kThreads = kRuns * kRows;

// A row of source pixels by a canvas column, given as the bits of `split`: six bytes from the pixel on, in eight.
#if defined(__CUDACC__)
constexpr uint32_t kSplitBits = 0x4b400000u;

// NVIDIA has aligned loads only: three words, shifted into two. What does not depend on the column is done once a row.
struct Row {
    const uint8_t* aligned;
    uint32_t first;  // offset of canvas column 0, less what the bits of `split` have too much
    __device__ explicit Row(const uint8_t* at)
        : aligned(reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t(3))),
          first(uint32_t(reinterpret_cast<uintptr_t>(at) & 3u) - 3u * kSplitBits) {}
    __device__ uint2 window(uint32_t column) const {
        const uint32_t offset = column * 3u + first, shift = offset * 8u;  // the shift counts modulo 32
        const uint32_t* words = reinterpret_cast<const uint32_t*>(aligned + (offset & ~3u));
        const uint32_t low = __ldg(words), middle = __ldg(words + 1), high = __ldg(words + 2);
        return make_uint2(__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift));
    }
};
#else
constexpr uint32_t kSplitBits = 0;

struct Row {
    const uint8_t* at;
    __device__ explicit Row(const uint8_t* first) : at(first) {}
    __device__ uint2 window(uint32_t column) const {
        uint2 bytes;
        __builtin_memcpy(&bytes, at + column * 3u, 8);
        return bytes;
    }
};
#endif

// A byte as a float that is kBias too high. On NVIDIA it is put into the mantissa of 2^15, one instruction in place of three;
// sums of such floats are exact to 2^-9 of a grey level, and differences do not see the bias.
#if defined(__CUDACC__)
constexpr float kBias = 32768.f;
template <int k>
__device__ inline float byte_of(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404u + (k << 4)));
}
#else
constexpr float kBias = 0.f;
template <int k>
__device__ inline float byte_of(uint32_t word) {
    return float((word >> (8 * k)) & 255u);
}
#endif

// Fractional part of x, |x| < 2^22, and its integer part (downwards) plus kSplitBits.
__device__ inline float split(float x, uint32_t& whole) {
#if defined(__CUDACC__)
    // rounding down while adding 1.5 * 2^23 leaves the integer in the low bits: three additions and no conversion
    const float shifted = __fadd_rd(x, 12582912.f);
    whole = __float_as_uint(shifted);
    return x - (shifted - 12582912.f);
#else
    const float down = floorf(x);
    whole = uint32_t(int(down));
    return x - down;
#endif
}

__device__ inline Colour mix(const Colour& a, const Colour& b, float part) {
    return {a.r + part * (b.r - a.r), a.g + part * (b.g - a.g), a.b + part * (b.b - a.b)};
}

// Two neighbours of a row, mixed.
__device__ inline Colour row_pair(const Row& row, uint32_t column, float part) {
    const uint2 w = row.window(column);
    return mix({byte_of<0>(w.x), byte_of<1>(w.x), byte_of<2>(w.x)}, {byte_of<3>(w.x), byte_of<0>(w.y), byte_of<1>(w.y)}, part);
}

// A tile with its bounds as floats; `bottom` leaves out the array's last row, whose windows would end behind the array.
struct Shown {
    float left, top, right, bottom;
    int64_t origin;
};

struct Layer {
    Shown shown[kTiles];
    Tile tiles[kTiles];
    float geometry[kGeometry];
};

__device__ inline int tile_at(const float* geometry, float x, float y) {
    return (x >= geometry[6] ? 1 : 0) + (y >= geometry[7] ? 2 : 0);
}

// One pixel of the canvas, 0 to 255.
__device__ inline Colour canvas_pixel(const MosaicAugment& p, const Layer& layer, int x, int y) {
    const Tile& t = layer.tiles[tile_at(layer.geometry, float(x), float(y))];
    if (x < t.left || x >= t.right || y < t.top || y >= t.bottom) return {p.fill, p.fill, p.fill};
    const uint8_t* at = p.source + t.origin + (int64_t(y) * p.image_width + x) * 3;
    return {float(at[0]), float(at[1]), float(at[2])};
}

// Taps of columns low_x to high_x and rows low_y to high_y: in which tile, and whether all of them show it.
// Comparisons are false for NaN, which then goes the slow way.
__device__ inline bool all_in_one(const Layer& layer, float low_x, float high_x, float low_y, float high_y, int& k) {
    k = tile_at(layer.geometry, low_x, low_y);
    const Shown& t = layer.shown[k];
    return low_x >= t.left && high_x < t.right && low_y >= t.top && high_y < t.bottom;
}

// A pair of rows of a tile, by canvas row, and the share of the lower one.
struct Rows {
    float share;
    Row upper, lower;
};

__device__ inline Rows rows_at(const uint8_t* origin, int line, float y) {
    uint32_t row;
    const float share = split(y, row);
    const uint8_t* at = origin + int64_t(row - kSplitBits) * line;
    return {share, Row(at), Row(at + line)};
}

__device__ inline Colour sample_rows(const Rows& rows, float x) {
    uint32_t column;
    const float share = split(x, column);
    return mix(row_pair(rows.upper, column, share), row_pair(rows.lower, column, share), rows.share);
}

// The groups that cross an edge, which the lanes of `slow` have: the wave does one after the other, one lane per tap, so that
// such a group costs its wave a fraction of what one lane alone would.
__device__ inline void sample_edges(const MosaicAugment& p, const Layer& layer, bool slow, float column, float row,
                                    Colour (&out)[kPixels]) {
    const float* g = layer.geometry;
    const int lane = wave_lane(), tap = lane & 3, pixel = (lane >> 2) & (kPixels - 1);
    for (uint64_t mask = wave_ballot(slow); mask != 0; mask &= mask - 1) {
        const int owner = first_bit(mask);
        const float at = from_lane(column, owner) + float(pixel), line = from_lane(row, owner);
        // the limits keep the conversion defined, for NaN too, and lie outside every tile
        const float x = fminf(fmaxf(g[0] * at + (g[1] * line + g[2]), -1e6f), 1e6f);
        const float y = fminf(fmaxf(g[3] * at + (g[4] * line + g[5]), -1e6f), 1e6f);
        const float low_x = floorf(x), low_y = floorf(y), fx = x - low_x, fy = y - low_y;
        const Colour c = canvas_pixel(p, layer, int(low_x) + (tap & 1), int(low_y) + (tap >> 1));
        const float share = (tap & 1 ? fx : 1.f - fx) * (tap >> 1 ? fy : 1.f - fy);
        const Colour sum = {sum_over_lanes(share * c.r, 4) + kBias, sum_over_lanes(share * c.g, 4) + kBias,
                            sum_over_lanes(share * c.b, 4) + kBias};
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
            const Colour whole = {from_lane(sum.r, 4 * i), from_lane(sum.g, 4 * i), from_lane(sum.b, 4 * i)};
            if (lane == owner) out[i] = whole;
        }
    }
}

// Makes kPixels samples of one layer, 0 to 255 and the bias, starting at (column, row). Every lane of the wave has to come.
__device__ inline void sample_group(const MosaicAugment& p, const Layer& layer, bool active, float column, float row,
                                    Colour (&out)[kPixels]) {
    const float* g = layer.geometry;
    const float step_x = g[0], step_y = g[3], base_x = g[1] * row + g[2], base_y = g[4] * row + g[5];
    const float first_x = step_x * column + base_x, last_x = step_x * (column + (kPixels - 1)) + base_x;
    const float first_y = step_y * column + base_y, last_y = step_y * (column + (kPixels - 1)) + base_y;
    const float low_x = floorf(fminf(first_x, last_x)), high_x = floorf(fmaxf(first_x, last_x)) + 1.f;
    const float low_y = floorf(fminf(first_y, last_y)), high_y = floorf(fmaxf(first_y, last_y)) + 1.f;
    int k;
    bool slow = false;
    if (all_in_one(layer, low_x, high_x, low_y, high_y, k)) {
        const int line = p.image_width * 3;
        const uint8_t* origin = p.source + layer.shown[k].origin;
        if (step_y == 0.f) {  // no turn, no shear: one pair of rows for the group, and for the whole sample
            const Rows rows = rows_at(origin, line, base_y);
#pragma unroll
            for (int i = 0; i < kPixels; ++i) out[i] = sample_rows(rows, step_x * (column + i) + base_x);
        } else {
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
                out[i] = sample_rows(rows_at(origin, line, step_y * (column + i) + base_y), step_x * (column + i) + base_x);
            }
        }
    } else {
        const float fill = p.fill + kBias;
#pragma unroll
        for (int i = 0; i < kPixels; ++i) out[i] = {fill, fill, fill};
        const Tile& t = layer.tiles[k];
        const bool outside = high_x < float(t.left) || low_x >= float(t.right) || high_y < float(t.top) || low_y >= float(t.bottom);
        slow = active && !(outside && k == tile_at(g, high_x, high_y));
    }
    sample_edges(p, layer, slow, column, row, out);
}

template <typename T, bool kChannelsLast, bool kWide>
__device__ inline void write(const MosaicAugment& p, int image, int row, int column, const Colour (&c)[kPixels]) {
    const int plane = p.height * p.width, pixel = row * p.width + column;
    T* out = static_cast<T*>(p.output) + int64_t(image) * plane * 3;
    if constexpr (kWide) {
        T values[3 * kPixels];
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
            const int at = kChannelsLast ? 3 * i : i, step = kChannelsLast ? 1 : kPixels;
            values[at] = narrow<T>(c[i].r);
            values[at + step] = narrow<T>(c[i].g);
            values[at + 2 * step] = narrow<T>(c[i].b);
        }
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            Pack<T, kPixels> pack;
#pragma unroll
            for (int v = 0; v < kPixels; ++v) pack.at[v] = values[part * kPixels + v];
            store<T, kPixels>(kChannelsLast ? out + 3 * pixel + part * kPixels : out + part * plane + pixel, pack);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
            if (column + i >= p.width) break;
            const int at = kChannelsLast ? 3 * (pixel + i) : pixel + i, step = kChannelsLast ? 1 : plane;
            out[at] = narrow<T>(c[i].r);
            out[at + step] = narrow<T>(c[i].g);
            out[at + 2 * step] = narrow<T>(c[i].b);
        }
    }
}

template <typename T, bool kChannelsLast, bool kWide>
__global__ HIP_KERNELS_BOUNDS(kThreads, 8, 5) void augment_kernel(MosaicAugment p) {
    __shared__ Layer layers[2];
    const int image = blockIdx.z, tid = threadIdx.y * kRuns + threadIdx.x;
    if (tid < p.layers * kTiles) {
        const int layer = tid / kTiles, k = tid - layer * kTiles;
        const int64_t at = int64_t(image) * p.layers + layer;
        const int32_t* entry = p.tiles + (at * kTiles + k) * 3;
        const Tile t = tile_of(p, entry, p.geometry + at * kGeometry, k);
        const int bottom = entry[0] == p.images - 1 ? smaller(t.bottom, entry[2] + p.image_height - 1) : t.bottom;
        layers[layer].tiles[k] = t;
        layers[layer].shown[k] = {float(t.left), float(t.top), float(t.right), float(bottom), t.origin};
    }
    if (tid < p.layers * kGeometry) {
        layers[tid / kGeometry].geometry[tid % kGeometry] = p.geometry[int64_t(image) * p.layers * kGeometry + tid];
    }
    __syncthreads();
    const int row = blockIdx.y * kRows + threadIdx.y, column = (blockIdx.x * kRuns + threadIdx.x) * kPixels;
    const bool active = row < p.height && column < p.width;  // the others stay, for the wave's common work
    const float* colour = p.colour + image * kColour;
    const float hue = colour[0], saturation = colour[1], value = colour[2] * (1.f / 255.f), part = colour[3];
    Colour c[kPixels];
    sample_group(p, layers[0], active, float(column), float(row), c);
    if (p.layers > 1 && part != 1.f) {
        Colour other[kPixels];
        sample_group(p, layers[1], active, float(column), float(row), other);
#pragma unroll
        for (int i = 0; i < kPixels; ++i) c[i] = mix(other[i], c[i], part);
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) c[i] = jitter(c[i], hue, saturation, value, kBias);
    if (active) write<T, kChannelsLast, kWide>(p, image, row, column, c);
}

template <typename T>
int launch(const MosaicAugment& p, hipStream_t stream) {
    const int runs = (p.width + kPixels - 1) / kPixels;
    const dim3 grid(unsigned((runs + kRuns - 1) / kRuns), unsigned((p.height + kRows - 1) / kRows), unsigned(p.batch));
    const dim3 block(kRuns, kRows);
    const bool wide = p.width % kPixels == 0;
    if (p.channels_last) {
        wide ? augment_kernel<T, true, true><<<grid, block, 0, stream>>>(p)
             : augment_kernel<T, true, false><<<grid, block, 0, stream>>>(p);
    } else {
        wide ? augment_kernel<T, false, true><<<grid, block, 0, stream>>>(p)
             : augment_kernel<T, false, false><<<grid, block, 0, stream>>>(p);
    }
    return int(hipGetLastError());
}

}  // namespace

int mosaic_augment(const MosaicAugment& p, Stream stream) {
    if (p.batch == 0) return 0;
    switch (p.dtype) {
        case DType::kFloat32: return launch<float>(p, native(stream));
        case DType::kFloat16: return launch<Half>(p, native(stream));
        case DType::kBFloat16: return launch<BFloat16>(p, native(stream));
        case DType::kFloat64: break;
    }
    return int(hipErrorInvalidValue);
}

}  // namespace hip_kernels::gpu
