// Computes: out = x weights^T + bias, then nothing, max(., 0), or out += that (device::Then), for more columns than rows are
//           worth reading by themselves: a prompt, or many sequences.
// Shapes:   as linear.cu.
// Moves:    every weight once for each tile of columns, every input once for each tile of rows.
// Launch:   256 threads make a tile, grid (ceil(rows / tile's), ceil(n / tile's)):
//           matmul_f32, matmul_f16: 64 rows by 32 columns, 13312 bytes of shared memory.
//           matmul_any: as these, rows of any `type`.
//           matmul_wide_f32, matmul_wide_f16: 128 rows by 64 columns, 26112 bytes.
//           matmul_q8_0, matmul_q4_0: 32 rows by 32 columns, 37888 bytes.
//           matmul_tensor_f16: by tensor cores, x is [n, halved_bytes]: 128 rows by 64 columns, 27648 bytes.
//           matmul_tensor_q8_0, matmul_tensor_q4_0: 32 rows by 32 columns, 48128 bytes; the same bits as without tensor cores.
#include "tensor_tiles.cuh"

__device__ __forceinline__ void finish(float *out, const float *bias, int row, int rows, int column, int n, int then, int stride,
                                       float sum) {
    if (row >= rows || column >= n) return;
    float *to = out + size_t(column) * stride + row;
    if (bias) sum += bias[row];
    if (then == 1) sum = fmaxf(sum, 0.0f);
    *to = then == 2 ? *to + sum : sum;
}

template <int QUANT, int S, int C>
__device__ __forceinline__ void float_matmul(const u8 *weights, const float *x, const float *bias, float *out, int rows, int cols,
                                             int n, int then, int stride, int type) {
    using Tile = FloatTile<S, C>;
    const int first_row = blockIdx.x * S * SET, first_column = blockIdx.y * Tile::COLUMNS;
    const size_t bytes = BlockForm<QUANT>(cols, 2, type).second;
    const auto at = [=](int s, int r) {
        const int row = first_row + s * SET + r;
        return row < rows ? weights + size_t(row) * bytes : nullptr;
    };
    float sums[S][4][C] = {};
    Tile::template dots<QUANT>(at, x, first_column, cols, n, type | type << 8, sums);
#pragma unroll
    for (int s = 0; s < S; s++) {
#pragma unroll
        for (int c = 0; c < C; c++) {
#pragma unroll
            for (int r = 0; r < 4; r++)
                finish(out, bias, first_row + s * SET + Tile::row() + r, rows, first_column + Tile::column() + c, n, then, stride,
                       sums[s][r][c]);
        }
    }
}

template <int QUANT, class Products>
__device__ __forceinline__ void grouped_matmul(const u8 *weights, const void *x, const float *bias, float *out, int rows, int cols,
                                               int n, int then, int stride, int) {
    using Tile = GroupedTile<QUANT, Products>;
    const int first_row = blockIdx.x * Tile::ROWS, first_column = blockIdx.y * Tile::COLUMNS;
    const size_t bytes = row_bytes<QUANT>(cols);
    const auto at = [=](int r) { return first_row + r < rows ? weights + size_t(first_row + r) * bytes : nullptr; };
    float sums[4] = {};
    Tile::dots(at, x, first_column, cols, n, sums);
#pragma unroll
    for (int i = 0; i < 4; i++)
        finish(out, bias, first_row + Tile::row(i), rows, first_column + Tile::column(i), n, then, stride, sums[i]);
}

__device__ __forceinline__ void half_matmul(const u8 *weights, const u8 *x, const float *bias, float *out, int rows, int cols, int n,
                                            int then, int stride, int) {
    const int first_row = blockIdx.x * HalfTile::ROWS, first_column = blockIdx.y * HalfTile::COLUMNS;
    const size_t bytes = row_bytes<F16>(cols);
    const auto at = [=](int r) { return first_row + r < rows ? weights + size_t(first_row + r) * bytes : nullptr; };
    HalfTile::Out sums = {};
    HalfTile::dots(at, x, first_column, cols, n, sums);
    HalfTile::each(sums, x, first_column, cols, n, [=](int row, int column, float sum) {
        finish(out, bias, first_row + row, rows, first_column + column, n, then, stride, sum);
    });
}

#define DEFINE(name, MATMUL, INPUT, BLOCKS)                                                                               \
    KERNEL __launch_bounds__(256, BLOCKS) matmul_##name(const u8 *weights, const INPUT *x, const float *bias, float *out, \
                                                        int rows, int cols, int n, int then, int stride, int type) {      \
        MATMUL(weights, x, bias, out, rows, cols, n, then, stride, type);                                                 \
    }
#define COMMA ,
DEFINE(f32, float_matmul<F32 COMMA 1 COMMA 2>, float, 1)
DEFINE(f16, float_matmul<F16 COMMA 1 COMMA 2>, float, 1)
DEFINE(any, float_matmul<ANY COMMA 1 COMMA 2>, float, 1)
DEFINE(wide_f32, float_matmul<F32 COMMA 2 COMMA 4>, float, 2)
DEFINE(wide_f16, float_matmul<F16 COMMA 2 COMMA 4>, float, 2)
DEFINE(q8_0, grouped_matmul<Q8 COMMA LaneProducts>, void, 2)
DEFINE(q4_0, grouped_matmul<Q4 COMMA LaneProducts>, void, 2)
DEFINE(tensor_f16, half_matmul, u8, 2)
DEFINE(tensor_q8_0, grouped_matmul<Q8 COMMA TensorProducts>, void, 2)
DEFINE(tensor_q4_0, grouped_matmul<Q4 COMMA TensorProducts>, void, 2)
#undef DEFINE
