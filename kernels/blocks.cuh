// Rows whose type is said at run time: GGUF's blocks (formats::blocks), and our own types where they are mixed with others. Eight numbers
// at a time become f32, by the same arithmetic as on the host: they are equal bit for bit.
//
// One function for all types instead of one for each: a neuron's three rows may each have a type of their own, and the branch is the
// same for all lanes.
#pragma once
#include "common.cuh"

// As formats::rows::Quant counts them behind the four of our own.
constexpr int BF16 = 4, GGUF_Q8_0 = 5, GGUF_Q4_0 = 6, Q4_1 = 7, Q5_0 = 8, Q5_1 = 9, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
              IQ4_NL = 15, IQ4_XS = 16, MXFP4 = 17;

// Whether kernels take f32 inputs for it (formats::rows::Quant::input).
__device__ __forceinline__ bool takes_floats(int type) { return type == F32 || type == F16 || type == BF16; }

// Bytes of the numbers of a row, without the scales of our own types.
__device__ __forceinline__ size_t number_bytes(int type, int cols) {
    const size_t n = cols;
    switch (type) {
    case F32: return n * 4;
    case F16:
    case BF16: return n * 2;
    case Q8: return n;
    case Q4: return n / 2;
    case GGUF_Q8_0: return n / 32 * 34;
    case Q4_1: return n / 32 * 20;
    case Q5_0: return n / 32 * 22;
    case Q5_1: return n / 32 * 24;
    case Q2_K: return n / 256 * 84;
    case Q3_K: return n / 256 * 110;
    case Q4_K: return n / 256 * 144;
    case Q5_K: return n / 256 * 176;
    case Q6_K: return n / 256 * 210;
    case IQ4_XS: return n / 256 * 136;
    case MXFP4: return n / 32 * 17;
    default: return n / 32 * 18; // GGUF_Q4_0, IQ4_NL
    }
}

// formats::rows::Quant::row_bytes
__device__ __forceinline__ size_t any_row_bytes(int type, int cols) {
    const size_t scales = type == Q8 || type == Q4 ? cols / GROUP * 2 : 0;
    return (number_bytes(type, cols) + scales + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
}

// The types of a neuron block's rows, a byte each in the order of rows.
__device__ __forceinline__ int type_of(int types, int row) { return types >> 8 * row & 255; }

// Eight bytes, a number's code in each.
struct Eight {
    u32 first, second;
};

// Eight bytes at a multiple of ALIGN.
template <int ALIGN> __device__ __forceinline__ Eight eight_bytes(const u8 *at) {
    if (ALIGN == 8) {
        const uint2 v = load_once(reinterpret_cast<const uint2 *>(at));
        return {v.x, v.y};
    }
    if (ALIGN == 4) return {load_once(reinterpret_cast<const u32 *>(at)), load_once(reinterpret_cast<const u32 *>(at) + 1)};
    if (ALIGN == 2) {
        const u16 *const v = reinterpret_cast<const u16 *>(at);
        return {v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16};
    }
    return {at[0] | u32(at[1]) << 8 | u32(at[2]) << 16 | u32(at[3]) << 24, at[4] | u32(at[5]) << 8 | u32(at[6]) << 16 | u32(at[7]) << 24};
}

__device__ __forceinline__ float half_at(const u8 *at) { return half_to_float(*reinterpret_cast<const u16 *>(at)); }

// `bits` of each byte from bit `shift` on.
__device__ __forceinline__ Eight bits_of(Eight v, int shift, u32 bits) { return {v.first >> shift & bits, v.second >> shift & bits}; }
__device__ __forceinline__ Eight halves_of(Eight v, int shift) { return bits_of(v, shift, 0x0f0f0f0fu); }
__device__ __forceinline__ Eight with(Eight a, Eight b) { return {a.first | b.first, a.second | b.second}; }
__device__ __forceinline__ Eight shifted(Eight v, int by) { return {v.first << by, v.second << by}; }

// Bits 0 to 3 of a byte as bit 4 of four bytes.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25; }

// Entries 0 to 15 of a table of bytes, four at a time; a, b, c, d are the table.
__device__ __forceinline__ u32 look_up(u32 codes, u32 a, u32 b, u32 c, u32 d) {
    const u32 low = codes & 0x07070707u;
    // The selectors of four bytes in 16 bits: each byte's three bits beside the next one's.
    const u32 selector = (low & 7) | (low >> 4 & 0x70) | (low >> 8 & 0x700) | (low >> 12 & 0x7000);
    const u32 upper = (codes >> 3 & 0x01010101u) * 255u;
    return (__byte_perm(a, b, selector) & ~upper) | (__byte_perm(c, d, selector) & upper);
}

// out = scale * (code - bias) - min
__device__ __forceinline__ void numbers_of(Eight codes, float bias, float scale, float min, float (&out)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = scale * byte_number(k < 4 ? codes.first : codes.second, k % 4, bias) - min;
}
// The same of signed bytes.
__device__ __forceinline__ void signed_numbers(Eight codes, float scale, float (&out)[8]) {
    numbers_of({codes.first ^ 0x80808080u, codes.second ^ 0x80808080u}, 128.0f, scale, 0.0f, out);
}
// The same of places in IQ4's table of levels.
__device__ __forceinline__ void iq4_numbers(Eight codes, float scale, float (&out)[8]) {
    const u32 a = 0xbfad9881u, b = 0xf6eaddcfu, c = 0x26190d01u, d = 0x71594535u;
    signed_numbers({look_up(codes.first, a, b, c, d), look_up(codes.second, a, b, c, d)}, scale, out);
}

// Scale and min of group `g` of eight in Q4_K and Q5_K, six bits each.
__device__ __forceinline__ void k_scales(const u8 *p, int g, float &scale, float &min) {
    const bool first = g < 4;
    const int s = first ? p[g] & 63 : (p[g + 4] & 15) | p[g - 4] >> 6 << 4;
    const int m = first ? p[g + 4] & 63 : p[g + 4] >> 4 | p[g] >> 6 << 4;
    scale = float(s);
    min = float(m);
}

// Numbers i to i + 8 of a row of f32, f16 or bf16, which is padded with zeros.
__device__ __forceinline__ void eight_floats(int type, const u8 *row, int i, float (&out)[8]) {
    if (type == F32) {
        const uint4 a = load_once(reinterpret_cast<const uint4 *>(row + size_t(i) * 4));
        const uint4 b = load_once(reinterpret_cast<const uint4 *>(row + size_t(i) * 4) + 1);
        const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = __uint_as_float(words[k]);
        return;
    }
    const uint4 v = load_once(reinterpret_cast<const uint4 *>(row + size_t(i) * 2));
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out[2 * k] = type == F16 ? low_half(words[k]) : __uint_as_float(words[k] << 16);
        out[2 * k + 1] = type == F16 ? high_half(words[k]) : __uint_as_float(words[k] & 0xffff0000u);
    }
}

