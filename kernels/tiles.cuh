// Tiles of rows times columns, for more columns than rows are worth reading by themselves: a prompt, or many sequences. A block
// brings a step of both into shared memory, and each of its 256 threads has some rows by some columns of the tile in registers.
//
// Every sum runs over its row in order, so it does not depend on how many columns there are.
#pragma once
#include "rows.cuh"

constexpr int THREADS = 256;

// A few numbers of a row from number `i` on, zeros behind its end and where there is no row. Rows are padded with zeros to whole units.
template <int QUANT> struct Numbers {
    static constexpr int COUNT = Unit<QUANT>::NUMBERS;

    static __device__ __forceinline__ void load(const u8 *row, int, int i, int cols, float (&out)[COUNT]) {
        const bool there = row != nullptr && i < cols;
        Unit<QUANT>::unpack(there ? reinterpret_cast<const uint4 *>(row)[i / COUNT] : make_uint4(0, 0, 0, 0), out);
    }
};
template <> struct Numbers<ANY> {
    static constexpr int COUNT = 8;

    static __device__ __forceinline__ void load(const u8 *row, int type, int i, int cols, float (&out)[COUNT]) {
        if (row != nullptr && i < cols) return eight_numbers(type, row, i, cols, out);
#pragma unroll
        for (int k = 0; k < COUNT; k++) out[k] = 0.0f;
    }
};

// f32, and what is made f32: S sets of 64 rows by 16 C columns, DEPTH numbers a step. Threads stand 16 by 16; each has four rows of
// every set and C columns.
constexpr int DEPTH = 32, SET = 64;
template <int S, int C> struct FloatTile {
    static constexpr int COLUMNS = 16 * C;
    // A float4 begins every row of the room.
    static constexpr int ROW_STRIDE = SET + 4, COLUMN_STRIDE = COLUMNS + 4;
    static constexpr int SET_ROOM = DEPTH * ROW_STRIDE, ROWS_ROOM = S * SET_ROOM;

    // Rooms of rows, [S, DEPTH, ROW_STRIDE], and of columns, [DEPTH, COLUMN_STRIDE].
    static __device__ __forceinline__ float *rows() { return reinterpret_cast<float *>(dynamic_shared); }
    static __device__ __forceinline__ float *columns() { return rows() + ROWS_ROOM; }
    static __device__ __forceinline__ int row() { return threadIdx.x % 16 * 4; }
    static __device__ __forceinline__ int column() { return threadIdx.x / 16 * C; }

    // Numbers `start` and following of the columns from `first` on of [n, cols].
    static __device__ __forceinline__ void bring_columns(const float *x, int first, int start, int cols, int n) {
        for (int t = threadIdx.x; t < COLUMNS * DEPTH; t += THREADS) {
            const int c = t / DEPTH, i = t % DEPTH;
            const bool there = first + c < n && start + i < cols;
            columns()[i * COLUMN_STRIDE + c] = there ? x[size_t(first + c) * cols + start + i] : 0.0f;
        }
    }

    // sums += what was brought.
    static __device__ __forceinline__ void multiply(float (&sums)[S][4][C]) {
        const float *const w = rows() + row(), *const v = columns() + column();
#pragma unroll 8
        for (int i = 0; i < DEPTH; i++) {
            float x[C];
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                const float2 two = *reinterpret_cast<const float2 *>(v + i * COLUMN_STRIDE + c);
                x[c] = two.x;
                x[c + 1] = two.y;
            }
#pragma unroll
            for (int s = 0; s < S; s++) {
                const float4 four = *reinterpret_cast<const float4 *>(w + s * SET_ROOM + i * ROW_STRIDE);
#pragma unroll
                for (int c = 0; c < C; c++) {
                    sums[s][0][c] = fmaf(four.x, x[c], sums[s][0][c]);
                    sums[s][1][c] = fmaf(four.y, x[c], sums[s][1][c]);
                    sums[s][2][c] = fmaf(four.z, x[c], sums[s][2][c]);
                    sums[s][3][c] = fmaf(four.w, x[c], sums[s][3][c]);
                }
            }
        }
    }

    // sums[s][r][c] = row `at(s, row() + r)` · column first_column + column() + c. `at` gives where a row begins, or null; `types`
    // has the types of the sets, which count where QUANT is ANY.
    template <int QUANT, class At>
    static __device__ __forceinline__ void dots(At at, const float *x, int first_column, int cols, int n, int types, float (&sums)[S][4][C]) {
        constexpr int NUMBERS = Numbers<QUANT>::COUNT, UNITS = DEPTH / NUMBERS;
        for (int start = 0; start < cols; start += DEPTH) {
#pragma unroll
            for (int s = 0; s < S; s++) {
                for (int t = threadIdx.x; t < SET * UNITS; t += THREADS) {
                    const int r = t / UNITS, unit = t % UNITS;
                    const u8 *const row = at(s, r);
                    float numbers[NUMBERS];
                    Numbers<QUANT>::load(row, type_of(types, s), start + unit * NUMBERS, cols, numbers);
#pragma unroll
                    for (int i = 0; i < NUMBERS; i++)
                        rows()[s * SET_ROOM + (unit * NUMBERS + i) * ROW_STRIDE + r] = numbers[i];
                }
            }
            bring_columns(x, first_column, start, cols, n);
            __syncthreads();
            multiply(sums);
            __syncthreads();
        }
    }
};

// How the threads of a tile of 32 grouped rows by 32 columns multiply a pack: where word k of group g, numbers 4k to 4k + 4, stands in the
// room of a row or column; which four sums a thread has; and dp4a.
struct LaneProducts {
    // 16 bytes more than a pack: threads beside each other read rows beside each other.
    static constexpr int GROUPS = PACK / GROUP, STRIDE = PACK / 4 + 4, SCALES = GROUPS;

