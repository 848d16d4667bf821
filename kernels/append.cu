// Computes: norms queries and keys head by head (RMS) and rotates them by their angles (pairs i, i + dim / 2 of each head), in place, and
//           puts keys and values into the cache as f16; values are normed without weights if `value_norm` is not 0.
// Shapes:   qkv [n, (heads + 2 kv_heads) * dim] f32; angles [n, dim / 2] (cosine, sine) or null: nothing is rotated; q_norm,
//           k_norm [dim] or null: nothing is normed; places [n] (sequence, position); cache f16 [sequences, 2, kv_heads, context, dim].
// Moves:    reads and writes qkv once, writes 4 * kv_heads * dim bytes of the cache per column.
// Launch:   a block per head of q, k and v and column: grid (heads + 2 kv_heads, n), a thread per pair; 4 bytes of shared
//           memory per warp.
#include "common.cuh"

KERNEL __launch_bounds__(256) append(float *qkv, const float2 *angles, const uint2 *places, u16 *cache, const float *q_norm,
                                     const float *k_norm, int heads, int kv_heads, int dim, int context, float epsilon,
                                     int value_norm) {
    const int head = blockIdx.x, column = blockIdx.y, pairs = dim / 2;
    const bool rotates = angles != nullptr && head < heads + kv_heads;
    float *const x = qkv + (size_t(column) * (heads + 2 * kv_heads) + head) * dim;
    const uint2 place = places[column];
    u16 *to = nullptr;
    if (head >= heads) {
        // Keys, then values.
        const size_t part = size_t(place.x) * 2 + (head >= heads + kv_heads ? 1 : 0);
        to = cache + ((part * kv_heads + (head - heads) % kv_heads) * context + place.y) * dim;
    }
    const float *const norm = head < heads ? q_norm : head < heads + kv_heads ? k_norm : nullptr;
    const bool is_normed = norm != nullptr || (value_norm != 0 && head >= heads + kv_heads);
    float scale = 1.0f;
    if (is_normed) {
        float squares = 0.0f;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
        scale = 1.0f / sqrtf(block_sum(squares, reinterpret_cast<float *>(dynamic_shared)) / float(dim) + epsilon);
    }
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        float low = x[i], high = x[i + pairs];
        if (is_normed) {
            low *= norm != nullptr ? scale * norm[i] : scale;
            high *= norm != nullptr ? scale * norm[i + pairs] : scale;
        }
        if (rotates) {
            const float2 angle = angles[size_t(column) * pairs + i];
            const float turned = low * angle.x - high * angle.y;
            high = high * angle.x + low * angle.y;
            low = turned;
        }
        if (rotates || is_normed) {
            x[i] = low;
            x[i + pairs] = high;
        }
        if (to != nullptr) {
            to[i] = float_to_half(low);
            to[i + pairs] = float_to_half(high);
        }
    }
}
