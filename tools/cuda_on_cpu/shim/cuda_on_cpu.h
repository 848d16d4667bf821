// CUDA's language for g++: what a kernel of this project may use, so that the sources in kernels/ compile unmodified.
//
// Each thread of a thread block is a fiber. __syncthreads, __syncwarp, shuffles and votes are meetings of fibers; between
// two meetings a fiber runs alone. Names of CUDA that are not here are not used by any kernel: add them when one needs them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUDA_ON_CPU 1
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// One block per thread of the system at a time, so a block's memory is that thread's. Dynamic memory only: it is filled with
// rubbish before each block and guarded behind its end, which memory declared with a size could not be.
#define __shared__ thread_local
#ifndef __global__
#define __global__
#endif

// Where a call stands: threads that meet at different places have not met.
#define CUDA_ON_CPU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace cuda_on_cpu {

extern thread_local uint3 thread_index, block_index, block_size, grid_size;

enum class Meeting { block, warp };
// Waits until all threads of the block, or the lanes of `mask`, are at this place of the source.
void meet(Meeting kind, unsigned mask, const char *file, int line);
// Leaves a word for the other lanes of `mask`, waits for them, and returns the words of all 32.
const uint64_t *exchange(unsigned mask, uint64_t word, const char *file, int line);
unsigned lane();

template <class T> uint64_t word_of(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves 8 bytes at most");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    return word;
}
template <class T> T value_of(uint64_t word) {
    T value;
    memcpy(&value, &word, sizeof value);
    return value;
}
template <class To, class From> To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return value_of<To>(word_of(from));
}

// A kernel as a function of pointers to its arguments, as the driver's launch has them.
using Run = void (*)(void *const *arguments);
struct Kernel {
    const char *name;
    Run run;
    const size_t *sizes; // of its arguments, bytes
    size_t arguments;
};
template <auto F> struct Call;
template <class... A, void (*F)(A...)> struct Call<F> {
    static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)...};
    template <size_t... I> static void apply(void *const *a, std::index_sequence<I...>) {
        F(*static_cast<std::remove_cv_t<A> *>(a[I])...);
    }
    static void run(void *const *a) { apply(a, std::index_sequence_for<A...>{}); }
    static constexpr Kernel kernel(const char *name) { return {name, &run, sizes, sizeof...(A)}; }
};

} // namespace cuda_on_cpu

#define threadIdx cuda_on_cpu::thread_index
#define blockIdx cuda_on_cpu::block_index
#define blockDim cuda_on_cpu::block_size
#define gridDim cuda_on_cpu::grid_size

static inline void __syncthreads(CUDA_ON_CPU_HERE) {
    cuda_on_cpu::meet(cuda_on_cpu::Meeting::block, ~0u, file, line);
}
static inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_HERE) {
    cuda_on_cpu::meet(cuda_on_cpu::Meeting::warp, mask, file, line);
}
template <class T> T __shfl_sync(unsigned mask, T value, int from, int = 32, CUDA_ON_CPU_HERE) {
    const uint64_t *words = cuda_on_cpu::exchange(mask, cuda_on_cpu::word_of(value), file, line);
    return cuda_on_cpu::value_of<T>(words[from & 31]);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int by, int = 32, CUDA_ON_CPU_HERE) {
    const uint64_t *words = cuda_on_cpu::exchange(mask, cuda_on_cpu::word_of(value), file, line);
    return cuda_on_cpu::value_of<T>(words[(cuda_on_cpu::lane() ^ by) & 31]);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int = 32, CUDA_ON_CPU_HERE) {
    const uint64_t *words = cuda_on_cpu::exchange(mask, cuda_on_cpu::word_of(value), file, line);
    unsigned lane = cuda_on_cpu::lane();
    return cuda_on_cpu::value_of<T>(words[lane >= by ? lane - by : lane]);
}
static inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_ON_CPU_HERE) {
    const uint64_t *words = cuda_on_cpu::exchange(mask, vote != 0, file, line);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++) votes |= (mask >> i & 1 && words[i] ? 1u : 0u) << i;
    return votes;
}

static inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::bits_of<float>(bits); }
static inline unsigned __float_as_uint(float value) { return cuda_on_cpu::bits_of<unsigned>(value); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

// The kernels' own dp4a and half conversions; on a GPU these are one instruction each.
static inline int dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return sum;
}
static inline float half_to_float(unsigned short bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
}
static inline unsigned short float_to_half(float value) {
    _Float16 half = value;
    unsigned short bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

// The kernels' own products of tensor cores. A lane leaves its fragments of both matrices for the others and computes its part of the sum;
// where a number lies is as the PTX ISA draws mma.m16n8k8 of .f16 and mma.m8n8k16 of .s8. Floats are added in the order of k, each product
// and sum rounded once: a card's order and rounding are not documented.
static inline void mma_halves(float (&d)[4], unsigned a0, unsigned a1, unsigned b, CUDA_ON_CPU_HERE) {
    const unsigned group = cuda_on_cpu::lane() / 4, in_group = cuda_on_cpu::lane() % 4;
    // Of rows `group` and `group` + 8, two numbers in each word. Copied: lanes that are ahead write there after the next meeting.
    uint64_t rows[4];
    memcpy(rows, cuda_on_cpu::exchange(~0u, a0 | uint64_t(a1) << 32, file, line) + group * 4, sizeof rows);
    const uint64_t *const columns = cuda_on_cpu::exchange(~0u, b, file, line);
    for (unsigned i = 0; i < 4; i++) {
        const unsigned column = in_group * 2 + i % 2, shift = i / 2 * 32;
        for (unsigned k = 0; k < 8; k++) {
            const unsigned half = k % 2 * 16;
            const float row_number = half_to_float(uint16_t(rows[k / 2] >> (shift + half)));
            d[i] = fmaf(row_number, half_to_float(uint16_t(columns[column * 4 + k / 2] >> half)), d[i]);
        }
    }
}
static inline void mma_bytes(int (&d)[2], unsigned a, unsigned b, CUDA_ON_CPU_HERE) {
    const unsigned group = cuda_on_cpu::lane() / 4, in_group = cuda_on_cpu::lane() % 4;
    const uint64_t *const words = cuda_on_cpu::exchange(~0u, a | uint64_t(b) << 32, file, line);
    for (unsigned i = 0; i < 2; i++) {
        const unsigned column = in_group * 2 + i;
        for (unsigned k = 0; k < 4; k++) d[i] = dp4a(int(words[group * 4 + k]), int(words[column * 4 + k] >> 32), d[i]);
    }
}

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
