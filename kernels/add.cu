// Computes: to = (to + from) * scale.
// Shapes:   [count] f32 each, 16-byte aligned.
// Moves:    reads 8, writes 4 bytes a number.
// Launch:   a thread per 4 numbers, any grid; no shared memory.
#include "common.cuh"

KERNEL __launch_bounds__(256) add(const float *from, float *to, u32 count, float scale) {
    const u32 step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 i = first; i < count / 4; i += step) {
        const float4 a = reinterpret_cast<const float4 *>(from)[i];
        float4 b = reinterpret_cast<float4 *>(to)[i];
        b.x = (b.x + a.x) * scale;
        b.y = (b.y + a.y) * scale;
        b.z = (b.z + a.z) * scale;
        b.w = (b.w + a.w) * scale;
        reinterpret_cast<float4 *>(to)[i] = b;
    }
    const u32 rest = count / 4 * 4 + first;
    if (rest < count) to[rest] = (to[rest] + from[rest]) * scale;
}
