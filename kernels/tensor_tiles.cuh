// Tiles whose products the tensor cores compute, for a prompt: beside those of tiles.cuh, and in their place where a card is told so.
//
// Of f16 rows the inputs are rounded to f16, too (rows.cuh): each is off by 2^-11 of itself at most. Of grouped rows nothing changes: whole
// products of a group are exact, and its sum is rounded in the same order as in tiles.cuh, so results are equal bit for bit.
#pragma once
#include "tiles.cuh"

// 128 f16 rows by 64 columns, 64 numbers a step, two in a word. Warps stand four by two, and each has 32 rows by 32 columns of the tile:
// two by four fragments. The next step is on its way into registers while one is multiplied.
struct HalfTile {
    static constexpr int ROWS = 128, COLUMNS = 64, STEP = 64, WORDS = STEP / 2;
    // Of a row, or of a column: four words more than a step, so that the lanes of a fragment have a bank each.
    static constexpr int STRIDE = WORDS + 4;
    // The same where the rows' words stand side by side.
    static constexpr int BESIDE = ROWS + 8;
    // 16 bytes are a unit: a thread brings four of the rows' and two of the columns'.
    static constexpr int UNIT = 8, UNITS = STEP / UNIT, OF_ROWS = ROWS * UNITS / THREADS, OF_COLUMNS = COLUMNS * UNITS / THREADS;
    using Out = float[2][4][4];

    // Rooms of rows, [ROWS, STRIDE] or [WORDS, BESIDE], and of columns, [COLUMNS, STRIDE].
    static __device__ __forceinline__ u32 *rows() { return reinterpret_cast<u32 *>(dynamic_shared); }
    static __device__ __forceinline__ u32 *columns() { return rows() + ROWS * STRIDE; }
    static __device__ __forceinline__ int first_row() { return threadIdx.x / WARP % 4 * 32; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / WARP / 4 * 32; }
    // Of a lane in a fragment: its row or column, and its place there.
    static __device__ __forceinline__ int group() { return threadIdx.x % WARP / 4; }
    static __device__ __forceinline__ int place() { return threadIdx.x % 4; }

    // Units of columns first, first + 1, ... of [n, halved_bytes], from number `start` on.
    static __device__ __forceinline__ void bring_columns(uint4 (&to)[OF_COLUMNS], const u8 *x, int first, int start, int cols, int n) {
#pragma unroll
        for (int i = 0; i < OF_COLUMNS; i++) {
            const int t = threadIdx.x + i * THREADS, c = first + t / UNITS, number = start + t % UNITS * UNIT;
            const bool there = c < n && number < cols;
            to[i] = there ? *reinterpret_cast<const uint4 *>(x + c * halved_bytes(cols) + size_t(number) * 2) : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ void put_columns(const uint4 (&from)[OF_COLUMNS]) {
#pragma unroll
        for (int i = 0; i < OF_COLUMNS; i++) {
            const int t = threadIdx.x + i * THREADS;
            *reinterpret_cast<uint4 *>(columns() + t / UNITS * STRIDE + t % UNITS * 4) = from[i];
        }
    }

    // sums += what was brought. Word k of row r is at r * ROW + k * WORD.
    template <int ROW, int WORD> static __device__ __forceinline__ void multiply(Out &sums) {
        const u32 *const w = rows() + (first_row() + group()) * ROW + place() * WORD;
        const u32 *const v = columns() + (first_column() + group()) * STRIDE + place();
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            u32 x[4];
#pragma unroll
            for (int c = 0; c < 4; c++) x[c] = v[c * 8 * STRIDE + k];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 upper = w[r * 16 * ROW + k * WORD], lower = w[(r * 16 + 8) * ROW + k * WORD];
#pragma unroll
                for (int c = 0; c < 4; c++) mma_halves(sums[r][c], upper, lower, x[c]);
            }
        }
    }