// Numbers i to i + 8 of a row of our own grouped types.
__device__ __forceinline__ void eight_grouped(int type, const u8 *row, int i, int cols, float (&out)[8]) {
    const float scale = half_at(row + (type == Q8 ? cols : cols / 2) + i / GROUP * 2);
    const bool packed = i < cols / PACK * PACK;
    const int number = i % GROUP, group = i % PACK / GROUP;
    if (type == Q8) {
        // Two fours of a group stand a register of 64 bytes apart.
        const u8 *const at = row + (packed ? i / PACK * PACK + number / 4 * 64 + group * 4 : i);
        const u32 *const words = reinterpret_cast<const u32 *>(at);
        return signed_numbers({load_once(words), load_once(words + (packed ? 16 : 1))}, scale, out);
    }
    if (packed) {
        const u32 word = load_once(reinterpret_cast<const u32 *>(row + i / PACK * (PACK / 2) + number / 8 * 64 + group * 4));
        return numbers_of({word & 0x0f0f0f0fu, word >> 4 & 0x0f0f0f0fu}, 8.0f, scale, 0.0f, out);
    }
    const u8 *const at = row + i / GROUP * (GROUP / 2) + i % 16;
    numbers_of(halves_of(eight_bytes<8>(at), number / 16 * 4), 8.0f, scale, 0.0f, out);
}

// Numbers j to j + 8 of a block of 32.
__device__ __forceinline__ void eight_of_32(int type, const u8 *block, int j, float (&out)[8]) {
    const int at = j % 16, shift = j / 16 * 4;
    switch (type) {
    case GGUF_Q8_0: return signed_numbers(eight_bytes<2>(block + 2 + j), half_at(block), out);
    case GGUF_Q4_0: return numbers_of(halves_of(eight_bytes<2>(block + 2 + at), shift), 8.0f, half_at(block), 0.0f, out);
    case Q4_1: return numbers_of(halves_of(eight_bytes<4>(block + 4 + at), shift), 0.0f, half_at(block), -half_at(block + 2), out);
    case IQ4_NL: return iq4_numbers(halves_of(eight_bytes<2>(block + 2 + at), shift), half_at(block), out);
    case MXFP4: {
        // Half of 2^(e - 127); below e = 2 that is subnormal.
        const u32 e = block[0];
        const float scale = __uint_as_float(e >= 2 ? (e - 1) << 23 : 0x00200000u << e);
        const Eight codes = halves_of(eight_bytes<1>(block + 1 + at), shift);
        const u32 a = 0x03020100u, b = 0x0c080604u, c = 0xfdfeff00u, d = 0xf4f8fafcu;
        return signed_numbers({look_up(codes.first, a, b, c, d), look_up(codes.second, a, b, c, d)}, scale, out);
    }
    default: {
        // Q5_0 and Q5_1: the fifth bits stand in a word of their own.
        const int first = type == Q5_0 ? 2 : 4;
        const u32 fifth = block[first + j / 8];
        const Eight top = {spread(fifth), spread(fifth >> 4)};
        const u8 *const from = block + first + 4 + at;
        const Eight codes = with(halves_of(type == Q5_0 ? eight_bytes<2>(from) : eight_bytes<8>(from), shift), top);
        return numbers_of(codes, type == Q5_0 ? 16.0f : 0.0f, half_at(block), type == Q5_0 ? 0.0f : -half_at(block + 2), out);
    }
    }
}

