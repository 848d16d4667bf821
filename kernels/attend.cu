// Computes: attention of each column's queries over its own sequence (flash decoding): softmax(q k / sqrt(dim)) v.
// Shapes:   qkv [n, (heads + 2 kv_heads) * dim] f32, q first, rotated; cache f16 [sequences, 2, kv_heads, context, dim];
//           places [n] (sequence, position); out [n, heads * dim] f32.
//           sinks [heads] f32, which take part in the softmax and bring no value.
//           Scratch: mix [n, heads, splits, dim] f32; peaks [n, heads, splits] (largest score, sum of exponentials).
// Moves:    keys and values that a column sees, once for each H of the query heads that share them.
// Launch:   attend_<H>_<U>, then attend_merge. H = 1, 4 or 8 query heads at once, U = 8 or 2 numbers of a key at once (8 where
//           dim is a multiple of 8).
//           attend: grid (kv_heads * ceil(shared / H), splits, n), 4 warps; split s has SPLIT positions from the one at
//             which the column's first split begins, a multiple of SPLIT: sums do not depend on how long others' sequences are.
//             Shared memory: (H * dim + H * SPLIT + 4 * H * U * 32) * 4 bytes.
//           attend_merge: grid (heads, n), no shared memory.
#include "common.cuh"

// device::kernel::attend counts on these.
constexpr int SPLIT = 128, WARPS = 4;

// The positions that a column sees, and where its first split begins.
struct Range {
    int start, end, first;
};
__device__ __forceinline__ Range seen(int position, int window) {
    const int end = position + 1, start = window > 0 && end > window ? end - window : 0;
    return {start, end, start / SPLIT * SPLIT};
}

// U numbers of a key or value.
template <int U> __device__ __forceinline__ void load_halves(const u16 *at, float (&out)[U]);
template <> __device__ __forceinline__ void load_halves<8>(const u16 *at, float (&out)[8]) {
    const uint4 v = *reinterpret_cast<const uint4 *>(at);
    out[0] = low_half(v.x);
    out[1] = high_half(v.x);
    out[2] = low_half(v.y);
    out[3] = high_half(v.y);
    out[4] = low_half(v.z);
    out[5] = high_half(v.z);
    out[6] = low_half(v.w);
    out[7] = high_half(v.w);
}
template <> __device__ __forceinline__ void load_halves<2>(const u16 *at, float (&out)[2]) {
    const u32 v = *reinterpret_cast<const u32 *>(at);
    out[0] = low_half(v);
    out[1] = high_half(v);
}

