// Computes: the share of some neuron blocks in an FFN over a prompt's chunk: of every block that holds a neuron gate, activation, up and
//           product for all columns; out[b] += the sum over blocks of a[b] * down row; and in how many columns each was active.
// Shapes:   gates, ups, downs: the rows of slot 0 (plain: up in place of the first two), each so many bytes before those of slot 1; weights [experts, n]
//           of a mixture, which products are multiplied by, or null; bucket [slots]; x [n, cols] f32 or its codes; out [n, cols]
//           f32; a [n, slots] f32; counts [ceil(n / C), ffn] u32, of which the neurons of the bucket are written: the sum over the
//           first index is a neuron's. C = 64 columns, 32 of grouped rows.
// Moves:    gate and up rows once for each C columns, down rows once for each 64; a written once, read once for each 128 numbers of
//           a row.
// Launch:   dense_neurons, dense_down, one after the other; 256 threads make a tile.
//           dense_neurons_f32, _f16: 64 neurons (plain: 128) by 64 columns, grid (ceil(slots / those), ceil(n / 64)), 26112 bytes of
//             shared memory. dense_neurons_q8_0, _q4_0: 16 neurons (plain: 32) by 32 columns, 37888 bytes.
//             dense_neurons_any: as f32, rows of the types in `types`, a byte for each row of a neuron; x is f32, rounded as codes are.
//           dense_down_<type>: 128 numbers of a row by 64 columns, grid (ceil(cols / 128), ceil(n / 64)), 26112 bytes.
//           By tensor cores dense_neurons_tensor_f16 and dense_down_tensor_f16, x and a as [n, halved_bytes]: tiles of the same sizes,
//             27648 bytes. dense_neurons_tensor_q8_0, _q4_0: as without them, to the bit, 48128 bytes; down is dense_down_<type>.
//
// A slot without a neuron may hold anything, and may be written to meanwhile: what is made of it stays in numbers of its own, which
// are not stored.
#include "activation.cuh"
#include "tensor_tiles.cuh"

struct Neurons {
    const u8 *gates, *ups;
    const u32 *bucket;
    const float *up_bias;
    float *a;
    u32 *counts;
    // Of a mixture [experts, n]: what a column's products are multiplied by, of neurons of which an expert has `each`; else null.
    const float *weights;
    int gate_stride, up_stride, slots, n, kind, activation, each;
    float parameter, cut;

    // Of the first row's sum and, where there is a gate, the second's. Says whether the neuron is active.
    __device__ __forceinline__ bool product(float bias, float first, float second, float &out) const {
        const float value = apply(activation, parameter, kind == PLAIN ? first + bias : first);
        out = value;
        // Of an infinite up, nothing must be left where the gate is closed.
        if (kind != PLAIN && value != 0.0f) {
            const float up = second + bias;
            out = value * (kind == GATED_BOTH ? apply(activation, parameter, up) : up);
        }
        return cut > 0.0f ? fabsf(value) > cut : out != 0.0f;
    }
};

// Sums of a tile on their way to products: [2, COLUMNS, STRIDE], two sets of WIDTH rows. Each thread has one neuron of the tile.
template <int WIDTH, int STRIDE, int COLUMNS> struct Sums {
    static __device__ __forceinline__ float *at(int set, int column, int row) {
        return reinterpret_cast<float *>(dynamic_shared) + (set * COLUMNS + column) * STRIDE + row;
    }

    // Stores the products of what lies there; `column_of` says which column of the input a column is. Returns in how many of them this
    // thread's neuron is active.
    template <class Column> static __device__ __forceinline__ u32 store(const Neurons &ffn, int first, int neurons, Column column_of) {
        const int i = threadIdx.x % neurons, slot = first + i;
        const u32 neuron = slot < ffn.slots ? ffn.bucket[slot] : NONE;
        const float bias = neuron != NONE && ffn.up_bias ? ffn.up_bias[neuron] : 0.0f;
        const float *const weights = neuron != NONE && ffn.weights ? ffn.weights + size_t(neuron / ffn.each) * ffn.n : nullptr;
        u32 active = 0;
        __syncthreads();
#pragma unroll 1
        for (int c = threadIdx.x / neurons; c < COLUMNS; c += THREADS / neurons) {
            const int column = column_of(c);
            if (slot >= ffn.slots || column >= ffn.n) continue;
            float product = 0.0f;
            if (neuron != NONE) {
                bool is_active = ffn.product(bias, *at(i / WIDTH, c, i % WIDTH), *at(1, c, i % WIDTH), product);
                if (weights) {
                    const float weight = weights[column];
                    product = weight == 0.0f ? 0.0f : product * weight;
                    is_active = is_active && product != 0.0f;
                }
                active += is_active;
            }
            ffn.a[size_t(column) * ffn.slots + slot] = product;
        }
        __syncthreads();
        return active;
    }

    // Adds up what the threads of a neuron have counted.
    static __device__ __forceinline__ void count(const Neurons &ffn, int first, int neurons, u32 active) {
        u32 *const room = reinterpret_cast<u32 *>(dynamic_shared); // [THREADS / neurons, neurons]
        room[threadIdx.x] = active;
        __syncthreads();
        const int slot = first + int(threadIdx.x);
        if (int(threadIdx.x) >= neurons || slot >= ffn.slots || ffn.bucket[slot] == NONE) return;
        u32 sum = 0;
        for (int t = threadIdx.x; t < THREADS; t += neurons) sum += room[t];
        ffn.counts[ffn.bucket[slot]] = sum;
    }
};

