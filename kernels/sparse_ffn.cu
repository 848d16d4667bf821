// Computes: the resident half of an FFN (DynamicInfer C.2): for every slot whose neuron some column wants, gate, activation
//           and cut; up where the gate lets it through; out[b] = the sum over neurons of a[b] * down row.
// Shapes:   gates, ups, downs: the rows of slot 0 (plain: up in both places of the first two), each so many bytes before those of slot 1;
//           bucket [slots]; masks [ffn], or of a mixture the choice that device::SparseFfn describes; x [n, cols] f32 or its codes; out [n, cols] f32, then fired [n, chunks]: bit k of a word says that the neuron in slot k of the chunk was active
//           for that column.
//           Scratch: a [slots, n] f32; list [chunks, 32] slots; counts [chunks]: slots in the list; partial [splits, n, cols] f32.
// Moves:    bucket and wanted masks; gate rows of wanted neurons; up rows of those that fire; down rows of those with a
//           product that is not zero; partial sums, written and read once.
//           Of mixed types (`any`) x is f32, rounded as codes are (quantize.cu); `types` has a byte for each row of a neuron.
// Launch:   ffn_neurons, ffn_down, ffn_merge, one after the other.
//           ffn_neurons_<type>_<N>: a block of any number of warps per chunk of 32 slots, a warp per neuron; 128 bytes of shared memory.
//           ffn_down_<type>_<N>: grid (tiles of a row, splits, ceil(n / N)); 8 warps take entries of the split in turns.
//             Split s has chunks s, s + splits, ...: at most 256, in the order of slots. Shared memory: 4 bytes an entry, or
//             512 bytes an accumulator, whatever is more.
//           ffn_merge: a thread per number of out and per chunk.
//
// The order of every sum is that of chunks, warps and splits, which follow from the shapes alone.
#include "activation.cuh"
#include "rows.cuh"

// device::kernel::sparse_ffn counts on these.
constexpr int CHUNK = WARP, DOWN_WARPS = 8;

// Which columns want a neuron. Of a mixture `masks` begins with [experts] the expert's row of masks, or NONE, and [experts, n] weights.
__device__ __forceinline__ u32 columns_of(const u32 *masks, u32 neuron, int n, int experts, int each) {
    if (experts == 0) return masks[neuron];
    const u32 row = masks[neuron / each];
    return row == NONE ? 0 : masks[size_t(experts) * (n + 1) + size_t(row) * each + neuron % each];
}

// Multiplies a neuron's products by its expert's weights. Returns in which of these columns they are not zero.
__device__ __forceinline__ u32 weigh(float *products, const u32 *weights, int n, u32 columns) {
    u32 left = 0;
#pragma unroll 1
    for (int c = 0; c < n; c++) {
        if (!(columns >> c & 1)) continue;
        const float product = products[c] * __uint_as_float(weights[c]);
        products[c] = product;
        left |= u32(product != 0.0f) << c;
    }
    return left;
}

// The value of this lane's column.
template <int N> __device__ __forceinline__ float of_lane(const float (&values)[N]) {
    const int lane = threadIdx.x % WARP;
    float mine = values[0];
#pragma unroll
    for (int c = 1; c < N; c++) mine = lane == c ? values[c] : mine;
    return mine;
}

