#include "checks.h"
#include "device.h"

namespace hip_kernels::binding {
namespace {

using at::Tensor;
using NmsResult = std::tuple<Tensor, Tensor>;

template <typename Launch>
NmsResult batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& classes, double iou_threshold,
                      int64_t max_detections, const Launch& launch) {
    check_dim(boxes, 3, "boxes", "(B, A, 4)");
    check_size(boxes, 2, 4, "boxes", "(B, A, 4)");
    check_dim(scores, 2, "scores", "(B, A)");
    check_dim(classes, 2, "classes", "(B, A)");
    for (int64_t axis = 0; axis < 2; ++axis) {
        check_size(scores, axis, boxes.size(axis), "scores", "(B, A)");
        check_size(classes, axis, boxes.size(axis), "classes", "(B, A)");
    }
    check_dtype(boxes, at::kFloat, "boxes");
    check_dtype(scores, at::kFloat, "scores");
    check_dtype(classes, at::kLong, "classes");
    check_device(scores, boxes, "scores");
    check_device(classes, boxes, "classes");
    TORCH_CHECK_VALUE(iou_threshold >= 0 && iou_threshold <= 1, "hip_kernels: expected iou_threshold in [0, 1], got ",
                iou_threshold);
    TORCH_CHECK_VALUE(max_detections > 0 && max_detections <= kMaxDetections, "hip_kernels: expected max_detections from 1 to ",
                kMaxDetections, ", got ", max_detections);
    TORCH_CHECK_VALUE(boxes.size(0) * boxes.size(1) < (int64_t(1) << 31),
                "hip_kernels: expected fewer than 2^31 candidates in a batch, got ", boxes.size(0) * boxes.size(1));
    const Tensor b = dense(boxes), s = scores.contiguous(), c = classes.contiguous();
    const Tensor kept = at::empty({boxes.size(0), max_detections}, c.options());
    const Tensor count = at::empty({boxes.size(0)}, c.options());
    launch(BatchedNms{boxes.size(0), boxes.size(1), max_detections, float(iou_threshold), b.const_data_ptr<float>(),
                      s.const_data_ptr<float>(), c.const_data_ptr<int64_t>(), kept.mutable_data_ptr<int64_t>(),
                      count.mutable_data_ptr<int64_t>()});
    return {kept, count};
}

NmsResult batched_nms_cpu(const Tensor& boxes, const Tensor& scores, const Tensor& classes, double iou_threshold,
                          int64_t max_detections) {
    return batched_nms(boxes, scores, classes, iou_threshold, max_detections,
                       [](const BatchedNms& p) { cpu::batched_nms(p); });
}

#ifdef HIP_KERNELS_WITH_GPU
NmsResult batched_nms_gpu(const Tensor& boxes, const Tensor& scores, const Tensor& classes, double iou_threshold,
                          int64_t max_detections) {
    const c10::DeviceGuard guard(boxes.device());
    return batched_nms(boxes, scores, classes, iou_threshold, max_detections, [&](const BatchedNms& p) {
        size_t bytes = 0;
        check_launch(gpu::batched_nms_workspace_bytes(p, &bytes), "batched_nms");
        const Tensor workspace = workspace_for(bytes, boxes);
        check_launch(gpu::batched_nms(p, workspace.mutable_data_ptr(), bytes, current_stream(boxes)), "batched_nms");
    });
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(hip_kernels, CPU, library) { library.impl("batched_nms", &batched_nms_cpu); }

#ifdef HIP_KERNELS_WITH_GPU
TORCH_LIBRARY_IMPL(hip_kernels, CUDA, library) { library.impl("batched_nms", &batched_nms_gpu); }
#endif

}  // namespace hip_kernels::binding
