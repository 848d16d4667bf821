// Computes: masks[i] = bit b where scores[b][i] >= the least score for a neuron that lies where i lies.
// Shapes:   scores [n, ffn] f32; bucket [slots]; masks [ffn].
// Moves:    4 * n * ffn bytes of scores, and those of resident neurons again.
// Launch:   select_all for neurons that lie elsewhere, a thread per neuron; then select_resident puts right those that the bucket
//           names, a thread per slot. No shared memory.
#include "common.cuh"

__device__ __forceinline__ u32 wanted(const float *scores, u32 neuron, int ffn, int n, float least) {
    u32 mask = 0;
    for (int b = 0; b < n; b++) mask |= (scores[size_t(b) * ffn + neuron] >= least ? 1u : 0u) << b;
    return mask;
}

KERNEL __launch_bounds__(256) select_all(const float *scores, u32 *masks, int ffn, int n, float least) {
    const u32 neuron = blockIdx.x * blockDim.x + threadIdx.x;
    if (neuron < u32(ffn)) masks[neuron] = wanted(scores, neuron, ffn, n, least);
}

// A neuron is in one slot at most: no two threads write the same mask.
KERNEL __launch_bounds__(256)
    select_resident(const float *scores, const u32 *bucket, u32 *masks, int ffn, int slots, int n, float least) {
    const u32 slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= u32(slots)) return;
    const u32 neuron = bucket[slot];
    if (neuron != NONE) masks[neuron] = wanted(scores, neuron, ffn, n, least);
}