template <int QUANT, int N>
__device__ __forceinline__ void neurons(const u8 *gates, const u8 *ups, const u32 *bucket, const float *up_bias, const void *x,
                                        const u32 *masks, float *a, u32 *list, u32 *counts, int gate_stride, int up_stride, int cols,
                                        int slots, int n, int kind, int activation, float parameter, float cut, int types, int experts,
                                        int each) {
    u32 *active = reinterpret_cast<u32 *>(dynamic_shared); // [CHUNK] columns in which the neuron's product is not zero
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int slot = blockIdx.x * CHUNK + lane;
    // Every warp finds the chunk's wanted neurons for itself: that is cheaper than to meet.
    const u32 neuron = slot < slots ? bucket[slot] : NONE;
    const u32 mask = neuron == NONE ? 0 : columns_of(masks, neuron, n, experts, each) & (ALL >> (WARP - n));
    const u32 wanted = __ballot_sync(ALL, mask != 0);
    int turn = 0;
    for (u32 rest = wanted; rest != 0; rest &= rest - 1, turn++) {
        if (turn % warps != warp) continue;
        const int k = __ffs(int(rest)) - 1;
        const u32 wants = __shfl_sync(ALL, mask, k);
        const u32 id = __shfl_sync(ALL, neuron, k);
        const size_t place = blockIdx.x * CHUNK + k;
        const float bias = up_bias ? up_bias[id] : 0.0f;
        float *const products = a + place * n;
        u32 columns = 0;
        for (int column = 0; column < n; column += N) {
            const int left = n - column;
            const u32 here = wants >> column & (ALL >> (WARP - N));
            const Input input = input_from(x, column, cols);
            // Lane c has column c from here on.
            float product = 0.0f;
            u32 fires = 0;
            // Gate, then up; without a gate, up takes its place. One loop for both: the code is half as large.
            const int last = kind == PLAIN ? 0 : 1;
#pragma unroll 1
            for (int r = 0; r <= last && here != 0; r++) {
                const u8 *const rows[1] = {(r == 0 ? gates : ups) + place * (r == 0 ? gate_stride : up_stride)};
                float sums[1][N];
                row_dots<QUANT, 1, N>(rows, input, cols, left, sums, type_of(types, r));
                const float sum = of_lane(sums[0]) + (r == last ? bias : 0.0f);
                const float value = r == 0 || kind == GATED_BOTH ? apply(activation, parameter, sum) : sum;
                if (r == 0) {
                    product = value;
                    fires = __ballot_sync(ALL, here >> lane & 1 && fabsf(value) > cut);
                    if (fires == 0) break;
                } else if (product != 0.0f) {
                    // Of an infinite up, nothing must be left where the gate is closed.
                    product *= value;
                }
            }
            if (!(fires >> lane & 1)) product = 0.0f;
            if (lane < min(N, left)) products[column + lane] = product;
            columns |= __ballot_sync(ALL, product != 0.0f) << column;
        }
        if (lane == 0) active[k] = columns;
    }
    __syncthreads();
    if (warp != 0) return;
    u32 columns = wanted >> lane & 1 ? active[lane] : 0;
    if (experts != 0 && columns != 0) columns = weigh(a + size_t(slot) * n, masks + experts + size_t(neuron / each) * n, n, columns);
    const u32 chosen = __ballot_sync(ALL, columns != 0);
    if (columns != 0) list[size_t(blockIdx.x) * CHUNK + __popc(chosen & ((1u << lane) - 1))] = u32(slot);
    if (lane == 0) counts[blockIdx.x] = __popc(chosen);
}

// What a thread adds of a row: WORDS words of 4 bytes, NUMBERS numbers, each word's at `at[word]` and following.
template <int QUANT, int N> struct Share;

template <int N> struct Share<F32, N> {
    static constexpr int WORDS = 4, NUMBERS = 4;
};
template <int N> struct Share<F16, N> {
    static constexpr int WORDS = 4, NUMBERS = 8;
};
// Fewer numbers with many columns: there is an accumulator for each of both.
template <int N> struct Share<Q8, N> {
    static constexpr int WORDS = N <= 2 ? 4 : 2, NUMBERS = 4 * WORDS;
};
template <int N> struct Share<Q4, N> {
    static constexpr int WORDS = N <= 2 ? 2 : 1, NUMBERS = 8 * WORDS;
};

