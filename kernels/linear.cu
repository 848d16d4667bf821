// Computes: out = x weights^T + bias, then nothing, max(., 0), or out += that (device::Then).
// Shapes:   weights [rows] rows of `cols`; x [n, cols] f32, or its codes (quantize.cu) for grouped rows; bias [rows] or null;
//           out: `rows` numbers for each of n columns, `stride` apart.
// Moves:    every weight once for each N columns: rows * row_bytes. The inputs come from L1 and L2.
// Launch:   a warp per two rows (any: one): grid (ceil(rows / 2 / warps), ceil(n / N)); no shared memory.
//           linear_<type>_<N> for N = 1, 2, 4, 8 columns at once; linear_any_<N> for rows of any `type`.
#include "rows.cuh"

template <int QUANT, int N>
__device__ __forceinline__ void linear(const u8 *weights, const void *x, const float *bias, float *out, int rows, int cols,
                                       int n, int then, int stride, int type) {
    // Any type takes registers enough for one row.
    constexpr int R = QUANT == ANY ? 1 : 2;
    const int row = int(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * R, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int column = blockIdx.y * N, left = n - column;
    const size_t bytes = BlockForm<QUANT>(cols, 2, type).second;
    const u8 *these[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        // An odd last row is read twice, from cache.
        these[r] = weights + size_t(row + r < rows ? row + r : row) * bytes;
    }
    float sums[R][N];
    row_dots<QUANT, R, N>(these, input_from(x, column, cols), cols, left, sums, type);
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int c = 0; c < N; c++) {
            // Each lane stores a number of its own.
            if (lane != r * N + c || c >= left || row + r >= rows) continue;
            float *to = out + size_t(column + c) * stride + row + r;
            float sum = sums[r][c] + (bias ? bias[row + r] : 0.0f);
            if (then == 1) sum = fmaxf(sum, 0.0f);
            *to = then == 2 ? *to + sum : sum;
        }
    }
}

#define DEFINE(QUANT, type, N)                                                                                                \
    KERNEL __launch_bounds__(128, ROW_BLOCKS(N))                                                                               \
        linear_##type##_##N(const u8 *weights, const void *x, const float *bias, float *out, int rows, int cols, int n, int then, \
                            int stride, int quant) {                                                                           \
        linear<QUANT, N>(weights, x, bias, out, rows, cols, n, then, stride, quant);                                           \
    }
FOR_QUANTS_AND_WIDTHS(DEFINE)
FOR_WIDTHS(DEFINE, ANY, any)
#undef DEFINE
