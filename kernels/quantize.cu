// Computes: int8 codes and steps of groups of 32 inputs, bit for bit those of cpu::Columns; round_inputs: each code times its step, for
//           rows of any type; halves: inputs rounded to f16, for tensor cores.
// Shapes:   x [n, cols] f32, cols a multiple of 32; coded [n, ceil(cols / 512)] packs of 512 codes and 16 steps (rows.cuh).
//           What lies behind the last group is not written, and nobody reads it. rounded [n, cols] f32. halved [n, halved_bytes],
//           of any number of columns.
// Moves:    reads 4 bytes, writes 1.125 a number, or 4. halves: reads 4 twice, writes 2.
// Launch:   a warp per group: grid (ceil(cols / 32 / warps), n), no shared memory. halves: 256 threads per column, grid (n), 32 bytes.
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

KERNEL __launch_bounds__(256) halves(const float *x, u8 *halved, int cols) {
    float *const room = reinterpret_cast<float *>(dynamic_shared); // [warps]
    const float *const from = x + size_t(blockIdx.x) * cols;
    u8 *const to = halved + blockIdx.x * halved_bytes(cols);
    const int numbers = halved_numbers(cols);
    float most = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) most = fmaxf(most, fabsf(from[i]));
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = most;
    __syncthreads();
    for (int w = 0; w < int(blockDim.x) / WARP; w++) most = fmaxf(most, room[w]);
    // Exponents with their bias of 127. The power stays one whose inverse is a normal number, too.
    const u32 power = min(268u - (__float_as_uint(most) >> 23), 253u);
    const float scale = __uint_as_float(power << 23);
    for (int i = threadIdx.x; i < numbers; i += blockDim.x)
        reinterpret_cast<u16 *>(to)[i] = i < cols ? float_to_half(from[i] * scale) : 0;
    if (threadIdx.x == 0) reinterpret_cast<float *>(to + numbers * 2)[0] = __uint_as_float((254u - power) << 23);
}
