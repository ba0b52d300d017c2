// Deformable aggregation on the CPU, float32 and float64 (half types are widened by the caller).
#include <cmath>
#include <vector>

#include "../kernels.h"
#include "parallel.h"

namespace hip_kernels::cpu {
namespace {

// The four pixels around one sampled location. `row` is -1 for zero padding.
template <typename T>
struct Corners {
    int64_t row[4];
    T weight[4], d_x[4], d_y[4];
};

template <typename T>
bool inside(T x, T y) {
    return x > T(0) && x < T(1) && y > T(0) && y < T(1);
}

template <typename T>
Corners<T> corners_of(T x, T y, int64_t height, int64_t width, int64_t start, int64_t rows) {
    const T px = x * T(width) - T(0.5), py = y * T(height) - T(0.5);
    const int64_t x0 = int64_t(std::floor(px)), y0 = int64_t(std::floor(py));
    const T fx = px - T(x0), fy = py - T(y0);
    Corners<T> out;
    for (int k = 0; k < 4; ++k) {
        const int64_t dx = k & 1, dy = k >> 1;
        const int64_t cx = x0 + dx, cy = y0 + dy;
        const int64_t row = start + cy * width + cx;
        const bool valid = cx >= 0 && cx < width && cy >= 0 && cy < height && row >= 0 && row < rows;
        out.row[k] = valid ? row : -1;
        const T wx = dx ? fx : T(1) - fx, wy = dy ? fy : T(1) - fy;
        out.weight[k] = wx * wy;
        out.d_x[k] = (dx ? T(1) : T(-1)) * wy * T(width);
        out.d_y[k] = (dy ? T(1) : T(-1)) * wx * T(height);
    }
    return out;
}

// Calls body(location index, weight index of group 0, corners) for every sample of one anchor that is inside its image.
template <typename T, typename Body>
void for_each_sample(const DeformableForward& p, int64_t anchor, const Body& body) {
    const auto& s = p.shape;
    const T* locations = static_cast<const T*>(p.locations);
    const int64_t pairs = int64_t(s.points) * s.cameras;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t location = anchor * pairs + pair;
        const T x = locations[2 * location], y = locations[2 * location + 1];
        if (!inside(x, y)) continue;
        const int64_t camera = pair % s.cameras;
        for (int64_t scale = 0; scale < s.scales; ++scale) {
            const int64_t level = camera * s.scales + scale;
            body(location, (location * s.scales + scale) * s.groups,
                 corners_of<T>(x, y, p.spatial_shapes[2 * level], p.spatial_shapes[2 * level + 1], p.scale_start[level],
                               s.rows));
        }
    }
}

template <typename T>
void forward(const DeformableForward& p) {
    const auto& s = p.shape;
    const int64_t group_width = s.embed / s.groups;
    const T* weights = static_cast<const T*>(p.weights);
    parallel_for(int64_t(s.batch) * s.anchors, [&](int64_t anchor) {
        const T* features = static_cast<const T*>(p.features) + (anchor / s.anchors) * s.rows * s.embed;
        T* out = static_cast<T*>(p.output) + anchor * s.embed;
        for (int64_t e = 0; e < s.embed; ++e) out[e] = T(0);
        for_each_sample<T>(p, anchor, [&](int64_t, int64_t weight, const Corners<T>& corners) {
            for (int k = 0; k < 4; ++k) {
                if (corners.row[k] < 0) continue;
                const T* row = features + corners.row[k] * s.embed;
                for (int64_t g = 0; g < s.groups; ++g) {
                    const T scale = corners.weight[k] * weights[weight + g];
                    for (int64_t e = g * group_width; e < (g + 1) * group_width; ++e) out[e] += scale * row[e];
                }
            }
        });
    });
}

template <typename T>
void backward(const DeformableBackward& b) {
    const DeformableForward& p = b.forward;
    const auto& s = p.shape;
    const int64_t group_width = s.embed / s.groups, pairs = int64_t(s.points) * s.cameras;
    const T* weights = static_cast<const T*>(p.weights);
    T* grad_weights = static_cast<T*>(b.grad_weights);
    T* grad_locations = static_cast<T*>(b.grad_locations);
    const auto one_anchor = [&](int64_t anchor) {
        const int64_t base = (anchor / s.anchors) * s.rows * s.embed;
        const T* features = static_cast<const T*>(p.features) + base;
        T* grad_features = static_cast<T*>(b.grad_features) + base;
        const T* grad = static_cast<const T*>(b.grad_output) + anchor * s.embed;
        for (int64_t i = 0; i < 2 * pairs; ++i) grad_locations[2 * anchor * pairs + i] = T(0);
        for (int64_t i = 0; i < pairs * s.scales * s.groups; ++i) {
            grad_weights[anchor * pairs * s.scales * s.groups + i] = T(0);
        }
        for_each_sample<T>(p, anchor, [&](int64_t location, int64_t weight, const Corners<T>& corners) {
            for (int k = 0; k < 4; ++k) {
                if (corners.row[k] < 0) continue;
                const T* row = features + corners.row[k] * s.embed;
                T* grad_row = grad_features + corners.row[k] * s.embed;
                for (int64_t g = 0; g < s.groups; ++g) {
                    const T scale = corners.weight[k] * weights[weight + g];
                    T dot = T(0);
                    for (int64_t e = g * group_width; e < (g + 1) * group_width; ++e) {
                        dot += grad[e] * row[e];
                        grad_row[e] += scale * grad[e];
                    }
                    grad_weights[weight + g] += corners.weight[k] * dot;
                    grad_locations[2 * location] += weights[weight + g] * corners.d_x[k] * dot;
                    grad_locations[2 * location + 1] += weights[weight + g] * corners.d_y[k] * dot;
                }
            }
        });
    };
    // Anchors of one image share its feature gradient, so only images run side by side.
    parallel_for(s.batch, [&](int64_t image) {
        for (int64_t a = 0; a < s.anchors; ++a) one_anchor(image * s.anchors + a);
    });
}

}  // namespace

void deformable_aggregation_forward(const DeformableForward& params) {
    params.dtype == DType::kFloat64 ? forward<double>(params) : forward<float>(params);
}

void deformable_aggregation_backward(const DeformableBackward& params) {
    params.forward.dtype == DType::kFloat64 ? backward<double>(params) : backward<float>(params);
}

}  // namespace hip_kernels::cpu
