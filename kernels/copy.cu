// Computes: to = from: what a card's copy rate is measured by.
// Shapes:   16 * count bytes each, 16-byte aligned.
// Moves:    reads and writes 16 bytes a thread and turn.
// Launch:   any grid; no shared memory.
#include "common.cuh"

KERNEL __launch_bounds__(256) copy_bytes(const uint4 *from, uint4 *to, u64 count) {
    const u64 step = u64(gridDim.x) * blockDim.x;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    // Four loads under way before the first store.
    for (; i + 3 * step < count; i += 4 * step) {
        const uint4 a = load_once(from + i), b = load_once(from + i + step);
        const uint4 c = load_once(from + i + 2 * step), d = load_once(from + i + 3 * step);
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < count; i += step) to[i] = load_once(from + i);
}
