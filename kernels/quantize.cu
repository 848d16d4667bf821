// Computes: int8 codes and steps of groups of 32 inputs, bit for bit those of cpu::Columns; round_inputs: each code times its step, for
//           rows of any type.
// Shapes:   x [n, cols] f32, cols a multiple of 32; coded [n, ceil(cols / 512)] packs of 512 codes and 16 steps (rows.cuh).
//           What lies behind the last group is not written, and nobody reads it. rounded [n, cols] f32.
// Moves:    reads 4 bytes, writes 1.125 a number, or 4.
// Launch:   a warp per group: grid (ceil(cols / 32 / warps), n), no shared memory.
#include "rows.cuh"

// The code of this lane's number of a group, and the group's step. Of a step so small that its inverse is infinite only the low byte of
// the difference below is a code: 0.
__device__ __forceinline__ int code_of(float value, float &step) {
    step = warp_max(fabsf(value)) / 127.0f;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    // Adding 1.5 * 2^23 pushes the fraction out: rounds to nearest, ties to even.
    const float magic = 12582912.0f;
    return static_cast<signed char>(__float_as_uint(value * inverse + magic) - __float_as_uint(magic));
}

KERNEL __launch_bounds__(256) quantize(const float *x, u8 *coded, int cols) {
    const int lane = threadIdx.x % WARP, column = blockIdx.y;
    const int group = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (group >= cols / GROUP) return;
    float step;
    const int code = code_of(x[size_t(column) * cols + group * GROUP + lane], step);
    // The place of number `lane` of the group (formats::rows::place).
    const int start = group * GROUP, in_pack = group % (PACK / GROUP);
    u8 *const pack = coded + size_t(column) * coded_bytes(cols) + start / PACK * CODED_PACK;
    pack[start < cols / PACK * PACK ? lane / 4 * 64 + in_pack * 4 + lane % 4 : start % PACK + lane] = u8(code);
    if (lane == 0) reinterpret_cast<float *>(pack + PACK)[in_pack] = step;
}

KERNEL __launch_bounds__(256) round_inputs(const float *x, float *rounded, int cols) {
    const int lane = threadIdx.x % WARP, group = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (group >= cols / GROUP) return;
    const size_t at = size_t(blockIdx.y) * cols + group * GROUP + lane;
    float step;
    const int code = code_of(x[at], step);
    rounded[at] = float(code) * step;
}
