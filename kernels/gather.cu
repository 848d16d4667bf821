// Computes: copies blocks from host memory that the card can read to slots: many small moves by one launch.
// Shapes:   moves [count] (address of a block, slot), u64 each; slots [..] of `bytes` each, a multiple of 16.
// Moves:    count * bytes over the link, and as much into the card's memory.
// Launch:   grid (blocks for each move, count), any number of either; no shared memory.
#include "common.cuh"

struct Move {
    const uint4 *from;
    u64 slot;
};

KERNEL __launch_bounds__(256) gather(const Move *moves, uint4 *slots, u64 bytes) {
    const Move move = moves[blockIdx.y];
    const u64 count = bytes / 16, step = u64(gridDim.x) * blockDim.x;
    uint4 *const to = slots + move.slot * count;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    // The link is far away: four loads of each thread are on their way at once.
    for (; i + 3 * step < count; i += 4 * step) {
        const uint4 a = load_once(move.from + i), b = load_once(move.from + i + step);
        const uint4 c = load_once(move.from + i + 2 * step), d = load_once(move.from + i + 3 * step);
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < count; i += step) to[i] = load_once(move.from + i);
}
