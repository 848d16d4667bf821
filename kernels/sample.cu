// Computes: the k largest of each column's numbers with their places, largest first, of equals the one that stands first; and for
//           softmax the largest number and the sum of exp((x - largest) * inverse_temperature).
// Shapes:   logits [n, count] f32; keys [n, ..] u64: a number's bits so that they compare as it does, above the complement of
//           its place. k up to PART.
//           top_logits: keys [n, parts, k] of parts of PART logits. top_keys: the same of `count` keys; again until one part is
//           left. NaN counts as the smallest number; there are zero keys where there are fewer than k numbers.
//           softmax_parts: parts [n, parts] (largest, sum); softmax_merge: out [n] of them.
// Moves:    4 bytes a logit once for the k largest and twice (from L2) for softmax.
// Launch:   a block of 256 threads per part: grid (parts, n); 8 * PART bytes of shared memory, 4 a warp for softmax_parts. A warp
//           per column for softmax_merge.
#include "common.cuh"

// device::launch counts on it.
constexpr int PART = 2048;

// Larger numbers have larger keys; no number has the key zero.
__device__ __forceinline__ u64 key_of(float value, u32 place) {
    const u32 bits = value == value ? __float_as_uint(value) : 0xff800000u;
    const u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(ordered) << 32 | (~place & ALL);
}

// Sorts PART keys in shared memory, largest first (Batcher's bitonic network), and stores the first k.
__device__ __forceinline__ void store_largest(u64 *keys, u64 *out, int k) {
    for (int size = 2; size <= PART; size *= 2) {
        for (int by = size / 2; by > 0; by /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < PART / 2; pair += blockDim.x) {
                const int low = pair / by * by * 2 + pair % by, high = low + by;
                const u64 a = keys[low], b = keys[high];
                // Every other run of `size` goes the other way.
                if ((low & size) == 0 ? a < b : a > b) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k; i += blockDim.x) out[i] = keys[i];
}

KERNEL __launch_bounds__(256) top_logits(const float *logits, u64 *out, int count, int k) {
    u64 *keys = reinterpret_cast<u64 *>(dynamic_shared);
    const int first = blockIdx.x * PART;
    for (int i = threadIdx.x; i < PART; i += blockDim.x) {
        const int place = first + i;
        keys[i] = place < count ? key_of(logits[size_t(blockIdx.y) * count + place], u32(place)) : 0;
    }
    store_largest(keys, out + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * k, k);
}

KERNEL __launch_bounds__(256) top_keys(const u64 *from, u64 *out, int count, int k) {
    u64 *keys = reinterpret_cast<u64 *>(dynamic_shared);
    const int first = blockIdx.x * PART;
    for (int i = threadIdx.x; i < PART; i += blockDim.x)
        keys[i] = first + i < count ? from[size_t(blockIdx.y) * count + first + i] : 0;
    store_largest(keys, out + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * k, k);
}

KERNEL __launch_bounds__(256) softmax_parts(const float *logits, float2 *parts, int count, float inverse_temperature) {
    float *room = reinterpret_cast<float *>(dynamic_shared);
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, first = blockIdx.x * PART;
    const int end = min(PART, count - first);
    const float *x = logits + size_t(blockIdx.y) * count + first;
    float top = BELOW_ALL, sum = 0.0f;
    for (int i = threadIdx.x; i < end; i += blockDim.x) top = fmaxf(top, x[i]);
    top = warp_max(top);
    if (lane == 0) room[threadIdx.x / WARP] = top;
    __syncthreads();
    top = warp_max(lane < warps ? room[lane] : BELOW_ALL);
    for (int i = threadIdx.x; i < end; i += blockDim.x) sum += expf((x[i] - top) * inverse_temperature);
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) parts[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = make_float2(top, sum);
}

KERNEL __launch_bounds__(32) softmax_merge(const float2 *parts, float2 *out, int count, float inverse_temperature) {
    const float2 *const mine = parts + size_t(blockIdx.x) * count;
    float top = BELOW_ALL, sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += WARP) top = fmaxf(top, mine[i].x);
    top = warp_max(top);
    for (int i = threadIdx.x; i < count; i += WARP) sum = fmaf(mine[i].y, expf((mine[i].x - top) * inverse_temperature), sum);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = make_float2(top, sum);
}
