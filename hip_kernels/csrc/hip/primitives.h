// The two primitives that come from a vendor library: stable radix sort of pairs and exclusive sum; rocPRIM on AMD, CUB on
// NVIDIA. Both ask for their workspace when `workspace` is null and launch otherwise. 0 or an error of the runtime.
#pragma once

#include "platform.h"

#if defined(__CUDACC__)
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#else
#include <rocprim/device/device_radix_sort.hpp>
#include <rocprim/device/device_scan.hpp>
#endif

namespace hip_kernels::gpu {

// Sorts by the lowest `bits` bits of the keys.
template <typename Key>
int sort_pairs(void* workspace, size_t& bytes, const Key* keys, Key* sorted_keys, const uint32_t* values, uint32_t* sorted_values,
               int count, int bits, hipStream_t stream) {
#if defined(__CUDACC__)
    return int(cub::DeviceRadixSort::SortPairs(workspace, bytes, keys, sorted_keys, values, sorted_values, count, 0, bits, stream));
#else
    return int(rocprim::radix_sort_pairs(workspace, bytes, keys, sorted_keys, values, sorted_values, unsigned(count), 0u,
                                         unsigned(bits), stream));
#endif
}

inline int exclusive_sum(void* workspace, size_t& bytes, const uint32_t* input, uint32_t* output, int count, hipStream_t stream) {
#if defined(__CUDACC__)
    return int(cub::DeviceScan::ExclusiveSum(workspace, bytes, input, output, count, stream));
#else
    return int(rocprim::exclusive_scan(workspace, bytes, input, output, 0u, size_t(count), rocprim::plus<uint32_t>(), stream));
#endif
}

// Cuts a workspace into aligned arrays; with a null base it only counts.
class Workspace {
public:
    explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
    template <typename T>
    T* take(size_t count) {
        T* pointer = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (count * sizeof(T) + 255) / 256 * 256;
        return pointer;
    }
    size_t used() const { return used_; }

private:
    char* base_;
    size_t used_ = 0;
};

inline unsigned blocks_for(int64_t threads) { return unsigned((threads + kBlock - 1) / kBlock); }

inline int bits_for(uint64_t largest) {
    int bits = 1;
    while (bits < 64 && (largest >> bits) != 0) ++bits;
    return bits;
}

}  // namespace hip_kernels::gpu