// The slots that a split has down rows of, in the order of its chunks, at the beginning of shared memory. Returns how many.
__device__ __forceinline__ u32 entries_of_split(const u32 *list, const u32 *counts, int chunks) {
    u32 *entries = reinterpret_cast<u32 *>(dynamic_shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, splits = gridDim.y;
    // Thread t has the split's chunk t; the last words of the room are the warps' sums.
    const int chunk = blockIdx.y + threadIdx.x * splits;
    const u32 count = chunk < chunks ? counts[chunk] : 0;
    u32 end = count;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const u32 before = __shfl_up_sync(ALL, end, by);
        if (lane >= by) end += before;
    }
    if (lane == WARP - 1) entries[warp] = end;
    __syncthreads();
    u32 total = 0, start = end - count;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; w++) {
        if (w < warp) start += entries[w];
        total += entries[w];
    }
    __syncthreads();
    for (u32 i = 0; i < count; i++) entries[start + i] = list[size_t(chunk) * CHUNK + i];
    __syncthreads();
    return total;
}

// Adds up what the warps of a block have, in halves: 4 to 7 into 0 to 3, and so on.
template <int N, int NUMBERS> __device__ __forceinline__ void add_up_warps(float (&sums)[N][NUMBERS]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float *room = reinterpret_cast<float *>(dynamic_shared);
#pragma unroll
    for (int half = DOWN_WARPS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (warp >= half && warp < 2 * half) {
#pragma unroll
            for (int k = 0; k < N * NUMBERS; k++)
                room[(k * half + warp - half) * WARP + lane] = sums[k / NUMBERS][k % NUMBERS];
        }
        __syncthreads();
        if (warp < half) {
#pragma unroll
            for (int k = 0; k < N * NUMBERS; k++) sums[k / NUMBERS][k % NUMBERS] += room[(k * half + warp) * WARP + lane];
        }
    }
}

template <int WORDS> struct Words {
    u32 w[WORDS];
};
__device__ __forceinline__ Words<4> load_words(const u8 *at, Words<4>) {
    const uint4 v = load_once(reinterpret_cast<const uint4 *>(at));
    return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ Words<2> load_words(const u8 *at, Words<2>) {
    const uint2 v = load_once(reinterpret_cast<const uint2 *>(at));
    return {{v.x, v.y}};
}
__device__ __forceinline__ Words<1> load_words(const u8 *at, Words<1>) {
    return {{load_once(reinterpret_cast<const u32 *>(at))}};
}

// The scale of the group that each word belongs to.
template <int WORDS> __device__ __forceinline__ void word_scales(const u8 *at, bool packed, float (&scales)[WORDS]) {
    if (WORDS == 1 || !packed) {
        const float scale = half_to_float(*reinterpret_cast<const u16 *>(at));
#pragma unroll
        for (int i = 0; i < WORDS; i++) scales[i] = scale;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
            const u32 two = load_once(reinterpret_cast<const u32 *>(at) + i / 2);
            scales[i] = low_half(two);
            scales[i + 1 < WORDS ? i + 1 : i] = high_half(two);
        }
    }
}

