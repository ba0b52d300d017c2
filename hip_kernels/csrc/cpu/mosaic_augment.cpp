// The fused augmentation on the CPU, float32 output (half types are narrowed by the caller).
#include <cmath>

#include "../kernels.h"
#include "../mosaic.h"
#include "parallel.h"

namespace hip_kernels::cpu {
namespace {

// One pixel of the canvas, 0 to 255.
Colour canvas_pixel(const MosaicAugment& p, const Tile* tiles, const float* geometry, int32_t x, int32_t y) {
    const Tile& t = tiles[(float(x) >= geometry[6] ? 1 : 0) + (float(y) >= geometry[7] ? 2 : 0)];
    if (x < t.left || x >= t.right || y < t.top || y >= t.bottom) return {p.fill, p.fill, p.fill};
    const uint8_t* at = p.source + t.origin + (int64_t(y) * p.image_width + x) * 3;
    return {float(at[0]), float(at[1]), float(at[2])};
}

Colour mix(const Colour& a, const Colour& b, float part) {
    return {a.r + part * (b.r - a.r), a.g + part * (b.g - a.g), a.b + part * (b.b - a.b)};
}

Colour sample(const MosaicAugment& p, const Tile* tiles, const float* g, float column, float row) {
    // the limits keep the conversion defined, for NaN too, and lie outside every tile
    const float x = std::fmin(std::fmax(g[0] * column + g[1] * row + g[2], -1e6f), 1e6f);
    const float y = std::fmin(std::fmax(g[3] * column + g[4] * row + g[5], -1e6f), 1e6f);
    const float x0 = std::floor(x), y0 = std::floor(y);
    const auto ix = int32_t(x0), iy = int32_t(y0);
    const Colour top = mix(canvas_pixel(p, tiles, g, ix, iy), canvas_pixel(p, tiles, g, ix + 1, iy), x - x0);
    const Colour bottom = mix(canvas_pixel(p, tiles, g, ix, iy + 1), canvas_pixel(p, tiles, g, ix + 1, iy + 1), x - x0);
    return mix(top, bottom, y - y0);
}

}  // namespace

void mosaic_augment(const MosaicAugment& p) {
    float* output = static_cast<float*>(p.output);
    const int64_t plane = int64_t(p.height) * p.width;
    parallel_for(int64_t(p.batch) * p.height, [&](int64_t line) {
        const int64_t image = line / p.height, row = line % p.height;
        const float* geometry = p.geometry + image * p.layers * kGeometry;
        const float* colour = p.colour + image * kColour;
        Tile tiles[2][kTiles];
        for (int layer = 0; layer < p.layers; ++layer) {
            for (int k = 0; k < kTiles; ++k) {
                const int32_t* entry = p.tiles + ((image * p.layers + layer) * kTiles + k) * 3;
                tiles[layer][k] = tile_of(p, entry, geometry + layer * kGeometry, k);
            }
        }
        for (int64_t column = 0; column < p.width; ++column) {
            Colour c = sample(p, tiles[0], geometry, float(column), float(row));
            if (p.layers > 1) {
                c = mix(sample(p, tiles[1], geometry + kGeometry, float(column), float(row)), c, colour[3]);
            }
            c = jitter(c, colour[0], colour[1], colour[2] / 255.f, 0.f);
            const int64_t pixel = row * p.width + column;
            float* at = output + image * plane * 3 + (p.channels_last ? pixel * 3 : pixel);
            const int64_t step = p.channels_last ? 1 : plane;
            at[0] = c.r;
            at[step] = c.g;
            at[2 * step] = c.b;
        }
    });
}

}  // namespace hip_kernels::cpu
