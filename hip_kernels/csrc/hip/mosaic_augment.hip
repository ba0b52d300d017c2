// The fused augmentation: every output pixel is computed once, from the source pixels it needs and nothing else.
//
// A thread makes kPixels neighbours of a row. Where their taps all lie inside one tile, which is looked up once for the
// group, nothing but arithmetic is left per pixel; where they all lie outside, nothing at all; the few groups on an edge
// take a slower way that looks up each tap. Two neighbouring source pixels are six bytes and are read as one window, not as
// six loads.
#include "../mosaic.h"
#include "platform.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kPixels = 4;
constexpr int kRuns = 32;  // groups of a row in a block
constexpr int kRows = kBlock / kRuns;
constexpr int kWindow = 16;  // bytes that `window` may touch from `at` on

// The eight bytes from `at` on, which may stand at any address.
__device__ inline uint2 window(const uint8_t* at) {
#if defined(__CUDACC__)
    // NVIDIA has aligned loads only: two of 8 bytes, shifted into one
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    const uint2* words = reinterpret_cast<const uint2*>(address & ~uintptr_t(7));
    const uint2 first = __ldg(words), second = __ldg(words + 1);
    const unsigned shift = unsigned(address & 3u) * 8u;
    const bool upper = (unsigned(address) & 4u) != 0;
    const uint32_t low = upper ? first.y : first.x, middle = upper ? second.x : first.y;
    const uint32_t high = upper ? second.y : second.x;
    return make_uint2(__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift));
#else
    uint2 bytes;
    __builtin_memcpy(&bytes, at, 8);
    return bytes;
#endif
}

// Integer and fractional part, the first downwards, for |x| < 2^22.
__device__ inline float split(float x, int& whole) {
#if defined(__CUDACC__)
    // rounding down while adding 1.5 * 2^23 leaves the integer in the low bits: three additions and no conversion
    const float shifted = __fadd_rd(x, 12582912.f);
    whole = __float_as_int(shifted) - 0x4b400000;
    return x - (shifted - 12582912.f);
#else
    const float down = floorf(x);
    whole = int(down);
    return x - down;
#endif
}

__device__ inline float byte_of(uint32_t word, int k) { return float((word >> (8 * k)) & 255u); }

__device__ inline Colour mix(const Colour& a, const Colour& b, float part) {
    return {a.r + part * (b.r - a.r), a.g + part * (b.g - a.g), a.b + part * (b.b - a.b)};
}

__device__ inline Colour row_pair(const uint8_t* at, float part) {
    const uint2 w = window(at);
    return mix({byte_of(w.x, 0), byte_of(w.x, 1), byte_of(w.x, 2)}, {byte_of(w.x, 3), byte_of(w.y, 0), byte_of(w.y, 1)}, part);
}

struct Layer {
    Tile tiles[kTiles];
    float geometry[kGeometry];
};

__device__ inline int tile_at(const float* geometry, float x, float y) {
    return (x >= geometry[6] ? 1 : 0) + (y >= geometry[7] ? 2 : 0);
}

__device__ Colour canvas_pixel(const MosaicAugment& p, const Layer& layer, int x, int y) {
    const Tile& t = layer.tiles[tile_at(layer.geometry, float(x), float(y))];
    if (x < t.left || x >= t.right || y < t.top || y >= t.bottom) return {p.fill, p.fill, p.fill};
    const uint8_t* at = p.source + t.origin + (int64_t(y) * p.image_width + x) * 3;
    return {float(at[0]), float(at[1]), float(at[2])};
}

// Any pixel, tap by tap.
__device__ inline Colour sample_anywhere(const MosaicAugment& p, const Layer& layer, float x, float y) {
    // the limits keep the conversion defined, for NaN too, and lie outside every tile
    int ix, iy;
    const float fx = split(fminf(fmaxf(x, -1e6f), 1e6f), ix), fy = split(fminf(fmaxf(y, -1e6f), 1e6f), iy);
    const Colour top = mix(canvas_pixel(p, layer, ix, iy), canvas_pixel(p, layer, ix + 1, iy), fx);
    const Colour bottom = mix(canvas_pixel(p, layer, ix, iy + 1), canvas_pixel(p, layer, ix + 1, iy + 1), fx);
    return mix(top, bottom, fy);
}