template <int QUANT, int N>
__device__ __forceinline__ void down(const u8 *downs, const float *a, const u32 *list, const u32 *counts, float *partial,
                                     int stride, int cols, int n, int, int chunks, int) {
    constexpr int WORDS = Share<QUANT, N>::WORDS, NUMBERS = Share<QUANT, N>::NUMBERS, TURN = 4;
    constexpr bool grouped = QUANT == Q8 || QUANT == Q4;
    const u32 *entries = reinterpret_cast<const u32 *>(dynamic_shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.z * N, left = n - column;
    const u32 total = entries_of_split(list, counts, chunks);

    // This thread's words of every row, and where its groups' scales are.
    const int unit = blockIdx.x * WARP + lane, word = unit * WORDS;
    const int number_bytes = QUANT == F32 ? cols * 4 : QUANT == F16 ? cols * 2 : QUANT == Q8 ? cols : cols / 2;
    const bool mine = word * 4 < number_bytes;
    constexpr int PACK_WORDS = QUANT == Q8 ? 128 : 64, GROUP_WORDS = PACK_WORDS / 16;
    const bool packed = grouped && word < cols / PACK * PACK_WORDS;
    const int group = packed ? word / PACK_WORDS * 16 + word % 16 : word / GROUP_WORDS;

    float sums[N][NUMBERS];
#pragma unroll
    for (int c = 0; c < N; c++) {
#pragma unroll
        for (int i = 0; i < NUMBERS; i++) sums[c][i] = 0.0f;
    }
    for (u32 first = warp; first < total && mine; first += DOWN_WARPS * TURN) {
        Words<WORDS> raw[TURN];
        float scales[TURN][WORDS];
        u32 slots[TURN];
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            const u32 e = first + t * DOWN_WARPS;
            slots[t] = entries[e < total ? e : first];
            const u8 *from = downs + size_t(slots[t]) * stride;
            raw[t] = load_words(from + size_t(word) * 4, Words<WORDS>{});
            if (grouped) word_scales<WORDS>(from + number_bytes + group * 2, packed, scales[t]);
        }
#pragma unroll
        for (int t = 0; t < TURN; t++) {
            // Behind the end the first row is read again and counts for nothing.
            const bool there = first + t * DOWN_WARPS < total;
            float values[NUMBERS];
            if (!grouped) {
                uint4 v = make_uint4(raw[t].w[0], raw[t].w[1 % WORDS], raw[t].w[2 % WORDS], raw[t].w[3 % WORDS]);
                if (QUANT == F32) {
                    float w[4];
                    Unit<F32>::unpack(v, w);
#pragma unroll
                    for (int i = 0; i < NUMBERS; i++) values[i] = w[i % 4];
                } else {
                    float w[8];
                    Unit<F16>::unpack(v, w);
#pragma unroll
                    for (int i = 0; i < NUMBERS; i++) values[i] = w[i % 8];
                }
            } else {
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) {
                    const u32 w = raw[t].w[i * WORDS / NUMBERS];
                    // int8 plus 128 is unsigned; half bytes are.
                    values[i] = QUANT == Q8      ? byte_number(w ^ 0x80808080u, i % 4, 128.0f)
                                : i % 8 < 4 ? byte_number(w & 0x0f0f0f0fu, i % 4, 8.0f)
                                            : byte_number(w >> 4 & 0x0f0f0f0fu, i % 4, 8.0f);
                }
            }
#pragma unroll
            for (int c = 0; c < N; c++) {
                const float product = there && c < left ? a[size_t(slots[t]) * n + column + c] : 0.0f;
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) {
                    const float by = grouped ? product * scales[t][i * WORDS / NUMBERS] : product;
                    sums[c][i] = fmaf(by, values[i], sums[c][i]);
                }
            }
        }
    }

    add_up_warps(sums);
    if (warp != 0 || !mine) return;
#pragma unroll
    for (int c = 0; c < N; c++) {
        if (c >= left) continue;
        float *to = partial + (size_t(blockIdx.y) * n + column + c) * cols;
#pragma unroll
        for (int i = 0; i < NUMBERS; i += grouped ? 4 : 1) {
            if (!grouped) {
                if (unit * NUMBERS + i < cols) to[unit * NUMBERS + i] = sums[c][i];
            } else {
                // Four numbers that follow one another: of a pack's register k, or of a plain group.
                const int at_word = word + i * WORDS / NUMBERS, high = QUANT == Q4 && i % 8 >= 4;
                int at;
                if (packed) {
                    const int k = at_word % PACK_WORDS / 16;
                    at = at_word / PACK_WORDS * PACK + at_word % 16 * GROUP + (QUANT == Q8 ? k : 2 * k + high) * 4;
                } else {
                    at = at_word / GROUP_WORDS * GROUP + at_word % GROUP_WORDS * 4 + (high ? 16 : 0);
                }
                *reinterpret_cast<float4 *>(to + at) =
                    make_float4(sums[c][i], sums[c][(i + 1) % NUMBERS], sums[c][(i + 2) % NUMBERS], sums[c][(i + 3) % NUMBERS]);
            }
        }
    }
}

