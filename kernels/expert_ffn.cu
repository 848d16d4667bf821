// Computes: the experts in slots for a few tokens (device::ExpertFfn): act(gate) * up of each chosen expert, then the sum of their downs,
//           each times its weight.
// Shapes:   gates, ups [slots, ffn] rows of `hidden`, downs [slots, hidden] rows of `ffn`, all of any type without padding;
//           x [n, hidden] and acts [n, used, ffn] f32, rounded to what the types take (quantize.cu); chosen [n, used] (slot or NO_SLOT,
//           weight as bits); out [n, hidden] f32.
// Moves:    every weight of the chosen experts once for each of their tokens; those that tokens share come from L2.
// Launch:   a warp per row: expert_gates grid (ceil(ffn / warps), n * used), expert_down grid (ceil(hidden / warps), n). A block whose
//           expert is in no slot ends at once. No shared memory.
#include "activation.cuh"
#include "rows.cuh"

constexpr u32 NO_SLOT = 0xffffffffu;

// The dot of one row with one column, by a warp.
__device__ __forceinline__ float row_dot(const u8 *row, const float *column, int cols, int type) {
    const u8 *const rows[1] = {row};
    float sums[1][1];
    row_dots<ANY, 1, 1>(rows, {column, nullptr}, cols, 1, sums, type);
    return sums[0][0];
}

KERNEL __launch_bounds__(128) expert_gates(const u8 *gates, const u8 *ups, const float *x, const uint2 *chosen, float *acts,
                                           int hidden, int ffn, int used, int gate_bytes, int up_bytes, int types, int kind,
                                           int activation, float parameter) {
    const uint2 at = chosen[blockIdx.y];
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (at.x == NO_SLOT || row >= ffn) return;
    const size_t place = size_t(at.x) * ffn + row;
    const float *const column = x + size_t(blockIdx.y / used) * hidden;
    float sums[2];
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const u8 *const of = part == 0 ? gates + place * gate_bytes : ups + place * up_bytes;
        const float sum = row_dot(of, column, hidden, type_of(types, part));
        sums[part == 0 ? 0 : 1] = sum;
    }
    if (threadIdx.x % WARP != 0) return;
    const float gate = apply(activation, parameter, sums[0]);
    acts[size_t(blockIdx.y) * ffn + row] = gate * (kind == GATED_BOTH ? apply(activation, parameter, sums[1]) : sums[1]);
}

KERNEL __launch_bounds__(128) expert_down(const u8 *downs, const float *acts, const uint2 *chosen, float *out, int hidden, int ffn,
                                          int used, int bytes, int type) {
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= hidden) return;
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < used; k++) {
        const int pair = blockIdx.y * used + k;
        const uint2 at = chosen[pair];
        if (at.x == NO_SLOT) continue;
        const u8 *const of = downs + (size_t(at.x) * hidden + row) * bytes;
        sum = fmaf(__uint_as_float(at.y), row_dot(of, acts + size_t(pair) * ffn, ffn, type), sum);
    }
    if (threadIdx.x % WARP == 0) out[size_t(blockIdx.y) * hidden + row] = sum;
}
