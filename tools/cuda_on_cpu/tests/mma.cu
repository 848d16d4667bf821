// One warp's products by tensor cores, each fragment loaded and stored number by number, as the PTX ISA draws it. No program but its
// tests runs them.
#include "common.cuh"

// d [16, 8] += a [16, 8] b [8, 8], all row by row.
KERNEL whole_mma_halves(const u16 *a, const u16 *b, float *d) {
    const int group = threadIdx.x / 4, in_group = threadIdx.x % 4;
    u32 rows[2] = {}, column = 0;
    for (int i = 0; i < 4; i++) {
        const int row = i < 2 ? group : group + 8, k = in_group * 2 + (i & 1);
        rows[i / 2] |= u32(a[row * 8 + k]) << 16 * (i & 1);
    }
    for (int i = 0; i < 2; i++) column |= u32(b[(in_group * 2 + i) * 8 + group]) << 16 * i;
    const auto at = [&](int i) { return (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1); };
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = d[at(i)];
    mma_halves(sums, rows[0], rows[1], column);
    for (int i = 0; i < 4; i++) d[at(i)] = sums[i];
}

// d [8, 8] += a [8, 16] b [16, 8], all row by row.
KERNEL whole_mma_bytes(const u8 *a, const u8 *b, int *d) {
    const int group = threadIdx.x / 4, in_group = threadIdx.x % 4;
    u32 row = 0, column = 0;
    for (int i = 0; i < 4; i++) {
        row |= u32(a[group * 16 + in_group * 4 + i]) << 8 * i;
        column |= u32(b[(in_group * 4 + i) * 8 + group]) << 8 * i;
    }
    int sums[2];
    for (int i = 0; i < 2; i++) sums[i] = d[group * 8 + in_group * 2 + i];
    mma_bytes(sums, row, column);
    for (int i = 0; i < 2; i++) d[group * 8 + in_group * 2 + i] = sums[i];
}
