// What the CPU and the GPU version of the augmentation share: tiles on the canvas and the colour jitter.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"

#if defined(__HIPCC__) || defined(__CUDACC__)
#define HIP_KERNELS_BOTH __host__ __device__
#else
#define HIP_KERNELS_BOTH
#endif

namespace hip_kernels {

// A tile: the part of the canvas where it shows, [left, right) x [top, bottom), and the address that the canvas's pixel
// (0, 0) would have, so that pixel (x, y) is at origin + (y * image_width + x) * 3.
struct Tile {
    int32_t left, top, right, bottom;
    int64_t origin;
};

HIP_KERNELS_BOTH inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
HIP_KERNELS_BOTH inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// The seam cuts the canvas in four: tile 0 upper left, 1 upper right, 2 lower left, 3 lower right.
HIP_KERNELS_BOTH inline Tile tile_of(const MosaicAugment& p, const int32_t* entry, const float* geometry, int k) {
    const int32_t image = entry[0], x = entry[1], y = entry[2];
    const int32_t seam_x = int32_t(geometry[6]), seam_y = int32_t(geometry[7]);
    const int32_t canvas_w = int32_t(geometry[8]), canvas_h = int32_t(geometry[9]);
    Tile t;
    t.left = larger(x, k & 1 ? larger(seam_x, 0) : 0);
    t.right = smaller(x + p.image_width, k & 1 ? canvas_w : smaller(seam_x, canvas_w));
    t.top = larger(y, k & 2 ? larger(seam_y, 0) : 0);
    t.bottom = smaller(y + p.image_height, k & 2 ? canvas_h : smaller(seam_y, canvas_h));
    t.origin = ((int64_t(image) * p.image_height - y) * p.image_width - x) * 3;
    if (image < 0 || image >= p.images) t.right = t.left = 0;
    return t;
}

struct Colour {
    float r, g, b;
};

HIP_KERNELS_BOTH inline float unit(float x) {
#if defined(__CUDA_ARCH__)
    return __saturatef(x);  // part of the addition before it
#else
    return fminf(fmaxf(x, 0.f), 1.f);
#endif
}

HIP_KERNELS_BOTH inline float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#elif defined(__HIP_DEVICE_COMPILE__)
    return __builtin_amdgcn_rcpf(x);
#else
    return 1.f / x;
#endif
}

// Downwards, for 0 <= x < 2^22.
HIP_KERNELS_BOTH inline float floor_small(float x) {
#if defined(__CUDA_ARCH__)
    return __fadd_rd(x, 8388608.f) - 8388608.f;  // two additions instead of a slow conversion
#else
    return floorf(x);
#endif
}

// Hue, saturation and value of a colour from 0 to 255, times their gains, as a colour from 0 to 1: hue on a circle, the
// others up to 1. `value_gain` has the division by 255 in it. The three channels may all be `bias` too high.
//
// The hue (in sixths of the circle) comes from sorting the channels, which keeps account of the sector. One reciprocal
// serves both quotients; with chroma 0 it is large but finite, and what it multiplies is 0. The way back uses the
// hexagon's three tent functions, which need no cases.
HIP_KERNELS_BOTH inline Colour jitter(Colour c, float hue_gain, float saturation_gain, float value_gain, float bias) {
    const bool blue_first = c.g < c.b;
    const float upper = fmaxf(c.g, c.b), lower = fminf(c.g, c.b);
    const bool red_behind = c.r < upper;
    const float highest = fmaxf(c.r, upper), middle = fminf(c.r, upper), chroma = highest - fminf(middle, lower);
    const float sector = red_behind ? (blue_first ? 4.f : -2.f) : (blue_first ? -6.f : 0.f);
    const float high = highest - bias;
    const float both = reciprocal(chroma * high + 1e-20f);
    float hue = fabsf((middle - lower) * (both * high) + sector) * hue_gain;
    hue -= 6.f * floor_small(hue * (1.f / 6.f));
    const float value = unit(high * value_gain);
    const float scale = fminf(value_gain, both * chroma);  // value / high
    const float new_chroma = fminf(scale * saturation_gain * chroma, value);
    const float base = value - new_chroma;
    return {base + new_chroma * unit(fabsf(hue - 3.f) - 1.f), base + new_chroma * unit(2.f - fabsf(hue - 2.f)),
            base + new_chroma * unit(2.f - fabsf(hue - 4.f))};
}

}  // namespace hip_kernels
