// The device side of a binding: the current stream, and the check after a launch. No CUDA or HIP header is needed here:
// PyTorch's stable C interface has the stream, and its own device guard serves both platforms.
#pragma once

#include "prelude.h"

#ifdef HIP_KERNELS_WITH_GPU
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace hip_kernels::binding {

inline Stream current_stream(const at::Tensor& tensor) {
    void* stream = nullptr;
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device(), &stream) == 0,
                "hip_kernels: no current stream for ", tensor.device());
    return stream;
}

inline void check_launch(int error, const char* operation) {
    TORCH_CHECK(error == 0, "hip_kernels: ", operation, " failed on the device: ", gpu::error_string(error));
}

inline at::Tensor workspace_for(size_t bytes, const at::Tensor& like) {
    return at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
}

}  // namespace hip_kernels::binding
#endif