// Numbers j to j + 8 of a block of 256.
__device__ __forceinline__ void eight_of_256(int type, const u8 *block, int j, float (&out)[8]) {
    const int run = j / 32, in_run = j % 32, group = j / 16;
    switch (type) {
    case Q2_K: {
        const u8 packed = block[group];
        const float scale = half_at(block + 80) * float(packed & 15), min = half_at(block + 82) * float(packed >> 4);
        const Eight codes = bits_of(eight_bytes<4>(block + 16 + run / 4 * 32 + in_run), run % 4 * 2, 0x03030303u);
        return numbers_of(codes, 0.0f, scale, min, out);
    }
    case Q3_K: {
        const u8 *const scales = block + 96;
        const int low = scales[group % 8] >> group / 8 * 4 & 15, high = scales[8 + group % 4] >> group / 4 * 2 & 3;
        const float scale = half_at(block + 108) * float((low | high << 4) - 32);
        const Eight codes = bits_of(eight_bytes<2>(block + 32 + run / 4 * 32 + in_run), run % 4 * 2, 0x03030303u);
        const Eight third = shifted(bits_of(eight_bytes<2>(block + in_run), run, 0x01010101u), 2);
        return numbers_of(with(codes, third), 4.0f, scale, 0.0f, out);
    }
    case Q4_K: {
        float scale, min;
        k_scales(block + 4, run, scale, min);
        const Eight codes = halves_of(eight_bytes<8>(block + 16 + run / 2 * 32 + in_run), run % 2 * 4);
        return numbers_of(codes, 0.0f, half_at(block) * scale, half_at(block + 2) * min, out);
    }
    case Q5_K: {
        float scale, min;
        k_scales(block + 4, run, scale, min);
        const Eight codes = halves_of(eight_bytes<8>(block + 48 + run / 2 * 32 + in_run), run % 2 * 4);
        const Eight fifth = shifted(bits_of(eight_bytes<8>(block + 16 + in_run), run, 0x01010101u), 4);
        return numbers_of(with(codes, fifth), 0.0f, half_at(block) * scale, half_at(block + 2) * min, out);
    }
    case Q6_K: {
        const int part = run / 4, within = run % 4;
        const Eight low = halves_of(eight_bytes<2>(block + 64 * part + within % 2 * 32 + in_run), within / 2 * 4);
        const Eight top = bits_of(eight_bytes<2>(block + 128 + 32 * part + in_run), within * 2, 0x03030303u);
        const float scale = half_at(block + 208) * float(int(static_cast<signed char>(block[192 + group])));
        return numbers_of(with(low, shifted(top, 4)), 32.0f, scale, 0.0f, out);
    }
    default: {
        // IQ4_XS
        const u32 high = *reinterpret_cast<const u16 *>(block + 2), low = block[4 + run / 2] >> run % 2 * 4 & 15;
        const float scale = half_at(block) * float(int(low | (high >> 2 * run & 3) << 4) - 32);
        return iq4_numbers(halves_of(eight_bytes<8>(block + 8 + 16 * run + in_run % 16), in_run / 16 * 4), scale, out);
    }
    }
}

// Numbers i to i + 8 of a row of `cols`, both multiples of 8. Never more than one call of it in a loop's body: it is large.
__device__ __forceinline__ void eight_numbers(int type, const u8 *row, int i, int cols, float (&out)[8]) {
    if (takes_floats(type)) return eight_floats(type, row, i, out);
    if (type == Q8 || type == Q4) return eight_grouped(type, row, i, cols, out);
    const bool large = (type >= Q2_K && type <= Q6_K) || type == IQ4_XS;
    if (large) return eight_of_256(type, row + number_bytes(type, i / 256 * 256), i % 256, out);
    eight_of_32(type, row + number_bytes(type, i / 32 * 32), i % 32, out);
}
