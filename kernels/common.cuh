// What every kernel uses: halves, loads, sums over a warp and a block, rows of weights, int8 codes.
//
// One rounding is one operation: sums are written as fmaf and compiled with -fmad=false, so that a GPU and the CPU shim of
// tools/cuda_on_cpu round alike. No float is ever added by an atomic: results do not depend on who was faster.
//
// Shared memory is always the launch's own (dynamic_shared): the shim fills it with rubbish and guards its end.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void

constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;
// No neuron in this slot (device::NONE).
constexpr u32 NONE = 0xffffffffu;

// As formats::rows::Quant counts them.
constexpr int F32 = 0, F16 = 1, Q8 = 2, Q4 = 3;
// A type that is said at run time (blocks.cuh).
constexpr int ANY = -1;
// formats::rows: numbers that share a scale, numbers of a pack, alignment of a row.
constexpr int GROUP = 32, PACK = 512, ROW_ALIGN = 64;

// math.h's INFINITY is in no header that NVRTC has.
#define BELOW_ALL __uint_as_float(0xff800000u)

extern __shared__ __align__(16) u8 dynamic_shared[];

#ifndef CUDA_ON_CPU
// Not from cuda_fp16.h: users have no toolkit's headers.
__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// The sum and the products of four signed bytes each. Not __dp4a: NVRTC 12.1 and 12.2 leave that a call of a function that is
// nowhere, in PTX that nothing assembles.
__device__ __forceinline__ int dp4a(int a, int b, int sum) {
    int out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}
// d += a b, by the tensor cores: all lanes of a warp call it together, and each has a part of the matrices (the PTX ISA's fragments).
// With g = lane / 4 and t = lane % 4, a [16, 8] of f16: a0 has numbers 2t and 2t + 1 of row g, a1 those of row g + 8; b [8, 8]: the
// same numbers of column g; d [16, 8] f32: columns 2t and 2t + 1 of row g, then of row g + 8. These are the shapes that every card from
// sm_75 on has. In which order and with which rounding a card adds up floats is its own.
__device__ __forceinline__ void mma_halves(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
// The same of signed bytes, exactly: a [8, 16]: bytes 4t to 4t + 4 of row g; b [16, 8]: the same of column g; d [8, 8] of int: columns
// 2t and 2t + 1 of row g.
__device__ __forceinline__ void mma_bytes(int (&d)[2], u32 a, u32 b) {
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(a), "r"(b));
}
// Weights are read once: they must not push the inputs, which are read by every warp, out of L1. Nothing writes them while a
// kernel runs, so these are functions of their address, and the compiler may move them.
__device__ __forceinline__ uint4 load_once(const uint4 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 load_once(const uint2 *at) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ u32 load_once(const u32 *at) {
    u32 v;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
#else
template <class T> static T load_once(const T *at) { return *at; }
#endif

// Byte k of four unsigned ones as a float, less `bias`: as the mantissa of 2^23, which no conversion unit has to touch.
__device__ __forceinline__ float byte_number(u32 bytes, int k, float bias) {
    return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7650u | u32(k))) - (8388608.0f + bias);
}

__device__ __forceinline__ float low_half(u32 two) { return half_to_float(u16(two)); }
__device__ __forceinline__ float high_half(u32 two) { return half_to_float(u16(two >> 16)); }

// Sum over the lanes, the same in all of them and in the same order.
template <class T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) value += __shfl_xor_sync(ALL, value, by);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, by));
    return value;
}

// Sum over the block, the same in all threads. `room` is a float for each warp; another sum may follow at once.
__device__ __forceinline__ float block_sum(float value, float *room) {
    const int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    value = warp_sum(value);
    __syncthreads(); // whoever read the room before has done so
    if (lane == 0) room[threadIdx.x / WARP] = value;
    __syncthreads();
    return warp_sum(lane < warps ? room[lane] : 0.0f);
}

// formats::rows::Quant::row_bytes
template <int QUANT> __device__ __forceinline__ size_t row_bytes(int cols) {
    const size_t bytes = QUANT == F32   ? size_t(cols) * 4
                         : QUANT == F16 ? size_t(cols) * 2
                         : QUANT == Q8  ? size_t(cols) + cols / GROUP * 2
                                        : size_t(cols) / 2 + cols / GROUP * 2;
    return (bytes + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
}