// Makes kPixels samples of one layer, 0 to 255, starting at (column, row).
__device__ inline void sample_group(const MosaicAugment& p, const Layer& layer, float column, float row, Colour (&out)[kPixels]) {
    const float* g = layer.geometry;
    const float step_x = g[0], step_y = g[3], base_x = g[1] * row + g[2], base_y = g[4] * row + g[5];
    const float first_x = step_x * column + base_x, last_x = step_x * (column + (kPixels - 1)) + base_x;
    const float first_y = step_y * column + base_y, last_y = step_y * (column + (kPixels - 1)) + base_y;
    const float low_x = floorf(fminf(first_x, last_x)), high_x = floorf(fmaxf(first_x, last_x)) + 1.f;
    const float low_y = floorf(fminf(first_y, last_y)), high_y = floorf(fmaxf(first_y, last_y)) + 1.f;
    const int k = tile_at(g, low_x, low_y);
    const Tile& t = layer.tiles[k];
    const float left = float(t.left), right = float(t.right), top = float(t.top), bottom = float(t.bottom);
    // all comparisons are false for NaN, which then goes the slow way
    const bool one_tile = k == tile_at(g, high_x, high_y);
    const int line = p.image_width * 3;
    const uint8_t* origin = p.source + t.origin;
    if (one_tile && low_x >= left && high_x < right && low_y >= top && high_y < bottom) {
        const uint8_t* end = p.source + int64_t(p.images) * p.image_height * line;
        if (origin + int64_t(high_y) * line + int64_t(high_x) * 3 + kWindow <= end) {
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
                int ix, iy;
                const float fx = split(step_x * (column + i) + base_x, ix), fy = split(step_y * (column + i) + base_y, iy);
                const uint8_t* at = origin + (int64_t(iy) * line + ix * 3);
                out[i] = mix(row_pair(at, fx), row_pair(at + line, fx), fy);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) out[i] = {p.fill, p.fill, p.fill};
    if (one_tile && (high_x < left || low_x >= right || high_y < top || low_y >= bottom)) return;
#pragma unroll 1
    for (int i = 0; i < kPixels; ++i) {
        const Colour c = sample_anywhere(p, layer, step_x * (column + i) + base_x, step_y * (column + i) + base_y);
        // a choice among values rather than places keeps `out` in registers
#pragma unroll
        for (int j = 0; j < kPixels; ++j) {
            out[j] = {i == j ? c.r : out[j].r, i == j ? c.g : out[j].g, i == j ? c.b : out[j].b};
        }
    }
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
__global__ __launch_bounds__(kBlock) void augment_kernel(MosaicAugment p) {
    __shared__ Layer layers[2];
    const int image = blockIdx.z, tid = threadIdx.y * kRuns + threadIdx.x;
    if (tid < p.layers * kTiles) {
        const int layer = tid / kTiles, k = tid - layer * kTiles;
        const int64_t at = int64_t(image) * p.layers + layer;
        layers[layer].tiles[k] = tile_of(p, p.tiles + (at * kTiles + k) * 3, p.geometry + at * kGeometry, k);
    }
    if (tid < p.layers * kGeometry) {
        layers[tid / kGeometry].geometry[tid % kGeometry] = p.geometry[int64_t(image) * p.layers * kGeometry + tid];
    }
    __syncthreads();
    const int row = blockIdx.y * kRows + threadIdx.y, column = (blockIdx.x * kRuns + threadIdx.x) * kPixels;
    if (row >= p.height || column >= p.width) return;
    const float* colour = p.colour + image * kColour;
    const float hue = colour[0], saturation = colour[1], value = colour[2] * (1.f / 255.f), part = colour[3];
    Colour c[kPixels];
    sample_group(p, layers[0], float(column), float(row), c);
    if (p.layers > 1 && part != 1.f) {
        Colour other[kPixels];
        sample_group(p, layers[1], float(column), float(row), other);
#pragma unroll
        for (int i = 0; i < kPixels; ++i) c[i] = mix(other[i], c[i], part);
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) c[i] = jitter(c[i], hue, saturation, value);
    write<T, kChannelsLast, kWide>(p, image, row, column, c);
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