    static __device__ __forceinline__ int place(int k, int g) { return k * GROUPS + g; }
    static __device__ __forceinline__ int row(int i) { return threadIdx.x % 16 + i / 2 * 16; }
    static __device__ __forceinline__ int column(int i) { return threadIdx.x / 16 + i % 2 * 16; }

    // sums += products of rows w and columns v, both [32, STRIDE], times their scales and steps, [32, SCALES].
    static __device__ __forceinline__ void multiply(const u32 *w, const u32 *v, const float *scales, const float *steps,
                                                    float (&sums)[4]) {
#pragma unroll 1
        for (int quad = 0; quad < GROUPS / 4; quad++) {
            int dots[4][4] = {};
            // All eight at once would fill the registers, and one block a multiprocessor waits for itself.
#pragma unroll 4
            for (int k = 0; k < 8; k++) {
                uint4 here[2], there[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    here[i] = *reinterpret_cast<const uint4 *>(v + column(i) * STRIDE + place(k, quad * 4));
                    there[i] = *reinterpret_cast<const uint4 *>(w + row(i * 2) * STRIDE + place(k, quad * 4));
                }
#pragma unroll
                for (int i = 0; i < 4; i++) four_dots(there[i / 2], here[i % 2], dots[i]);
            }
#pragma unroll
            for (int g = 0; g < 4; g++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float scale = scales[row(i) * SCALES + quad * 4 + g], step = steps[column(i) * SCALES + quad * 4 + g];
                    sums[i] = fmaf(scale * step, float(dots[i][g]), sums[i]);
                }
            }
        }
    }
};

// Grouped rows: 32 rows by 32 columns, a pack a step as int8, placed as `Products` want it. Plain groups behind the last pack are brought
// into the same order, and groups that are not there have no scale.
template <int QUANT, class Products> struct GroupedTile : Products {
    static constexpr int ROWS = 32, COLUMNS = 32, GROUPS = PACK / GROUP;
    using Products::STRIDE, Products::SCALES;

    // sums[i] = row `at(row(i))` · column first_column + column(i). `at` gives where a row begins, or null.
    template <class At>
    static __device__ __forceinline__ void dots(At at, const void *input, int first_column, int cols, int n, float (&sums)[4]) {
        u32 *const w = reinterpret_cast<u32 *>(dynamic_shared);                // [ROWS, STRIDE]
        u32 *const v = w + ROWS * STRIDE;                                      // [COLUMNS, STRIDE]
        float *const scales = reinterpret_cast<float *>(v + COLUMNS * STRIDE); // [ROWS, SCALES]
        float *const steps = scales + ROWS * SCALES;                           // [COLUMNS, SCALES]
        const int number_bytes = QUANT == Q8 ? cols : cols / 2;
        for (int start = 0; start < cols; start += PACK) {
            const bool packed = start + PACK <= cols;
            const int groups = min(GROUPS, (cols - start) / GROUP);
            // Words of a row: 128 of q8_0; of q4_0 64, which hold two each.
            constexpr int WORDS = QUANT == Q8 ? 128 : 64, GROUP_WORDS = WORDS / GROUPS;
            for (int t = threadIdx.x; t < ROWS * WORDS; t += THREADS) {
                const int r = t / WORDS, i = t % WORDS;
                const u8 *const from = at(r);
                const bool there = from != nullptr && i < groups * GROUP_WORDS;
                const u32 word = there ? reinterpret_cast<const u32 *>(from + start / GROUP * (GROUP_WORDS * 4))[i] : 0;
                const int group = packed ? i % 16 : i / GROUP_WORDS, k = packed ? i / 16 : i % GROUP_WORDS;
                u32 *const to = w + r * STRIDE;
                if (QUANT == Q8) {
                    to[Products::place(k, group)] = word;
                } else {
                    // In a pack the high half bytes are the register behind, in a plain group the second half of the group.
                    to[Products::place(packed ? 2 * k : k, group)] = low_codes(word);
                    to[Products::place(packed ? 2 * k + 1 : k + 4, group)] = high_codes(word);
                }
            }
            for (int t = threadIdx.x; t < COLUMNS * (PACK / 4); t += THREADS) {
                const int c = t / (PACK / 4), i = t % (PACK / 4);
                const bool there = first_column + c < n && i < groups * (GROUP / 4);
                const u8 *from = input_from(input, first_column + c, cols).codes + start / PACK * CODED_PACK;
                const u32 word = there ? reinterpret_cast<const u32 *>(from)[i] : 0;
                v[c * STRIDE + (packed ? Products::place(i / 16, i % 16) : Products::place(i % 8, i / 8))] = word;
            }
            for (int t = threadIdx.x; t < (ROWS + COLUMNS) * GROUPS; t += THREADS) {
                const int r = t / GROUPS % ROWS, g = t % GROUPS;
                if (t < ROWS * GROUPS) {
                    const u8 *const row = at(r);
                    const u16 *const from = reinterpret_cast<const u16 *>(row + number_bytes) + start / GROUP;
                    scales[r * SCALES + g] = g < groups && row != nullptr ? half_to_float(from[g]) : 0.0f;
                } else {
                    const u8 *from = input_from(input, first_column + r, cols).codes + start / PACK * CODED_PACK + PACK;
                    const bool there = g < groups && first_column + r < n;
                    steps[r * SCALES + g] = there ? reinterpret_cast<const float *>(from)[g] : 0.0f;
                }
            }
            __syncthreads();
            Products::multiply(w, v, scales, steps, sums);
            __syncthreads();
        }
    }
};
