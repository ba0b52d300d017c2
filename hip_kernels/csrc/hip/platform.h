// One name for what HIP and CUDA spell differently. The kernels are HIP C++ and include this file alone.
//
// Groups of lanes that work together are at most 32 wide and named by their width, so that the same code is right for waves
// of 64 (gfx9), of 32 (gfx10 and later) and for CUDA's warps.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
using hipStream_t = cudaStream_t;
#define hipGetLastError cudaGetLastError
#define hipGetErrorString cudaGetErrorString
#define hipMemsetAsync cudaMemsetAsync
#define hipError_t cudaError_t
#define hipSuccess cudaSuccess
#define hipErrorInvalidValue cudaErrorInvalidValue
#else
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#endif

#include "../kernels.h"

// The second argument of __launch_bounds__ is blocks of a multiprocessor for CUDA, waves of a SIMD for HIP.
#if defined(__CUDACC__)
#define HIP_KERNELS_BOUNDS(threads, blocks, waves) __launch_bounds__(threads, blocks)
#else
#define HIP_KERNELS_BOUNDS(threads, blocks, waves) __launch_bounds__(threads, waves)
#endif

namespace hip_kernels::gpu {

constexpr int kBlock = 256;

inline hipStream_t native(Stream stream) { return static_cast<hipStream_t>(stream); }

// bfloat16 as its bits: ROCm releases disagree about the header of its type.
struct BFloat16 {
    uint16_t bits;
};

#if defined(__CUDACC__)
using Half = __half;
#else
using Half = _Float16;
#endif

// The type that sums are made in.
template <typename T>
struct Accumulate {
    using type = float;
};
template <>
struct Accumulate<double> {
    using type = double;
};
template <typename T>
using accumulate_t = typename Accumulate<T>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(Half x) { return float(x); }
__device__ inline float widen(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <typename T, typename A>
__device__ inline T narrow(A x) {
    return T(x);
}
// To nearest, ties to even; NaN stays NaN.
template <>
__device__ inline BFloat16 narrow<BFloat16, float>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {uint16_t(0x7fc0)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

// V consecutive elements, moved by one instruction of up to 16 bytes.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
    T at[V];
};

template <typename T, int V>
__device__ inline Pack<T, V> load(const T* from) {
    return *reinterpret_cast<const Pack<T, V>*>(from);
}

template <typename T, int V>
__device__ inline void store(T* to, const Pack<T, V>& value) {
    *reinterpret_cast<Pack<T, V>*>(to) = value;
}

// Sum over `width` neighbouring lanes (a power of two up to 32); every lane of the wave has to call it.
template <typename A>
__device__ inline A sum_over_lanes(A value, int width) {
    for (int step = width >> 1; step > 0; step >>= 1) {
#if defined(__CUDACC__)
        value += __shfl_xor_sync(0xffffffffu, value, step, 32);
#else
        value += __shfl_xor(value, step, 32);
#endif
    }
    return value;
}

// The value that one lane of the wave has; every lane has to call it.
template <typename A>
__device__ inline A from_lane(A value, int lane) {
#if defined(__CUDACC__)
    return __shfl_sync(0xffffffffu, value, lane);
#else
    return __shfl(value, lane);
#endif
}

// One bit a lane of the whole wave: 64 bits on gfx9, 32 elsewhere.
__device__ inline uint64_t wave_ballot(bool predicate) {
#if defined(__CUDACC__)
    return __ballot_sync(0xffffffffu, predicate);
#else
    return __ballot(predicate);
#endif
}

__device__ inline int wave_lane() { return int(threadIdx.x) & (warpSize - 1); }
__device__ inline int wave_index() { return int(threadIdx.x) / warpSize; }

__device__ inline int count_bits(uint64_t mask) { return __popcll(mask); }

__device__ inline int first_bit(uint64_t mask) { return __ffsll(static_cast<unsigned long long>(mask)) - 1; }

// Adds without a return value, by the hardware's own instruction rather than a compare-and-swap loop.
template <typename A>
__device__ inline void atomic_add(A* to, A value) {
#if defined(__CUDACC__)
    atomicAdd(to, value);
#else
    unsafeAtomicAdd(to, value);
#endif
}

// V sums to V neighbouring places: one 16-byte reduction per four floats where the hardware has it (sm_90).
template <typename A, int V>
__device__ inline void atomic_add_pack(A* to, const A (&value)[V]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (sizeof(A) == 4 && V % 4 == 0) {
#pragma unroll
        for (int v = 0; v < V; v += 4) {
            atomicAdd(reinterpret_cast<float4*>(to + v), make_float4(value[v], value[v + 1], value[v + 2], value[v + 3]));
        }
    } else
#endif
    {
#pragma unroll
        for (int v = 0; v < V; ++v) atomic_add(to + v, value[v]);
    }
}

// Product and quotient without contraction into a fused operation, for results that must equal the CPU's.
__device__ inline float mul_exact(float a, float b) {
#if defined(__CUDACC__)
    return __fmul_rn(a, b);
#else
#pragma clang fp contract(off)
    return a * b;
#endif
}

__device__ inline float sub_exact(float a, float b) {
#if defined(__CUDACC__)
    return __fsub_rn(a, b);
#else
#pragma clang fp contract(off)
    return a - b;
#endif
}

__device__ inline float add_exact(float a, float b) {
#if defined(__CUDACC__)
    return __fadd_rn(a, b);
#else
#pragma clang fp contract(off)
    return a + b;
#endif
}

}  // namespace hip_kernels::gpu
