// Checks of the operations' arguments. A message says what was expected and what came.
#pragma once

#include "prelude.h"

namespace hip_kernels::binding {

inline void check_dim(const at::Tensor& tensor, int64_t dim, const char* name, const char* layout) {
    TORCH_CHECK_VALUE(tensor.dim() == dim, "hip_kernels: expected ", name, " of shape ", layout, ", got ", tensor.sizes());
}

inline void check_size(const at::Tensor& tensor, int64_t axis, int64_t size, const char* name, const char* layout) {
    TORCH_CHECK_VALUE(tensor.size(axis) == size, "hip_kernels: expected ", name, " of shape ", layout, " with size ", size,
                " in dimension ", axis, ", got ", tensor.sizes());
}

inline void check_dtype(const at::Tensor& tensor, at::ScalarType dtype, const char* name) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "hip_kernels: expected ", name, " of dtype ", dtype, ", got ",
                tensor.scalar_type());
}

inline void check_device(const at::Tensor& tensor, const at::Tensor& like, const char* name) {
    TORCH_CHECK_VALUE(tensor.device() == like.device(), "hip_kernels: expected ", name, " on ", like.device(), ", got ",
                tensor.device());
}

// Dense and on a 16-byte boundary, as the wide loads need; a view may start anywhere.
inline at::Tensor dense(const at::Tensor& tensor) {
    const at::Tensor result = tensor.contiguous();
    return reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 == 0 ? result : result.clone();
}

inline DType dtype_of(const at::Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return DType::kFloat32;
        case at::kHalf: return DType::kFloat16;
        case at::kBFloat16: return DType::kBFloat16;
        case at::kDouble: return DType::kFloat64;
        default: break;
    }
    TORCH_CHECK_TYPE(false, "hip_kernels: expected ", name, " of dtype float32, float16, bfloat16 or float64, got ",
                tensor.scalar_type());
}

}  // namespace hip_kernels::binding
