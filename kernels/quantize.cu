// Computes: int8 codes and steps of groups of 32 inputs, bit for bit those of cpu::Columns.
// Shapes:   x [n, cols] f32, cols a multiple of 32; scratch: codes [n, code_stride] i8, then steps [n, group_stride] f32.
//           Codes stand in the order of a q8_0 row. What lies behind the last group is not written, and nobody reads it.
// Moves:    reads 4 bytes, writes 1.125 a number.
// Launch:   a warp per group: grid (ceil(cols / 32 / warps), n), no shared memory.
#include "rows.cuh"

KERNEL __launch_bounds__(256) quantize(const float *x, u8 *scratch, int cols, int n) {
    const int lane = threadIdx.x % WARP, column = blockIdx.y;
    const int group = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (group >= cols / GROUP) return;
    const float value = x[size_t(column) * cols + group * GROUP + lane];
    const float step = warp_max(fabsf(value)) / 127.0f;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    // Adding 1.5 * 2^23 pushes the fraction out: rounds to nearest, ties to even.
    const float magic = 12582912.0f;
    const int code = int(__float_as_uint(value * inverse + magic)) - int(__float_as_uint(magic));
    // The place of number `lane` of the group (formats::rows::place).
    const int start = group * GROUP;
    const int at = start < cols / PACK * PACK
                       ? start / PACK * PACK + lane / 4 * 64 + start % PACK / GROUP * 4 + lane % 4
                       : start + lane;
    scratch[size_t(column) * code_stride(cols) + at] = u8(code);
    if (lane == 0) {
        float *steps = reinterpret_cast<float *>(scratch + size_t(n) * code_stride(cols));
        steps[size_t(column) * group_stride(cols) + group] = step;
    }
}