template <int QUANT> __device__ __forceinline__ void float_neurons(const Neurons &ffn, const float *x, int cols, int types) {
    using Tile = FloatTile<2, 4>;
    // Half of the columns at a time.
    using Room = Sums<SET, Tile::ROW_STRIDE, Tile::COLUMNS / 2>;
    const bool plain = ffn.kind == PLAIN;
    const int neurons = plain ? 2 * SET : SET, first = blockIdx.x * neurons, first_column = blockIdx.y * Tile::COLUMNS;
    // The two sets of rows are gates and ups of the same neurons, or ups of twice as many.
    const auto rows = [&](int s, int r) {
        const int slot = first + (plain ? s * SET : 0) + r;
        if (slot >= ffn.slots) return static_cast<const u8 *>(nullptr);
        return plain || s == 0 ? ffn.gates + size_t(slot) * ffn.gate_stride : ffn.ups + size_t(slot) * ffn.up_stride;
    };
    float sums[2][4][4] = {};
    const int sets = plain ? type_of(types, 0) * 0x101 : types;
    Tile::template dots<QUANT>(rows, x, first_column, cols, ffn.n, sets, sums);
    u32 active = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                *reinterpret_cast<float4 *>(Room::at(s, threadIdx.x / 16 * 2 + c, Tile::row())) =
                    make_float4(sums[s][0][half * 2 + c], sums[s][1][half * 2 + c], sums[s][2][half * 2 + c], sums[s][3][half * 2 + c]);
            }
        }
        active += Room::store(ffn, first, neurons, [=](int c) { return first_column + c / 2 * 4 + half * 2 + c % 2; });
    }
    Room::count(ffn, first, neurons, active);
}

template <int QUANT, class Products>
__device__ __forceinline__ void grouped_neurons(const Neurons &ffn, const void *x, int cols, int) {
    using Tile = GroupedTile<QUANT, Products>;
    using Room = Sums<16, 17, Tile::COLUMNS>;
    const bool plain = ffn.kind == PLAIN;
    const int neurons = plain ? 32 : 16, first = blockIdx.x * neurons, first_column = blockIdx.y * Tile::COLUMNS;
    const auto rows = [&](int r) {
        const int slot = first + (plain ? r : r % 16);
        if (slot >= ffn.slots) return static_cast<const u8 *>(nullptr);
        return plain || r < 16 ? ffn.gates + size_t(slot) * ffn.gate_stride : ffn.ups + size_t(slot) * ffn.up_stride;
    };
    float sums[4] = {};
    Tile::dots(rows, x, first_column, cols, ffn.n, sums);
#pragma unroll
    for (int i = 0; i < 4; i++) *Room::at(Tile::row(i) / 16, Tile::column(i), Tile::row(i) % 16) = sums[i];
    Room::count(ffn, first, neurons, Room::store(ffn, first, neurons, [=](int c) { return first_column + c; }));
}

__device__ __forceinline__ void half_neurons(const Neurons &ffn, const u8 *x, int cols, int) {
    // Half of the columns at a time: those of four warps.
    constexpr int WIDTH = HalfTile::COLUMNS / 2;
    using Room = Sums<SET, SET + 4, WIDTH>;
    const bool plain = ffn.kind == PLAIN;
    const int neurons = plain ? 2 * SET : SET, first = blockIdx.x * neurons, first_column = blockIdx.y * HalfTile::COLUMNS;
    const auto rows = [&](int r) {
        const int slot = first + (plain ? r : r % SET);
        if (slot >= ffn.slots) return static_cast<const u8 *>(nullptr);
        return plain || r < SET ? ffn.gates + size_t(slot) * ffn.gate_stride : ffn.ups + size_t(slot) * ffn.up_stride;
    };
    HalfTile::Out sums = {};
    HalfTile::dots(rows, x, first_column, cols, ffn.n, sums);
    u32 active = 0;
#pragma unroll 1
    for (int start = 0; start < HalfTile::COLUMNS; start += WIDTH) {
        if (HalfTile::first_column() == start)
            HalfTile::each(sums, x, first_column, cols, ffn.n, [=](int r, int column, float sum) {
                *Room::at(r / SET, column - start, r % SET) = sum;
            });
        active += Room::store(ffn, first, neurons, [=](int c) { return first_column + start + c; });
    }
    Room::count(ffn, first, neurons, active);
}

