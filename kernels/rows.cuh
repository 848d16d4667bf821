// Rows of weights (formats::rows) times columns of inputs: what every kernel over weights is made of.
#pragma once
#include "blocks.cuh"

// int8 codes of a column (cpu::Columns) stand pack by pack in the order of a q8_0 row, each pack with the steps of its 16 groups
// behind it: both are reached from one address.
constexpr int CODED_PACK = PACK + PACK / GROUP * 4;
__device__ __forceinline__ int coded_bytes(int cols) { return (cols + PACK - 1) / PACK * CODED_PACK; }

// f16 inputs of a column for tensor cores: its numbers times a power of two, which brings the largest to 2^14 or above so that none is
// out of f16's range; zeros up to a multiple of 32; then 16 bytes, of which the first four are the f32 that undoes the power.
__device__ __forceinline__ int halved_numbers(int cols) { return (cols + 31) / 32 * 32; }
__device__ __forceinline__ size_t halved_bytes(int cols) { return size_t(halved_numbers(cols)) * 2 + 16; }

// Where the rows of a neuron block begin: the first at its beginning, then the second, down last.
template <int QUANT> struct BlockForm {
    // A block is far below 2 GiB: whole numbers of 32 bits take half the registers.
    int second, last, bytes;

    __device__ __forceinline__ BlockForm(int cols, int rows, int) {
        second = int(row_bytes<QUANT>(cols));
        last = second * (rows - 1);
        bytes = second * rows;
    }
};
template <> struct BlockForm<ANY> {
    int second, last, bytes;

    __device__ __forceinline__ BlockForm(int cols, int rows, int types) {
        second = int(any_row_bytes(type_of(types, 0), cols));
        last = rows == 2 ? second : second + int(any_row_bytes(type_of(types, 1), cols));
        bytes = last + int(any_row_bytes(type_of(types, rows - 1), cols));
    }
};

// Inputs of columns: f32 for f32 and f16 rows and for those of any type, what `quantize` left for grouped rows. Of codes there is room for columns up to a
// multiple of N, so that all N can be read; what stands there counts for nothing.
struct Input {
    const float *values; // [n, cols]
    const u8 *codes;     // [n, coded_bytes]
};

// The input from column `column` on.
__device__ __forceinline__ Input input_from(const void *x, int column, int cols) {
    return {static_cast<const float *>(x) + size_t(column) * cols,
            static_cast<const u8 *>(x) + size_t(column) * coded_bytes(cols)};
}

// Numbers i to i + 4 of a column of whole fours; zeros behind its end.
__device__ __forceinline__ float4 four_inputs(const float *x, int i, int cols) {
    return i < cols ? *reinterpret_cast<const float4 *>(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// 16 bytes of an f32 or f16 row as numbers.
template <int QUANT> struct Unit;
template <> struct Unit<F32> {
    static constexpr int NUMBERS = 4;
    static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[NUMBERS]) {
        w[0] = __uint_as_float(raw.x);
        w[1] = __uint_as_float(raw.y);
        w[2] = __uint_as_float(raw.z);
        w[3] = __uint_as_float(raw.w);
    }
    static __device__ __forceinline__ float number(const u8 *row, int i) { return reinterpret_cast<const float *>(row)[i]; }
};
template <> struct Unit<F16> {
    static constexpr int NUMBERS = 8;
    static __device__ __forceinline__ void unpack(uint4 raw, float (&w)[NUMBERS]) {
        w[0] = low_half(raw.x);
        w[1] = high_half(raw.x);
        w[2] = low_half(raw.y);
        w[3] = high_half(raw.y);
        w[4] = low_half(raw.z);
        w[5] = high_half(raw.z);
        w[6] = low_half(raw.w);
        w[7] = high_half(raw.w);
    }
    static __device__ __forceinline__ float number(const u8 *row, int i) {
        return half_to_float(reinterpret_cast<const u16 *>(row)[i]);
    }
};

// The low or high half bytes of q4_0 as int8, each less 8. Setting the top bits keeps the subtraction within each byte.
__device__ __forceinline__ u32 low_codes(u32 raw) { return (((raw & 0x0f0f0f0fu) | 0x80808080u) - 0x08080808u) ^ 0x80808080u; }
__device__ __forceinline__ u32 high_codes(u32 raw) { return low_codes(raw >> 4); }
__device__ __forceinline__ uint4 low_codes(uint4 raw) {
    return make_uint4(low_codes(raw.x), low_codes(raw.y), low_codes(raw.z), low_codes(raw.w));
}
__device__ __forceinline__ uint4 high_codes(uint4 raw) {
    return make_uint4(high_codes(raw.x), high_codes(raw.y), high_codes(raw.z), high_codes(raw.w));
}

// The four scales at an 8-byte boundary.
__device__ __forceinline__ float4 four_scales(const u8 *at) {
    const uint2 raw = load_once(reinterpret_cast<const uint2 *>(at));
    return make_float4(low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y));
}

