#include "checks.h"
#include "device.h"

namespace hip_kernels::binding {
namespace {

using at::Tensor;

// The arguments in the form that the kernels read: dense, tables as int32. Holds them alive.
struct Arguments {
    Tensor features, spatial_shapes, scale_start, locations, weights;
    DeformableForward params;
};

void check_shapes(const Tensor& features, const Tensor& shapes, const Tensor& start, const Tensor& locations,
                  const Tensor& weights) {
    check_dim(features, 3, "features", "(B, R, E)");
    check_dim(shapes, 3, "spatial_shapes", "(C, S, 2)");
    check_size(shapes, 2, 2, "spatial_shapes", "(C, S, 2)");
    check_dim(start, 2, "scale_start", "(C, S)");
    check_size(start, 0, shapes.size(0), "scale_start", "(C, S)");
    check_size(start, 1, shapes.size(1), "scale_start", "(C, S)");
    check_dim(locations, 5, "locations", "(B, A, P, C, 2)");
    check_size(locations, 0, features.size(0), "locations", "(B, A, P, C, 2)");
    check_size(locations, 3, shapes.size(0), "locations", "(B, A, P, C, 2)");
    check_size(locations, 4, 2, "locations", "(B, A, P, C, 2)");
    check_dim(weights, 6, "weights", "(B, A, P, C, S, G)");
    for (int64_t axis = 0; axis < 4; ++axis) {
        check_size(weights, axis, locations.size(axis), "weights", "(B, A, P, C, S, G)");
    }
    check_size(weights, 4, shapes.size(1), "weights", "(B, A, P, C, S, G)");
    const int64_t groups = weights.size(5), scales = shapes.size(1);
    TORCH_CHECK_VALUE(groups > 0 && features.size(2) % groups == 0,
                "hip_kernels: expected groups that divide the embedding width ", features.size(2), ", got ", groups);
    TORCH_CHECK_VALUE(scales <= kMaxScales && scales * groups <= kMaxScaleGroups, "hip_kernels: expected at most ", kMaxScales,
                " scales, and ", kMaxScaleGroups, " scales times groups, got ", scales, " scales and ", groups, " groups");
    TORCH_CHECK_VALUE(shapes.size(0) * scales <= kMaxMaps, "hip_kernels: expected at most ", kMaxMaps,
                " maps (cameras times scales), got ", shapes.size(0) * scales);
    constexpr int64_t kMost = int64_t(1) << 31;
    TORCH_CHECK_VALUE(features.size(1) * features.size(2) < kMost,
                "hip_kernels: expected fewer than 2^31 feature elements an image, got ",
                features.size(1) * features.size(2));
    const int64_t blocks = locations.size(0) * locations.size(1), samples = weights.numel() / std::max<int64_t>(blocks, 1);
    TORCH_CHECK_VALUE(blocks < kMost && samples < kMost, "hip_kernels: expected fewer than 2^31 anchors, and weights of an anchor, got ",
                blocks, " and ", samples);
}

Arguments prepare(const Tensor& features, const Tensor& shapes, const Tensor& start, const Tensor& locations,
                  const Tensor& weights) {
    const DType dtype = dtype_of(features, "features");
    check_shapes(features, shapes, start, locations, weights);
    check_dtype(weights, features.scalar_type(), "weights (like features)");
    check_dtype(locations, features.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, "locations");
    check_device(shapes, features, "spatial_shapes");
    check_device(start, features, "scale_start");
    check_device(locations, features, "locations");
    check_device(weights, features, "weights");
    TORCH_CHECK_TYPE(at::isIntegralType(shapes.scalar_type(), false) && at::isIntegralType(start.scalar_type(), false),
                "hip_kernels: expected integer spatial_shapes and scale_start, got ", shapes.scalar_type(), " and ",
                start.scalar_type());
    Arguments a{dense(features), shapes.to(at::kInt).contiguous(), start.to(at::kInt).contiguous(),
                dense(locations), dense(weights), {}};
    const auto small = [](int64_t size) { return int32_t(size); };  // checked above
    a.params.shape = {small(features.size(0)),  small(features.size(1)),  small(features.size(2)), small(locations.size(1)),
                      small(locations.size(2)), small(locations.size(3)), small(weights.size(4)),  small(weights.size(5))};
    a.params.dtype = dtype;
    a.params.features = a.features.const_data_ptr();
    a.params.spatial_shapes = a.spatial_shapes.const_data_ptr<int32_t>();
    a.params.scale_start = a.scale_start.const_data_ptr<int32_t>();
    a.params.locations = a.locations.const_data_ptr();
    a.params.weights = a.weights.const_data_ptr();
    a.params.output = nullptr;
    return a;
}

// On the CPU the tables can be read, so a table that points outside the features is an error there.
void check_tables(const Arguments& a) {
    const auto& s = a.params.shape;
    for (int64_t level = 0; level < s.cameras * s.scales; ++level) {
        const int64_t height = a.params.spatial_shapes[2 * level], width = a.params.spatial_shapes[2 * level + 1];
        const int64_t start = a.params.scale_start[level];
        TORCH_CHECK_VALUE(height >= 0 && width >= 0 && start >= 0 && start + height * width <= s.rows,
                    "hip_kernels: expected the map of camera ", level / s.scales, ", scale ", level % s.scales,
                    " inside the ", s.rows, " rows of features, got rows ", start, " to ", start + height * width);
    }
}

bool is_half(const Tensor& t) { return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16; }

Tensor output_like(const Arguments& a) {
    return at::empty({a.params.shape.batch, a.params.shape.anchors, a.params.shape.embed}, a.features.options());
}

Tensor forward_cpu(const Tensor& features, const Tensor& shapes, const Tensor& start, const Tensor& locations,
                   const Tensor& weights) {
    if (is_half(features) && weights.scalar_type() == features.scalar_type()) {
        return forward_cpu(features.to(at::kFloat), shapes, start, locations, weights.to(at::kFloat))
            .to(features.scalar_type());
    }
    Arguments a = prepare(features, shapes, start, locations, weights);
    check_tables(a);
    Tensor output = output_like(a);
    a.params.output = output.mutable_data_ptr();
    cpu::deformable_aggregation_forward(a.params);
    return output;
}

struct Gradients {
    Tensor features, locations, weights;
};

Gradients gradients_like(const Arguments& a) {
    const at::ScalarType accumulate = a.params.dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
    return {at::zeros_like(a.features, a.features.options().dtype(accumulate)), at::empty_like(a.locations),
            at::empty_like(a.weights)};
}

DeformableBackward backward_params(const Arguments& a, const Tensor& grad_output, const Gradients& out) {
    return {a.params, grad_output.const_data_ptr(), out.features.mutable_data_ptr(), out.locations.mutable_data_ptr(),
            out.weights.mutable_data_ptr()};
}

void check_grad(const Tensor& grad_output, const Arguments& a) {
    check_dim(grad_output, 3, "grad_output", "(B, A, E)");
    check_size(grad_output, 0, a.params.shape.batch, "grad_output", "(B, A, E)");
    check_size(grad_output, 1, a.params.shape.anchors, "grad_output", "(B, A, E)");
    check_size(grad_output, 2, a.params.shape.embed, "grad_output", "(B, A, E)");
    check_dtype(grad_output, a.features.scalar_type(), "grad_output");
    check_device(grad_output, a.features, "grad_output");
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_output, const Tensor& features, const Tensor& shapes,
                                                const Tensor& start, const Tensor& locations, const Tensor& weights) {
    if (is_half(features) && weights.scalar_type() == features.scalar_type()) {
        auto [f, l, w] = backward_cpu(grad_output.to(at::kFloat), features.to(at::kFloat), shapes, start, locations,
                                      weights.to(at::kFloat));
        return {f.to(features.scalar_type()), l, w.to(features.scalar_type())};
    }
    const Arguments a = prepare(features, shapes, start, locations, weights);
    check_tables(a);
    check_grad(grad_output, a);
    const Tensor grad = dense(grad_output);
    const Gradients out = gradients_like(a);
    cpu::deformable_aggregation_backward(backward_params(a, grad, out));
    return {out.features, out.locations, out.weights};
}

#ifdef HIP_KERNELS_WITH_GPU
Tensor forward_gpu(const Tensor& features, const Tensor& shapes, const Tensor& start, const Tensor& locations,
                   const Tensor& weights) {
    Arguments a = prepare(features, shapes, start, locations, weights);
    const c10::DeviceGuard guard(features.device());
    Tensor output = output_like(a);
    a.params.output = output.mutable_data_ptr();
    check_launch(gpu::deformable_aggregation_forward(a.params, current_stream(features)), "deformable_aggregation");
    return output;
}

std::tuple<Tensor, Tensor, Tensor> backward_gpu(const Tensor& grad_output, const Tensor& features, const Tensor& shapes,
                                                const Tensor& start, const Tensor& locations, const Tensor& weights) {
    const Arguments a = prepare(features, shapes, start, locations, weights);
    check_grad(grad_output, a);
    const c10::DeviceGuard guard(features.device());
    const Tensor grad = dense(grad_output);
    const Gradients out = gradients_like(a);
    check_launch(gpu::deformable_aggregation_backward(backward_params(a, grad, out), current_stream(features)),
                 "deformable_aggregation_backward");
    return {out.features.to(features.scalar_type()), out.locations, out.weights};
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(hip_kernels, CPU, library) {
    library.impl("deformable_aggregation", &forward_cpu);
    library.impl("deformable_aggregation_backward", &backward_cpu);
}

#ifdef HIP_KERNELS_WITH_GPU
TORCH_LIBRARY_IMPL(hip_kernels, CUDA, library) {
    library.impl("deformable_aggregation", &forward_gpu);
    library.impl("deformable_aggregation_backward", &backward_gpu);
}
#endif

}  // namespace hip_kernels::binding