// Numbers `start` to `start` + 128 of a down row, unit by unit; `to` is where number `start` of the row stands
// in the room of rows. Zeros behind the end, and where there is no row.
template <int QUANT> struct DownRow {
    static constexpr int NUMBERS = Numbers<QUANT>::COUNT, PARTS = 2 * SET / NUMBERS;

    template <class Put>
    static __device__ __forceinline__ void unpack(const u8 *row, int type, int part, int start, int cols, Put put) {
        float numbers[NUMBERS];
        Numbers<QUANT>::load(row, type, start + part * NUMBERS, cols, numbers);
#pragma unroll
        for (int i = 0; i < NUMBERS; i += 4)
            put(part * NUMBERS + i, make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]));
    }
};

// The same of a grouped row, word by word: the four groups' words of one place stand side by side in a pack.
template <int QUANT> struct GroupedDownRow {
    static constexpr int GROUP_WORDS = QUANT == Q8 ? 8 : 4, PARTS = 4 * GROUP_WORDS;

    static __device__ __forceinline__ float4 four(u32 codes, float scale) {
        return make_float4(scale * float(int(codes << 24) >> 24), scale * float(int(codes << 16) >> 24),
                           scale * float(int(codes << 8) >> 24), scale * float(int(codes) >> 24));
    }

    template <class Put> static __device__ __forceinline__ void unpack(const u8 *row, int, int part, int start, int cols, Put put) {
        const int in_tile = part % 4, word = part / 4, group = start / GROUP + in_tile;
        const bool there = row != nullptr && group * GROUP < cols;
        const bool packed = (group * GROUP) / PACK * PACK + PACK <= cols;
        const int in_pack = group % (PACK / GROUP), first = group - in_pack;
        const int at = first * GROUP_WORDS + (packed ? word * (PACK / GROUP) + in_pack : in_pack * GROUP_WORDS + word);
        const int number_bytes = QUANT == Q8 ? cols : cols / 2;
        const u32 raw = there ? reinterpret_cast<const u32 *>(row)[at] : 0;
        const float scale = there ? half_to_float(reinterpret_cast<const u16 *>(row + number_bytes)[group]) : 0.0f;
        if (QUANT == Q8) {
            put(in_tile * GROUP + word * 4, four(raw, scale));
        } else {
            // In a pack the high half bytes are the next four numbers, in a plain group those of its second half.
            put(in_tile * GROUP + (packed ? word * 8 : word * 4), four(low_codes(raw), scale));
            put(in_tile * GROUP + (packed ? word * 8 + 4 : word * 4 + 16), four(high_codes(raw), scale));
        }
    }
};
template <> struct DownRow<Q8> : GroupedDownRow<Q8> {};
template <> struct DownRow<Q4> : GroupedDownRow<Q4> {};

template <int QUANT>
__device__ __forceinline__ void dense_down(const u8 *downs, const u32 *bucket, const float *a, float *out, int stride, int cols,
                                           int slots, int n, int rows, int types) {
    using Tile = FloatTile<2, 4>;
    const int first = blockIdx.x * 2 * SET, first_column = blockIdx.y * Tile::COLUMNS;
    float sums[2][4][4] = {};
    for (int start = 0; start < slots; start += DEPTH) {
        for (int t = threadIdx.x; t < DEPTH * DownRow<QUANT>::PARTS; t += THREADS) {
            const int k = t / DownRow<QUANT>::PARTS, part = t % DownRow<QUANT>::PARTS, slot = start + k;
            const bool there = slot < slots && bucket[slot] != NONE;
            const u8 *const from = there ? downs + size_t(slot) * stride : nullptr;
            float *const to = Tile::rows() + k * Tile::ROW_STRIDE;
            DownRow<QUANT>::unpack(from, type_of(types, rows - 1), part, first, cols, [=](int i, float4 four) {
                *reinterpret_cast<float4 *>(to + i / SET * Tile::SET_ROOM + i % SET) = four;
            });
        }
        Tile::bring_columns(a, first_column, start, slots, n);
        __syncthreads();
        Tile::multiply(sums);
        __syncthreads();
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int column = first_column + Tile::column() + c, i = first + s * SET + Tile::row();
            if (column >= n) continue;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                if (i + r < cols) out[size_t(column) * cols + i + r] += sums[s][r][c];
            }
        }
    }
}

