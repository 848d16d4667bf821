// Computes: out = x weights^T + bias, then nothing, max(., 0), or out += that (device::Then), for more columns than rows are
//           worth reading by themselves: a prompt, or many sequences.
// Shapes:   as linear.cu.
// Moves:    every weight once for each 32 columns, every input once for each tile of rows.
// Launch:   256 threads make a tile of rows by 32 columns. matmul_f32, matmul_f16: 64 rows, grid (ceil(rows / 64), ceil(n / 32)),
//           12672 bytes of shared memory. matmul_q8_0, matmul_q4_0: 32 rows, grid (ceil(rows / 32), ceil(n / 32)), 37888 bytes.
//
// The sum of an output runs over its row in order, so it does not depend on how many columns there are.
#include "rows.cuh"

constexpr int COLUMNS = 32, THREADS = 256;

__device__ __forceinline__ void finish(float *out, const float *bias, int row, int rows, int column, int n, int then, float sum) {
    if (row >= rows || column >= n) return;
    float *to = out + size_t(column) * rows + row;
    if (bias) sum += bias[row];
    if (then == 1) sum = fmaxf(sum, 0.0f);
    *to = then == 2 ? *to + sum : sum;
}

// f32 and f16: tiles of 32 numbers, number by number, so that a thread reads neighbours of both.
template <int QUANT>
__device__ __forceinline__ void float_tile(const u8 *weights, const float *x, const float *bias, float *out, int rows, int cols,
                                           int n, int then) {
    constexpr int ROWS = 64, DEPTH = 32, R = 4, C = 2;
    constexpr int ROW_STRIDE = ROWS + 1, COLUMN_STRIDE = COLUMNS + 2;
    constexpr int NUMBERS = Unit<QUANT>::NUMBERS, UNITS = DEPTH / NUMBERS;
    float *const w = reinterpret_cast<float *>(dynamic_shared); // [DEPTH, ROW_STRIDE]
    float *const v = w + DEPTH * ROW_STRIDE;                    // [DEPTH, COLUMN_STRIDE]
    const int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;
    const int row = threadIdx.x % 16, column = threadIdx.x / 16 * C; // rows row, row + 16, ...
    const size_t bytes = row_bytes<QUANT>(cols);
    float sums[R][C] = {};
    for (int start = 0; start < cols; start += DEPTH) {
        for (int t = threadIdx.x; t < ROWS * UNITS; t += THREADS) {
            const int r = t / UNITS, unit = t % UNITS;
            // Rows are padded with zeros to whole units.
            const bool there = first_row + r < rows && start + unit * NUMBERS < cols;
            const uint4 *from = reinterpret_cast<const uint4 *>(weights + size_t(first_row + r) * bytes) + start / NUMBERS + unit;
            float numbers[NUMBERS];
            Unit<QUANT>::unpack(there ? *from : make_uint4(0, 0, 0, 0), numbers);
#pragma unroll
            for (int i = 0; i < NUMBERS; i++) w[(unit * NUMBERS + i) * ROW_STRIDE + r] = numbers[i];
        }
        for (int t = threadIdx.x; t < COLUMNS * DEPTH; t += THREADS) {
            const int c = t / DEPTH, i = t % DEPTH;
            const bool there = first_column + c < n && start + i < cols;
            v[i * COLUMN_STRIDE + c] = there ? x[size_t(first_column + c) * cols + start + i] : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < DEPTH; i++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int c = 0; c < C; c++)
                    sums[r][c] = fmaf(w[i * ROW_STRIDE + row + r * 16], v[i * COLUMN_STRIDE + column + c], sums[r][c]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int c = 0; c < C; c++)
            finish(out, bias, first_row + row + r * 16, rows, first_column + column + c, n, then, sums[r][c]);
    }
}

