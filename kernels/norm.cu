// Computes: out = (x - mean) * weight / sqrt(variance + epsilon) + bias of each column (layer norm), or
//           out = x * weight / sqrt(mean of squares + epsilon) (RMS norm: `centred` is 0).
// Shapes:   x, out [n, hidden] f32; weight, bias [hidden] or null for ones and zeros. out may be x.
// Moves:    reads 4 * hidden twice (the second time from L2), writes it once, per column.
// Launch:   a block per column, 4 bytes of shared memory per warp.
#include "common.cuh"

KERNEL __launch_bounds__(1024)
    normalise(const float *x, const float *weight, const float *bias, float *out, int hidden, float epsilon, int centred) {
    float *room = reinterpret_cast<float *>(dynamic_shared);
    x += size_t(blockIdx.x) * hidden;
    out += size_t(blockIdx.x) * hidden;
    float mean = 0.0f;
    if (centred) {
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) mean += x[i];
        mean = block_sum(mean, room) / float(hidden);
    }
    float squares = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) squares = fmaf(x[i] - mean, x[i] - mean, squares);
    const float scale = 1.0f / sqrtf(block_sum(squares, room) / float(hidden) + epsilon);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float value = (x[i] - mean) * scale * (weight ? weight[i] : 1.0f);
        out[i] = value + (bias ? bias[i] : 0.0f);
    }
}
