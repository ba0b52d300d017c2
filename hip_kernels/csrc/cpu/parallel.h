#pragma once

#include <cstdint>

namespace hip_kernels::cpu {

// Runs body(i) for i in [0, count), on several threads where the compiler has OpenMP (PyTorch's own thread count).
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (count > 1)
#endif
    for (int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace hip_kernels::cpu