    // `put` gets row and column in the tile and the sum of each that the thread has, times what its column's inputs were divided by.
    template <class Put>
    static __device__ __forceinline__ void each(const Out &sums, const u8 *x, int first, int cols, int n, Put put) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = first_column() + c * 8 + place() * 2 + i;
                const u8 *const behind = x + min(first + column, n - 1) * halved_bytes(cols) + size_t(halved_numbers(cols)) * 2;
                const float scale = *reinterpret_cast<const float *>(behind);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    put(first_row() + r * 16 + group(), column, sums[r][c][i] * scale);
                    put(first_row() + r * 16 + group() + 8, column, sums[r][c][i + 2] * scale);
                }
            }
        }
    }

    // sums = rows `at(r)` · columns from `first` on. `at` gives where a row begins, or null; rows are padded with zeros to whole units.
    template <class At>
    static __device__ __forceinline__ void dots(At at, const u8 *x, int first, int cols, int n, Out &sums) {
        uint4 of_rows[OF_ROWS], of_columns[OF_COLUMNS];
        const auto bring = [&](int start) {
#pragma unroll
            for (int i = 0; i < OF_ROWS; i++) {
                const int t = threadIdx.x + i * THREADS, number = start + t % UNITS * UNIT;
                const u8 *const row = at(t / UNITS);
                const bool there = row != nullptr && number < cols;
                of_rows[i] = there ? *reinterpret_cast<const uint4 *>(row + size_t(number) * 2) : make_uint4(0, 0, 0, 0);
            }
            bring_columns(of_columns, x, first, start, cols, n);
        };
        bring(0);
        for (int start = 0; start < cols; start += STEP) {
#pragma unroll
            for (int i = 0; i < OF_ROWS; i++) {
                const int t = threadIdx.x + i * THREADS;
                *reinterpret_cast<uint4 *>(rows() + t / UNITS * STRIDE + t % UNITS * 4) = of_rows[i];
            }
            put_columns(of_columns);
            __syncthreads();
            bring(start + STEP);
            multiply<STRIDE, 1>(sums);
            __syncthreads();
        }
    }
};

// What GroupedTile's threads do with tensor cores: warps stand four by two, and each has 8 rows by two fragments of 8 columns.
struct TensorProducts {
    // A group's words side by side, so that a lane has both of a fragment's in one load, and two words behind them: whoever puts down a
    // word of each group, and whoever reads a fragment, has banks of its own. The same for scales.
    static constexpr int GROUPS = PACK / GROUP, STRIDE = GROUPS * 10 + 8, SCALES = GROUPS + 4;

    static __device__ __forceinline__ int place(int k, int g) { return g * 10 + k; }
    static __device__ __forceinline__ int group() { return threadIdx.x % WARP / 4; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / WARP / 4 * 16; }
    static __device__ __forceinline__ int row(int) { return threadIdx.x / WARP % 4 * 8 + group(); }
    static __device__ __forceinline__ int column(int i) { return first_column() + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

    static __device__ __forceinline__ void multiply(const u32 *w, const u32 *v, const float *scales, const float *steps,
                                                    float (&sums)[4]) {
        w += row(0) * STRIDE + threadIdx.x % 4 * 2;
        v += (first_column() + group()) * STRIDE + threadIdx.x % 4 * 2;
#pragma unroll 1
        for (int quad = 0; quad < GROUPS; quad += 4) {
            int dots[4][2][2] = {};
#pragma unroll
            for (int g = 0; g < 4; g++) {
                // Words 2t and 2t + 1 of a group are the two fragments' words t: in which order a sum has its numbers does not matter.
                const uint2 there = *reinterpret_cast<const uint2 *>(w + place(0, quad + g));
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint2 here = *reinterpret_cast<const uint2 *>(v + c * 8 * STRIDE + place(0, quad + g));
                    mma_bytes(dots[g][c], there.x, here.x);
                    mma_bytes(dots[g][c], there.y, here.y);
                }
            }
            const float4 scale = *reinterpret_cast<const float4 *>(scales + row(0) * SCALES + quad);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 step = *reinterpret_cast<const float4 *>(steps + column(i) * SCALES + quad);
                float sum = sums[i];
                sum = fmaf(scale.x * step.x, float(dots[0][i / 2][i % 2]), sum);
                sum = fmaf(scale.y * step.y, float(dots[1][i / 2][i % 2]), sum);
                sum = fmaf(scale.z * step.z, float(dots[2][i / 2][i % 2]), sum);
                sums[i] = fmaf(scale.w * step.w, float(dots[3][i / 2][i % 2]), sum);
            }
        }
    }
};