// Down rows lie along the sum's neighbours, and a fragment wants numbers of two slots in a word: they are put together on their way into
// the room, where words of the numbers stand side by side.
__device__ __forceinline__ void half_down(const u8 *downs, const u32 *bucket, const u8 *a, float *out, int stride, int cols, int slots,
                                          int n) {
    using Tile = HalfTile;
    constexpr int PAIRS = 2, UNITS = Tile::ROWS / Tile::UNIT;
    const int first = blockIdx.x * Tile::ROWS, first_column = blockIdx.y * Tile::COLUMNS;
    uint4 of_rows[PAIRS][2], of_columns[Tile::OF_COLUMNS];
    const auto bring = [&](int start) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int t = threadIdx.x + i * THREADS, number = first + t % UNITS * Tile::UNIT;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int slot = start + t / UNITS * 2 + k;
                const bool there = slot < slots && number < cols && bucket[slot] != NONE;
                const u8 *const from = downs + size_t(slot) * stride + size_t(number) * 2;
                of_rows[i][k] = there ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
            }
        }
        Tile::bring_columns(of_columns, a, first_column, start, slots, n);
    };
    const auto low = [](u32 one, u32 two) { return __byte_perm(one, two, 0x5410); };
    const auto high = [](u32 one, u32 two) { return __byte_perm(one, two, 0x7632); };
    Tile::Out sums = {};
    bring(0);
    for (int start = 0; start < slots; start += Tile::STEP) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int t = threadIdx.x + i * THREADS;
            const uint4 one = of_rows[i][0], two = of_rows[i][1];
            uint4 *const to = reinterpret_cast<uint4 *>(Tile::rows() + t / UNITS * Tile::BESIDE + t % UNITS * Tile::UNIT);
            to[0] = make_uint4(low(one.x, two.x), high(one.x, two.x), low(one.y, two.y), high(one.y, two.y));
            to[1] = make_uint4(low(one.z, two.z), high(one.z, two.z), low(one.w, two.w), high(one.w, two.w));
        }
        Tile::put_columns(of_columns);
        __syncthreads();
        bring(start + Tile::STEP);
        Tile::multiply<1, Tile::BESIDE>(sums);
        __syncthreads();
    }
    Tile::each(sums, a, first_column, slots, n, [=](int i, int column, float sum) {
        if (first_column + column < n && first + i < cols) out[size_t(first_column + column) * cols + first + i] += sum;
    });
}

#define DEFINE_NEURONS(type, NEURONS, INPUT)                                                                                   \
    KERNEL __launch_bounds__(256, 2)                                                                                           \
        dense_neurons_##type(const u8 *gates, const u8 *ups, const u32 *bucket, const float *up_bias, const INPUT *x,          \
                             float *a, u32 *counts, const float *weights, int gate_stride, int up_stride, int cols, int slots, \
                             int n, int ffn, int kind, int activation, float parameter, float cut, int types, int each) {      \
        u32 *const part = counts + size_t(blockIdx.y) * ffn;                                                                   \
        NEURONS({gates, ups, bucket, up_bias, a, part, weights, gate_stride, up_stride, slots, n, kind, activation, each,      \
                 parameter, cut},                                                                                              \
                x, cols, types);                                                                                               \
    }
#define DEFINE_DOWN(QUANT, type)                                                                                               \
    KERNEL __launch_bounds__(256) dense_down_##type(const u8 *downs, const u32 *bucket, const float *a, float *out,            \
                                                    int stride, int cols, int slots, int n, int rows, int types) {             \
        dense_down<QUANT>(downs, bucket, a, out, stride, cols, slots, n, rows, types);                                         \
    }
#define COMMA ,
DEFINE_NEURONS(f32, float_neurons<F32>, float)
DEFINE_NEURONS(f16, float_neurons<F16>, float)
DEFINE_NEURONS(q8_0, grouped_neurons<Q8 COMMA LaneProducts>, void)
DEFINE_NEURONS(q4_0, grouped_neurons<Q4 COMMA LaneProducts>, void)
DEFINE_NEURONS(any, float_neurons<ANY>, float)
DEFINE_NEURONS(tensor_f16, half_neurons, u8)
DEFINE_NEURONS(tensor_q8_0, grouped_neurons<Q8 COMMA TensorProducts>, void)
DEFINE_NEURONS(tensor_q4_0, grouped_neurons<Q4 COMMA TensorProducts>, void)
DEFINE_DOWN(F32, f32)
DEFINE_DOWN(F16, f16)
DEFINE_DOWN(Q8, q8_0)
DEFINE_DOWN(Q4, q4_0)
DEFINE_DOWN(ANY, any)
#undef DEFINE_NEURONS
#undef DEFINE_DOWN

KERNEL __launch_bounds__(256, 2) dense_down_tensor_f16(const u8 *downs, const u32 *bucket, const u8 *a, float *out, int stride,
                                                       int cols, int slots, int n, int, int) {
    half_down(downs, bucket, a, out, stride, cols, slots, n);
}