// sums[r][c] = row r · column c, by one warp, the same in all its lanes; of N columns, those from `left` on mean nothing.
//
// Registers hold U or all of a pack's loads before the first is used: that is what keeps enough bytes on their way.
template <int QUANT, int R, int N> struct Dots {
    static constexpr int NUMBERS = Unit<QUANT>::NUMBERS;
    static constexpr int U = N <= 2 ? 4 : 2;

    static __device__ __forceinline__ void run(const u8 *const (&rows)[R], Input x, int cols, int left, float (&sums)[R][N], int) {
        const int lane = threadIdx.x % WARP;
        if (cols % 4 != 0) {
            // Columns do not begin at vectors. No model is so; number by number it is small and right.
#pragma unroll 1
            for (int i = lane; i < cols; i += WARP) {
#pragma unroll
                for (int c = 0; c < N; c++) {
                    const float v = x.values[size_t(min(c, left - 1)) * cols + i];
#pragma unroll
                    for (int r = 0; r < R; r++) sums[r][c] = fmaf(Unit<QUANT>::number(rows[r], i), v, sums[r][c]);
                }
            }
            return;
        }
        // Rows are padded with zeros to whole units.
        const int units = (cols + NUMBERS - 1) / NUMBERS;
#pragma unroll 1
        for (int first = lane; first < units; first += WARP * U) {
            uint4 raw[R][U];
#pragma unroll
            for (int i = 0; i < U; i++) {
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const int unit = first + i * WARP;
                    raw[r][i] = unit < units ? load_once(reinterpret_cast<const uint4 *>(rows[r]) + unit)
                                             : make_uint4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (int i = 0; i < U; i++) {
                float w[R][NUMBERS];
#pragma unroll
                for (int r = 0; r < R; r++) Unit<QUANT>::unpack(raw[r][i], w[r]);
#pragma unroll
                for (int c = 0; c < N; c++) {
                    const float *column = x.values + size_t(min(c, left - 1)) * cols;
#pragma unroll
                    for (int k = 0; k < NUMBERS; k += 4) {
                        const float4 v = four_inputs(column, (first + i * WARP) * NUMBERS + k, cols);
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            float sum = sums[r][c];
                            sum = fmaf(w[r][k], v.x, sum);
                            sum = fmaf(w[r][k + 1], v.y, sum);
                            sum = fmaf(w[r][k + 2], v.z, sum);
                            sums[r][c] = fmaf(w[r][k + 3], v.w, sum);
                        }
                    }
                }
            }
        }
    }
};

// Adds the dots of 16 bytes each of weights and codes, word by word: in a pack, words belong to four groups.
__device__ __forceinline__ void four_dots(uint4 w, uint4 v, int (&dots)[4]) {
    dots[0] = dp4a(int(w.x), int(v.x), dots[0]);
    dots[1] = dp4a(int(w.y), int(v.y), dots[1]);
    dots[2] = dp4a(int(w.z), int(v.z), dots[2]);
    dots[3] = dp4a(int(w.w), int(v.w), dots[3]);
}

// Grouped rows. Eight lanes share a pack: lane q of four has groups 4q to 4q + 4, and of two such fours each has half of their
// numbers, so that whole products add up as int before a scale is looked at.
template <int QUANT, int R, int N> struct GroupedDots {
    // Bytes of weights in a pack and in a group, and loads of a lane in half a pack.
    static constexpr int PACK_BYTES = QUANT == Q8 ? 512 : 256, GROUP_BYTES = PACK_BYTES / 16, LOADS = PACK_BYTES / 128;

    static __device__ __forceinline__ void run(const u8 *const (&rows)[R], Input x, int cols, int, float (&sums)[R][N], int) {
        const int lane = threadIdx.x % WARP, quad = lane % 4, half = lane / 4 % 2;
        const int packs = cols / PACK, groups = cols / GROUP, number_bytes = groups * GROUP_BYTES;
        // More at once with many columns would fill the registers until they spill.
#pragma unroll (N == 1 ? 2 : 1)
        for (int pack = lane / 8; pack < packs; pack += WARP / 8) {
            uint4 raw[R][LOADS];
            float4 scales[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    const int at = pack * PACK_BYTES + (half * LOADS + i) * 64 + quad * 16;
                    raw[r][i] = load_once(reinterpret_cast<const uint4 *>(rows[r] + at));
                }
                scales[r] = four_scales(rows[r] + number_bytes + pack * 32 + quad * 8);
            }
#pragma unroll
            for (int c = 0; c < N; c++) {
                const u8 *const coded = x.codes + c * coded_bytes(cols) + pack * CODED_PACK + quad * 16;
                const u8 *const codes = coded + half * 256;
                int dots[R][4] = {};
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    if (QUANT == Q8) {
                        const uint4 v = *reinterpret_cast<const uint4 *>(codes + i * 64);
#pragma unroll
                        for (int r = 0; r < R; r++) four_dots(raw[r][i], v, dots[r]);
                    } else {
                        const uint4 low = *reinterpret_cast<const uint4 *>(codes + i * 128);
                        const uint4 high = *reinterpret_cast<const uint4 *>(codes + i * 128 + 64);
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            four_dots(low_codes(raw[r][i]), low, dots[r]);
                            four_dots(high_codes(raw[r][i]), high, dots[r]);
                        }
                    }
                }
                const float4 steps = *reinterpret_cast<const float4 *>(coded + PACK);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float sum = sums[r][c];
                    sum = fmaf(scales[r].x * steps.x, float(dots[r][0]), sum);
                    sum = fmaf(scales[r].y * steps.y, float(dots[r][1]), sum);
                    sum = fmaf(scales[r].z * steps.z, float(dots[r][2]), sum);
                    sums[r][c] = fmaf(scales[r].w * steps.w, float(dots[r][3]), sum);
                }
            }
        }
        // Plain groups behind the last pack: 15 at most, one for each lane.
        const int group = packs * (PACK / GROUP) + lane;
        if (group < groups) {
            uint4 raw[R][GROUP_BYTES / 16];
            float scale[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int i = 0; i < GROUP_BYTES / 16; i++)
                    raw[r][i] = load_once(reinterpret_cast<const uint4 *>(rows[r] + group * GROUP_BYTES) + i);
                scale[r] = half_to_float(*reinterpret_cast<const u16 *>(rows[r] + number_bytes + group * 2));
            }