// Rows of any type: a thread has eight numbers of each.
template <int N>
__device__ __forceinline__ void down_any(const u8 *downs, const float *a, const u32 *list, const u32 *counts, float *partial, int stride,
                                         int cols, int n, int rows, int chunks, int types) {
    constexpr int NUMBERS = 8;
    const u32 *entries = reinterpret_cast<const u32 *>(dynamic_shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.z * N, left = n - column;
    const u32 total = entries_of_split(list, counts, chunks);

    const int type = type_of(types, rows - 1), i = (blockIdx.x * WARP + lane) * NUMBERS;
    const bool mine = i < cols;
    float sums[N][NUMBERS];
#pragma unroll
    for (int c = 0; c < N; c++) {
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) sums[c][k] = 0.0f;
    }
#pragma unroll 1
    for (u32 e = warp; e < total && mine; e += DOWN_WARPS) {
        const u32 slot = entries[e];
        float values[NUMBERS];
        eight_numbers(type, downs + size_t(slot) * stride, i, cols, values);
#pragma unroll
        for (int c = 0; c < N; c++) {
            const float product = c < left ? a[size_t(slot) * n + column + c] : 0.0f;
#pragma unroll
            for (int k = 0; k < NUMBERS; k++) sums[c][k] = fmaf(product, values[k], sums[c][k]);
        }
    }
    add_up_warps(sums);
    if (warp != 0 || !mine) return;
#pragma unroll
    for (int c = 0; c < N; c++) {
        if (c >= left) continue;
        float *const to = partial + (size_t(blockIdx.y) * n + column + c) * cols + i;
#pragma unroll
        for (int k = 0; k < NUMBERS; k += 4)
            *reinterpret_cast<float4 *>(to + k) = make_float4(sums[c][k], sums[c][k + 1], sums[c][k + 2], sums[c][k + 3]);
    }
}

KERNEL __launch_bounds__(256)
    ffn_merge(const float *partial, const float *a, const u32 *list, const u32 *counts, float *out, u32 count, int splits,
              u32 chunks, int n) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < splits; s++) sum += partial[size_t(s) * count + i];
        out[i] = sum;
    }
    if (i >= chunks) return;
    // The words of chunk i: which of its slots' products are not zero.
    for (int b = 0; b < n; b++) {
        u32 bits = 0;
        for (u32 k = 0; k < counts[i]; k++) {
            const u32 slot = list[size_t(i) * CHUNK + k];
            if (a[size_t(slot) * n + b] != 0.0f) bits |= 1u << slot % CHUNK;
        }
        reinterpret_cast<u32 *>(out)[count + b * chunks + i] = bits;
    }
}

#define NEURONS(QUANT, type, N)                                                                                          \
    KERNEL __launch_bounds__(128, ROW_BLOCKS(N))                                                                          \
        ffn_neurons_##type##_##N(const u8 *gates, const u8 *ups, const u32 *bucket, const float *up_bias, const void *x,  \
                                 const u32 *masks, float *a, u32 *list, u32 *counts, int gate_stride, int up_stride,      \
                                 int cols, int slots, int n, int kind, int activation, float parameter, float cut,        \
                                 int types, int experts, int each) {                                                      \
        neurons<QUANT, N>(gates, ups, bucket, up_bias, x, masks, a, list, counts, gate_stride, up_stride, cols, slots, n, \
                          kind, activation, parameter, cut, types, experts, each);                                        \
    }
FOR_QUANTS_AND_WIDTHS(NEURONS)
FOR_WIDTHS(NEURONS, ANY, any)

#define DOWN(SUM, type, N)                                                                                                \
    KERNEL __launch_bounds__(256) ffn_down_##type##_##N(const u8 *downs, const float *a, const u32 *list,                 \
                                                        const u32 *counts, float *partial, int stride, int cols, int n,   \
                                                        int rows, int chunks, int types) {                                \
        SUM(downs, a, list, counts, partial, stride, cols, n, rows, chunks, types);                                       \
    }
#define DOWN_OWN(QUANT, type, N) DOWN(down<QUANT COMMA N>, type, N)
#define DOWN_ANY(QUANT, type, N) DOWN(down_any<N>, type, N)
#define COMMA ,
FOR_QUANTS_AND_WIDTHS(DOWN_OWN)
FOR_WIDTHS(DOWN_ANY, ANY, any)
