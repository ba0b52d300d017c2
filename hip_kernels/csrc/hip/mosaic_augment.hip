// The fused augmentation: every output pixel is computed once, from the source pixels it needs and nothing else.
//
// A thread makes kPixels neighbours of a row. Two horizontally adjacent source pixels are six bytes; they are read as one
// unaligned 8-byte window instead of six loads. Pixels near a tile's edge take a slower way that looks up each tap.
#include "../mosaic.h"
#include "platform.h"

namespace hip_kernels::gpu {
namespace {

constexpr int kPixels = 4;

// The eight bytes from `at` on, which may stand at any address.
__device__ inline uint2 window(const uint8_t* at) {
#if defined(__CUDACC__)
    // NVIDIA has aligned loads only: three words, shifted into two
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    const unsigned shift = unsigned(address & 3u) * 8u;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t(3));
    const uint32_t first = __ldg(words), second = __ldg(words + 1);
    const uint32_t third = shift == 24u ? __ldg(words + 2) : 0u;
    return make_uint2(__funnelshift_r(first, second, shift), __funnelshift_r(second, third, shift));
#else
    uint2 bytes;
    __builtin_memcpy(&bytes, at, 8);
    return bytes;
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

__device__ Colour canvas_pixel(const MosaicAugment& p, const Layer& layer, int x, int y) {
    const Tile& t = layer.tiles[(float(x) >= layer.geometry[6] ? 1 : 0) + (float(y) >= layer.geometry[7] ? 2 : 0)];
    if (x < t.left || x >= t.right || y < t.top || y >= t.bottom) return {p.fill, p.fill, p.fill};
    const uint8_t* at = p.source + t.origin + (int64_t(y) * p.image_width + x) * 3;
    return {float(at[0]), float(at[1]), float(at[2])};
}

__device__ inline Colour sample(const MosaicAugment& p, const Layer& layer, const uint8_t* last_window, float column, float row) {
    const float* g = layer.geometry;
    // the limits keep the conversion defined, for NaN too, and lie outside every tile
    const float x = fminf(fmaxf(g[0] * column + (g[1] * row + g[2]), -1e6f), 1e6f);
    const float y = fminf(fmaxf(g[3] * column + (g[4] * row + g[5]), -1e6f), 1e6f);
    const float x0 = floorf(x), y0 = floorf(y), fx = x - x0, fy = y - y0;
    const int ix = int(x0), iy = int(y0);
    const Tile& t = layer.tiles[(x0 >= g[6] ? 1 : 0) + (y0 >= g[7] ? 2 : 0)];
    const bool within = ix >= t.left && ix + 1 < t.right && iy >= t.top && iy + 1 < t.bottom;
    const int64_t line = int64_t(p.image_width) * 3;
    const uint8_t* at = p.source + t.origin + int64_t(iy) * line + ix * 3;
    // a window is two bytes longer than two pixels; the array's last pixels must not be read past
    if (within && at + line <= last_window) return mix(row_pair(at, fx), row_pair(at + line, fx), fy);
    const Colour top = mix(canvas_pixel(p, layer, ix, iy), canvas_pixel(p, layer, ix + 1, iy), fx);
    const Colour bottom = mix(canvas_pixel(p, layer, ix, iy + 1), canvas_pixel(p, layer, ix + 1, iy + 1), fx);
    return mix(top, bottom, fy);
}

template <typename T, bool kChannelsLast, bool kWide>
__device__ inline void write(const MosaicAugment& p, int image, int row, int column, const Colour (&c)[kPixels]) {
    const int plane = p.height * p.width, pixel = row * p.width + column;
    T* out = static_cast<T*>(p.output) + int64_t(image) * plane * 3;
    if constexpr (kWide) {
        constexpr int kPack = kPixels;
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
            Pack<T, kPack> pack;
#pragma unroll
            for (int v = 0; v < kPack; ++v) pack.at[v] = values[part * kPack + v];
            store<T, kPack>(kChannelsLast ? out + 3 * pixel + part * kPack : out + part * plane + pixel, pack);
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
    const int image = blockIdx.y, tid = threadIdx.x;
    if (tid < p.layers * kTiles) {
        const int layer = tid / kTiles, k = tid - layer * kTiles;
        const int64_t at = int64_t(image) * p.layers + layer;
        layers[layer].tiles[k] = tile_of(p, p.tiles + (at * kTiles + k) * 3, p.geometry + at * kGeometry, k);
    }
    for (int i = tid; i < p.layers * kGeometry; i += kBlock) {
        layers[i / kGeometry].geometry[i % kGeometry] = p.geometry[int64_t(image) * p.layers * kGeometry + i];
    }
    __syncthreads();
    const int runs = (p.width + kPixels - 1) / kPixels;
    const int run = blockIdx.x * kBlock + tid;
    if (run >= runs * p.height) return;
    const int row = run / runs, column = (run - row * runs) * kPixels;
    const float* colour = p.colour + image * kColour;
    const float hue = colour[0], saturation = colour[1], value = colour[2], part = colour[3];
    const bool jitters = hue != 1.f || saturation != 1.f || value != 1.f;
    const uint8_t* last_window = p.source + int64_t(p.images) * p.image_height * p.image_width * 3 - 8;
    Colour c[kPixels];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
        c[i] = sample(p, layers[0], last_window, float(column + i), float(row));
        if (p.layers > 1 && part != 1.f) {
            c[i] = mix(sample(p, layers[1], last_window, float(column + i), float(row)), c[i], part);
        }
        constexpr float kScale = 1.f / 255.f;
        c[i] = {c[i].r * kScale, c[i].g * kScale, c[i].b * kScale};
        if (jitters) c[i] = jitter(c[i], hue, saturation, value);
    }
    write<T, kChannelsLast, kWide>(p, image, row, column, c);
}

template <typename T>
int launch(const MosaicAugment& p, hipStream_t stream) {
    const int64_t runs = int64_t((p.width + kPixels - 1) / kPixels) * p.height;
    const dim3 grid(unsigned((runs + kBlock - 1) / kBlock), unsigned(p.batch));
    const bool wide = p.width % kPixels == 0;
    if (p.channels_last) {
        wide ? augment_kernel<T, true, true><<<grid, kBlock, 0, stream>>>(p)
             : augment_kernel<T, true, false><<<grid, kBlock, 0, stream>>>(p);
    } else {
        wide ? augment_kernel<T, false, true><<<grid, kBlock, 0, stream>>>(p)
             : augment_kernel<T, false, false><<<grid, kBlock, 0, stream>>>(p);
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