#pragma unroll
            for (int c = 0; c < N; c++) {
                const u8 *const coded = x.codes + c * coded_bytes(cols) + packs * CODED_PACK;
                const uint4 *const codes = reinterpret_cast<const uint4 *>(coded + lane * GROUP);
                const uint4 low = codes[0], high = codes[1];
                const float step = *reinterpret_cast<const float *>(coded + PACK + lane * 4);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    int dots[4] = {};
                    four_dots(QUANT == Q8 ? raw[r][0] : low_codes(raw[r][0]), low, dots);
                    four_dots(QUANT == Q8 ? raw[r][GROUP_BYTES / 16 - 1] : high_codes(raw[r][0]), high, dots);
                    sums[r][c] = fmaf(scale[r] * step, float(dots[0] + dots[1] + dots[2] + dots[3]), sums[r][c]);
                }
            }
        }
    }
};
template <int R, int N> struct Dots<Q8, R, N> : GroupedDots<Q8, R, N> {};
template <int R, int N> struct Dots<Q4, R, N> : GroupedDots<Q4, R, N> {};

// Rows of a type that is said at run time, one after the other: a lane has eight numbers at a time.
template <int R, int N> struct Dots<ANY, R, N> {
    static __device__ __forceinline__ void run(const u8 *const (&rows)[R], Input x, int cols, int left, float (&sums)[R][N], int type) {
#pragma unroll 1
        for (int i = threadIdx.x % WARP * 8; i < cols; i += WARP * 8) {
#pragma unroll 1
            for (int r = 0; r < R; r++) {
                float w[8];
                eight_numbers(type, rows[r], i, cols, w);
#pragma unroll
                for (int c = 0; c < N; c++) {
                    const float *const column = x.values + size_t(min(c, left - 1)) * cols + i;
                    const float4 a = *reinterpret_cast<const float4 *>(column), b = *reinterpret_cast<const float4 *>(column + 4);
                    float sum = sums[r][c];
                    sum = fmaf(w[0], a.x, sum);
                    sum = fmaf(w[1], a.y, sum);
                    sum = fmaf(w[2], a.z, sum);
                    sum = fmaf(w[3], a.w, sum);
                    sum = fmaf(w[4], b.x, sum);
                    sum = fmaf(w[5], b.y, sum);
                    sum = fmaf(w[6], b.z, sum);
                    sums[r][c] = fmaf(w[7], b.w, sum);
                }
            }
        }
    }
};

// `type` counts where QUANT is ANY.
template <int QUANT, int R, int N>
__device__ __forceinline__ void row_dots(const u8 *const (&rows)[R], Input x, int cols, int left, float (&sums)[R][N], int type) {
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int c = 0; c < N; c++) sums[r][c] = 0.0f;
    }
    Dots<QUANT, R, N>::run(rows, x, cols, left, sums, type);
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int c = 0; c < N; c++) sums[r][c] = warp_sum(sums[r][c]);
    }
}

// Blocks of 128 threads that a multiprocessor is to hold at least. It is asked for because the compiler, left alone, spills to hold
// one more (tools/nvrtc_check.py shows it).
#define ROW_BLOCKS(N) (N == 1 ? 5 : N == 2 ? 4 : N == 4 ? 3 : 2)

// Four kernels of a family, by columns that a thread works on at once, for each type of rows.
#define FOR_WIDTHS(DEFINE, QUANT, type) \
    DEFINE(QUANT, type, 1)              \
    DEFINE(QUANT, type, 2)              \
    DEFINE(QUANT, type, 4)              \
    DEFINE(QUANT, type, 8)
#define FOR_QUANTS_AND_WIDTHS(DEFINE) \
    FOR_WIDTHS(DEFINE, F32, f32)      \
    FOR_WIDTHS(DEFINE, F16, f16)      \
    FOR_WIDTHS(DEFINE, Q8, q8_0)      \
    FOR_WIDTHS(DEFINE, Q4, q4_0)