template <int H, int U>
__device__ __forceinline__ void attend(const float *qkv, const u16 *cache, const uint2 *places, float *mix, float2 *peaks,
                                       int heads, int kv_heads, int dim, int context, int window) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, splits = gridDim.y;
    const int shared = heads / kv_heads, chunks = (shared + H - 1) / H;
    const int kv_head = blockIdx.x / chunks, head = kv_head * shared + blockIdx.x % chunks * H;
    const int count = min(H, (kv_head + 1) * shared - head); // query heads of this block
    const int split = blockIdx.y, column = blockIdx.z;
    const uint2 place = places[column];
    const Range range = seen(int(place.y), window);
    const int begin = max(range.start, range.first + split * SPLIT), end = min(range.end, range.first + (split + 1) * SPLIT);
    const size_t at = (size_t(column) * heads + head) * splits + split;
    if (begin >= end) {
        // Nobody reads what is mixed here.
        if (int(threadIdx.x) < count) peaks[at + size_t(threadIdx.x) * splits] = make_float2(BELOW_ALL, 0.0f);
        return;
    }

    float *const queries = reinterpret_cast<float *>(dynamic_shared); // [H, dim], scaled
    float *const scores = queries + H * dim;                          // [H, SPLIT]
    float *const room = scores + H * SPLIT;                           // [WARPS, H, U, WARP]
    const float *q = qkv + size_t(column) * (heads + 2 * kv_heads) * dim + size_t(head) * dim;
    const float scale = 1.0f / sqrtf(float(dim));
    for (int i = threadIdx.x; i < H * dim; i += blockDim.x) queries[i] = i < count * dim ? q[i] * scale : 0.0f;
    __syncthreads();

    const size_t part = size_t(place.x) * 2, run = size_t(context) * dim;
    const u16 *const keys = cache + (part * kv_heads + kv_head) * run;
    const u16 *const values = cache + ((part + 1) * kv_heads + kv_head) * run;

    // Scores: a power of two of lanes has a key, U numbers of it each at a time.
    int lanes = 1;
    while (lanes < WARP && lanes * U < dim) lanes *= 2;
    const int per_warp = WARP / lanes, sub = lane % lanes;
    constexpr int KEYS = H == 1 ? 4 : 2; // under way at once
    for (int first = begin + warp * per_warp * KEYS; first < end; first += WARPS * per_warp * KEYS) {
        const int position = first + lane / lanes;
        float sums[KEYS][H];
#pragma unroll
        for (int key = 0; key < KEYS; key++) {
#pragma unroll
            for (int h = 0; h < H; h++) sums[key][h] = 0.0f;
        }
        for (int i = sub * U; i < dim; i += lanes * U) {
            float k[KEYS][U];
#pragma unroll
            for (int key = 0; key < KEYS; key++) {
                // Behind the last position it is read again, and nothing is made of it.
                load_halves<U>(keys + size_t(min(position + key * per_warp, end - 1)) * dim + i, k[key]);
            }
#pragma unroll
            for (int h = 0; h < H; h++) {
#pragma unroll
                for (int j = 0; j < U; j++) {
                    const float number = queries[h * dim + i + j];
#pragma unroll
                    for (int key = 0; key < KEYS; key++) sums[key][h] = fmaf(k[key][j], number, sums[key][h]);
                }
            }
        }
#pragma unroll
        for (int key = 0; key < KEYS; key++) {
            const int at_key = position + key * per_warp;
#pragma unroll
            for (int h = 0; h < H; h++) {
                for (int by = lanes / 2; by > 0; by /= 2) sums[key][h] += __shfl_xor_sync(ALL, sums[key][h], by);
                if (sub == 0 && at_key < end) scores[h * SPLIT + at_key - begin] = sums[key][h];
            }
        }
    }
    __syncthreads();

    // Weights, not yet divided by their sum.
    for (int h = warp; h < count; h += WARPS) {
        float top = BELOW_ALL, sum = 0.0f;
        for (int i = lane; i < end - begin; i += WARP) top = fmaxf(top, scores[h * SPLIT + i]);
        top = warp_max(top);
        for (int i = lane; i < end - begin; i += WARP) {
            const float weight = expf(scores[h * SPLIT + i] - top);
            scores[h * SPLIT + i] = weight;
            sum += weight;
        }
        sum = warp_sum(sum);
        if (lane == 0) peaks[at + size_t(h) * splits] = make_float2(top, sum);
    }
    __syncthreads();

    // Values: lane i of a warp has numbers U * i and following of a value, warps take positions in turns. Where a value is
    // shorter than a warp, its lanes take several positions at once, too.
    const int per_turn = WARPS * per_warp;
    for (int base = 0; base < dim; base += WARP * U) {
        const int i = base + sub * U;
        float sums[H][U];
#pragma unroll
        for (int h = 0; h < H; h++) {
#pragma unroll
            for (int j = 0; j < U; j++) sums[h][j] = 0.0f;
        }
#pragma unroll 4
        for (int p = warp * per_warp + lane / lanes; p < end - begin && i < dim; p += per_turn) {
            float v[U];
            load_halves<U>(values + size_t(begin + p) * dim + i, v);
#pragma unroll
            for (int h = 0; h < H; h++) {
                const float weight = h < count ? scores[h * SPLIT + p] : 0.0f;
#pragma unroll
                for (int j = 0; j < U; j++) sums[h][j] = fmaf(weight, v[j], sums[h][j]);
            }
        }
#pragma unroll
        for (int h = 0; h < H; h++) {
#pragma unroll
            for (int j = 0; j < U; j++) {
                for (int by = lanes; by < WARP; by *= 2) sums[h][j] += __shfl_xor_sync(ALL, sums[h][j], by);
            }
        }
        if (lane / lanes == 0) {
#pragma unroll
            for (int h = 0; h < H; h++) {
#pragma unroll
                for (int j = 0; j < U; j++) room[((warp * H + h) * U + j) * WARP + sub] = sums[h][j];
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < count * lanes * U; k += blockDim.x) {
            const int h = k / (lanes * U), number = k % (lanes * U), j = number % U, from = number / U;
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) sum += room[((w * H + h) * U + j) * WARP + from];
            if (base + number < dim) mix[(at + size_t(h) * splits) * dim + base + number] = sum;
        }
        __syncthreads();
    }
}

KERNEL __launch_bounds__(128) attend_merge(const float *mix, const float2 *peaks, float *out, const float *sinks, int heads, int dim,
                                           int splits, int has_sinks) {
    const size_t head = size_t(blockIdx.y) * heads + blockIdx.x;
    mix += head * splits * dim;
    peaks += head * splits;
    float top = BELOW_ALL, sum = 0.0f;
    for (int s = 0; s < splits; s++) top = fmaxf(top, peaks[s].x);
    for (int s = 0; s < splits; s++) sum += peaks[s].y > 0.0f ? peaks[s].y * expf(peaks[s].x - top) : 0.0f;
    // Beside a sink far above all scores the sum is infinite, and nothing is left of the values.
    if (has_sinks) sum += expf(sinks[blockIdx.x] - top);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float mixed = 0.0f;
        for (int s = 0; s < splits; s++) {
            // Splits that nobody saw are not even written.
            if (peaks[s].y > 0.0f) mixed = fmaf(expf(peaks[s].x - top), mix[size_t(s) * dim + i], mixed);
        }
        out[head * dim + i] = mixed / sum;
    }
}

#define DEFINE(H, U)                                                                                                   \
    KERNEL __launch_bounds__(128, 4) attend_##H##_##U(const float *qkv, const u16 *cache, const uint2 *places, float *mix, \
                                                   float2 *peaks, int heads, int kv_heads, int dim, int context,        \
                                                   int window) {                                                        \
        attend<H, U>(qkv, cache, places, mix, peaks, heads, kv_heads, dim, context, window);                           \
    }
DEFINE(1, 8)
DEFINE(4, 8)
DEFINE(8, 8)
DEFINE(1, 2)
DEFINE(4, 2)
DEFINE(8, 2)
#undef DEFINE