// Grouped rows: tiles of a pack as int8, in a pack's order: word k * 16 + g has numbers 4k to 4k + 4 of group g. Plain groups behind
// the last pack are brought into the same order, and groups that are not there have no scale.
template <int QUANT>
__device__ __forceinline__ void grouped_tile(const u8 *weights, const void *input, const float *bias, float *out, int rows,
                                             int cols, int n, int then) {
    constexpr int ROWS = 32, R = 2, C = 2, GROUPS = PACK / GROUP;
    // 16 bytes more than a pack: threads beside each other read rows beside each other.
    constexpr int STRIDE = PACK / 4 + 4;
    u32 *const w = reinterpret_cast<u32 *>(dynamic_shared);                // [ROWS, STRIDE]
    u32 *const v = w + ROWS * STRIDE;                                      // [COLUMNS, STRIDE]
    float *const scales = reinterpret_cast<float *>(v + COLUMNS * STRIDE); // [ROWS, GROUPS]
    float *const steps = scales + ROWS * GROUPS;                           // [COLUMNS, GROUPS]
    const int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;
    const int row = threadIdx.x % 16, column = threadIdx.x / 16; // and those 16 further on
    const size_t bytes = row_bytes<QUANT>(cols);
    const int number_bytes = QUANT == Q8 ? cols : cols / 2;
    float sums[R][C] = {};
    for (int start = 0; start < cols; start += PACK) {
        const bool packed = start + PACK <= cols;
        const int groups = min(GROUPS, (cols - start) / GROUP);
        // Words of a row: 128 of q8_0; of q4_0 64, which hold two each.
        constexpr int WORDS = QUANT == Q8 ? 128 : 64, GROUP_WORDS = WORDS / GROUPS;
        for (int t = threadIdx.x; t < ROWS * WORDS; t += THREADS) {
            const int r = t / WORDS, i = t % WORDS;
            const bool there = first_row + r < rows && i < groups * GROUP_WORDS;
            const u8 *from = weights + size_t(first_row + r) * bytes + start / GROUP * (GROUP_WORDS * 4);
            const u32 word = there ? reinterpret_cast<const u32 *>(from)[i] : 0;
            const int group = packed ? i % 16 : i / GROUP_WORDS, k = packed ? i / 16 : i % GROUP_WORDS;
            u32 *const to = w + r * STRIDE + group;
            if (QUANT == Q8) {
                to[k * 16] = word;
            } else {
                // In a pack the high half bytes are the register behind, in a plain group the second half of the group.
                to[(packed ? 2 * k : k) * 16] = low_codes(word);
                to[(packed ? 2 * k + 1 : k + 4) * 16] = high_codes(word);
            }
        }
        for (int t = threadIdx.x; t < COLUMNS * (PACK / 4); t += THREADS) {
            const int c = t / (PACK / 4), i = t % (PACK / 4);
            const bool there = first_column + c < n && i < groups * (GROUP / 4);
            const u8 *from = input_from(input, first_column + c, cols).codes + start / PACK * CODED_PACK;
            const u32 word = there ? reinterpret_cast<const u32 *>(from)[i] : 0;
            v[c * STRIDE + (packed ? i : i % 8 * 16 + i / 8)] = word;
        }
        for (int t = threadIdx.x; t < (ROWS + COLUMNS) * GROUPS; t += THREADS) {
            const int r = t / GROUPS % ROWS, g = t % GROUPS;
            const bool of_row = t < ROWS * GROUPS, there = g < groups;
            if (of_row) {
                const u16 *from = reinterpret_cast<const u16 *>(weights + size_t(first_row + r) * bytes + number_bytes);
                scales[r * GROUPS + g] = there && first_row + r < rows ? half_to_float(from[start / GROUP + g]) : 0.0f;
            } else {
                const u8 *from = input_from(input, first_column + r, cols).codes + start / PACK * CODED_PACK + PACK;
                steps[r * GROUPS + g] = there && first_column + r < n ? reinterpret_cast<const float *>(from)[g] : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int quad = 0; quad < GROUPS / 4; quad++) {
            int dots[R][C][4] = {};
#pragma unroll
            for (int k = 0; k < 8; k++) {
                uint4 here[C];
#pragma unroll
                for (int c = 0; c < C; c++)
                    here[c] = *reinterpret_cast<const uint4 *>(v + (column + c * 16) * STRIDE + k * 16 + quad * 4);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const uint4 there = *reinterpret_cast<const uint4 *>(w + (row + r * 16) * STRIDE + k * 16 + quad * 4);
#pragma unroll
                    for (int c = 0; c < C; c++) four_dots(there, here[c], dots[r][c]);
                }
            }
#pragma unroll
            for (int g = 0; g < 4; g++) {
#pragma unroll
                for (int r = 0; r < R; r++) {
#pragma unroll
                    for (int c = 0; c < C; c++) {
                        const float scale = scales[(row + r * 16) * GROUPS + quad * 4 + g];
                        const float step = steps[(column + c * 16) * GROUPS + quad * 4 + g];
                        sums[r][c] = fmaf(scale * step, float(dots[r][c][g]), sums[r][c]);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int c = 0; c < C; c++)
            finish(out, bias, first_row + row + r * 16, rows, first_column + column + c * 16, n, then, sums[r][c]);
    }
}

#define DEFINE(type, TILE, INPUT)                                                                               \
    KERNEL __launch_bounds__(256, 1) matmul_##type(const u8 *weights, const INPUT *x, const float *bias, float *out, \
                                                int rows, int cols, int n, int then) {                          \
        TILE(weights, x, bias, out, rows, cols, n, then);                                                       \
    }
DEFINE(f32, float_tile<F32>, float)
DEFINE(f16, float_tile<F16>, float)
DEFINE(q8_0, grouped_tile<Q8>, void)
DEFINE(q4_0, grouped_tile<Q4>, void)
#undef DEFINE
