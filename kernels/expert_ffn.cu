// Computes: the experts in slots for a few tokens (device::ExpertFfn): act(gate) * up of each chosen expert, then the sum of their downs,
//           each times its weight; with biases of gate, up and down where they are given.
// Shapes:   gates, ups [slots, ffn] rows of `hidden`, downs [slots, hidden] rows of `ffn`, all of any type without padding;
//           x [n, hidden] and acts [n, used, ffn] f32, rounded to what the types take (quantize.cu); chosen [n, used] (slot and, from bit 16
//           on, number of the expert, or NO_SLOT; weight as bits); input_bias [experts, 2 ffn] (gates, then ups) and down_bias [experts,
//           hidden] f32; out [n, hidden] f32.
// Moves:    every weight of the chosen experts once for each of their tokens; those that tokens share come from L2.
// Launch:   a warp per row: expert_gates grid (ceil(ffn / warps), n * used), expert_down grid (ceil(hidden / warps), n). A block whose
//           expert is in no slot ends at once. No shared memory.
#include "activation.cuh"
#include "rows.cuh"

constexpr u32 NO_SLOT = 0xffffffffu;
// What only experts have, beside the kinds that activation.cuh knows.
constexpr int GATED_CLAMPED = 3;
__device__ __forceinline__ size_t slot_of(uint2 at) { return at.x & 0xffffu; }
__device__ __forceinline__ size_t expert_of(uint2 at) { return at.x >> 16; }

// What gpt-oss has, where a NaN stays one: up and, from above, the gate are cut at 7; the sigmoid's gain is 1.702.
constexpr float CLAMP = 7.0f, GAIN = 1.702f;
__device__ __forceinline__ float clamped(float x) { return x > CLAMP ? CLAMP : x < -CLAMP ? -CLAMP : x; }
__device__ __forceinline__ float clamped_swish(float x) {
    const float gate = x > CLAMP ? CLAMP : x;
    return gate / (1.0f + expf(-GAIN * gate));
}

// The dot of one row with one column, by a warp.
__device__ __forceinline__ float row_dot(const u8 *row, const float *column, int cols, int type) {
    const u8 *const rows[1] = {row};
    float sums[1][1];
    row_dots<ANY, 1, 1>(rows, {column, nullptr}, cols, 1, sums, type);
    return sums[0][0];
}

KERNEL __launch_bounds__(128) expert_gates(const u8 *gates, const u8 *ups, const float *bias, const float *x, const uint2 *chosen,
                                           float *acts, int hidden, int ffn, int used, int gate_bytes, int up_bytes, int types,
                                           int biased, int kind, int activation, float parameter) {
    const uint2 at = chosen[blockIdx.y];
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (at.x == NO_SLOT || row >= ffn) return;
    const size_t place = slot_of(at) * ffn + row;
    const float *const column = x + size_t(blockIdx.y / used) * hidden;
    float sums[2];
    // What is gate and up is multiplied once.
    const int parts = gates == ups ? 1 : 2;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
        const u8 *const of = part == 0 ? gates + place * gate_bytes : ups + place * up_bytes;
        const float sum = row_dot(of, column, hidden, type_of(types, part));
        sums[part == 0 ? 0 : 1] = sum;
    }
    if (threadIdx.x % WARP != 0) return;
    if (parts == 1) sums[1] = sums[0];
    if (biased) {
        // Looked up again: kept in a register meanwhile, others spill.
        const u32 expert = reinterpret_cast<const volatile u32 *>(chosen + blockIdx.y)[0] >> 16;
        const float *const of = bias + size_t(expert) * 2 * ffn + row;
        sums[0] += of[0];
        sums[1] += of[ffn];
    }
    float *const act = acts + size_t(blockIdx.y) * ffn + row;
    if (kind == GATED_CLAMPED) {
        *act = clamped_swish(sums[0]) * (1.0f + clamped(sums[1]));
        return;
    }
    const float gate = apply(activation, parameter, sums[0]);
    *act = gate * (kind == GATED_BOTH ? apply(activation, parameter, sums[1]) : sums[1]);
}

KERNEL __launch_bounds__(128) expert_down(const u8 *downs, const float *bias, const float *acts, const uint2 *chosen, float *out,
                                          int hidden, int ffn, int used, int bytes, int type, int biased) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= hidden) return;
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < used; k++) {
        const int pair = blockIdx.y * used + k;
        const uint2 at = chosen[pair];
        if (at.x == NO_SLOT) continue;
        const u8 *const of = downs + (slot_of(at) * hidden + row) * bytes;
        float product = row_dot(of, acts + size_t(pair) * ffn, ffn, type);
        if (biased) product += bias[expert_of(at) * hidden + row];
        sum = fmaf(__uint_as_float(at.y), product, sum);
    }
    if (threadIdx.x % WARP == 0) out[size_t(blockIdx.y) * hidden + row] = sum;
}
