//! How one row of weights lies in memory and in the neuron store: the form that every kernel reads.
//!
//! A row is its numbers, then (quantised types) its group scales, padded with zeros to [`ROW_ALIGN`] bytes:
//!
//! ```text
//! f32   4 bytes a number
//! f16   2 bytes a number
//! block types (`formats::blocks`)   GGUF's blocks as they are
//! q8_0  1 byte a number (i8) in packs of 512, then one f16 scale a group of 32
//! q4_0  half a byte a number (v means v - 8) in packs of 512, then one f16 scale a group of 32
//! ```
//!
//! A pack is 16 groups, interleaved so that lane j of a 64-byte register only ever holds numbers of group j: register k
//! (0..8) has numbers 4k..4k+4 of each group. Products of eight registers then add up in whole numbers, and one
//! multiplication by the 16 scales finishes 512 of them. In q4_0 register 2p is the low and 2p+1 the high halves of the
//! same 64 bytes. What is left after whole packs follows in plain groups of 32 (q4_0: number j low, 16+j high).
//!
//! GGUF interleaves scales and numbers (34 and 18 bytes a group), which no vector load is aligned to; here the numbers
//! are aligned runs and the scales of 16 groups are one load. The values are the same: converting a GGUF row to this
//! form and back changes no bit.

use super::DType;
use super::blocks::BlockType;
use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Rows begin at multiples of this: a cache line and a full AVX-512 register.
pub const ROW_ALIGN: usize = 64;
/// Numbers that share a scale.
pub const GROUP: usize = 32;
/// Numbers of a pack of the grouped types.
pub const PACK: usize = 512;

/// Where number `i` of a grouped row of `cols` stands: byte of a q8_0 row, half byte (before pairing) of a q4_0 row.
pub const fn code_position(i: usize, cols: usize) -> usize {
    if i < cols / PACK * PACK {
        let (group, number) = (i % PACK / GROUP, i % GROUP);
        i / PACK * PACK + number / 4 * 64 + group * 4 + number % 4
    } else {
        i
    }
}

/// Where an axpy over grouped rows puts number `i` of its output: within a pack, all 16 groups' numbers side by side.
pub const fn axpy_position(i: usize, cols: usize) -> usize {
    if i < cols / PACK * PACK { i / PACK * PACK + i % GROUP * 16 + i % PACK / GROUP } else { i }
}

/// to += from, where `from` is the output of an axpy over rows of this type, in the order of [`axpy_position`].
pub fn add_axpy(quant: Quant, from: &[f32], to: &mut [f32]) {
    let cols = to.len();
    let packed = if quant.is_grouped() { cols / PACK * PACK } else { 0 };
    for (from, to) in from[..packed].chunks_exact(PACK).zip(to.chunks_exact_mut(PACK)) {
        for (group, to) in to.chunks_exact_mut(GROUP).enumerate() {
            to.iter_mut().enumerate().for_each(|(number, to)| *to += from[number * 16 + group]);
        }
    }
    to[packed..].iter_mut().zip(&from[packed..]).for_each(|(to, from)| *to += from);
}

/// Byte and shift of number `i` in a q4_0 row of `cols`.
const fn q4_place(i: usize, cols: usize) -> (usize, u32) {
    let at = code_position(i, cols);
    if i < cols / PACK * PACK {
        let register = at % PACK / 64;
        (at / PACK * (PACK / 2) + register / 2 * 64 + at % 64, (register % 2 * 4) as u32)
    } else {
        (at / GROUP * (GROUP / 2) + at % (GROUP / 2), (at % GROUP / (GROUP / 2) * 4) as u32)
    }
}

/// Code (0..16) of number `i` in a q4_0 row.
pub fn q4_code(row: &[u8], i: usize, cols: usize) -> u8 {
    let (byte, shift) = q4_place(i, cols);
    row[byte] >> shift & 15
}

/// How a row's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quant {
    /// 4 bytes a number.
    F32,
    /// 2 bytes a number (IEEE 754 half precision).
    F16,
    /// A signed byte a number, and an f16 scale for each group of 32 (`q8_0`).
    Q8,
    /// 4 bits a number, and an f16 scale for each group of 32 (`q4_0`).
    Q4,
    /// GGUF's blocks, untouched.
    Block(BlockType),
}

/// The form in which a kernel takes its input for weights of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// f32 numbers.
    Floats,
    /// int8 codes in the order of packs.
    Packs,
    /// int8 codes in their own order.
    Blocks,
}

impl Quant {
    /// The types of our own form.
    pub const OWN: [Quant; 4] = [Quant::F32, Quant::F16, Quant::Q8, Quant::Q4];

    /// The type's name in files, flags and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Quant::F32 => "f32",
            Quant::F16 => "f16",
            Quant::Q8 => "q8_0",
            Quant::Q4 => "q4_0",
            Quant::Block(kind) => kind.form().name,
        }
    }

    /// The type of rows that a source file's numbers have as they lie there.
    pub const fn of_source(dtype: DType) -> Quant {
        match dtype {
            DType::F32 => Quant::F32,
            DType::F16 => Quant::F16,
            DType::Block(kind) => Quant::Block(kind),
        }
    }

    /// The source file's type that [`Quant::of_source`] makes this of; `None` for our own forms.
    pub const fn source(self) -> Option<DType> {
        match self {
            Quant::F32 => Some(DType::F32),
            Quant::F16 => Some(DType::F16),
            Quant::Block(kind) => Some(DType::Block(kind)),
            Quant::Q8 | Quant::Q4 => None,
        }
    }

    /// The type of our own form that holds the same numbers bit for bit, if there is one, else the type itself.
    pub const fn packed(self) -> Quant {
        match self {
            Quant::Block(BlockType::Q8_0) => Quant::Q8,
            Quant::Block(BlockType::Q4_0) => Quant::Q4,
            Quant::Block(BlockType::BF16) => Quant::F16,
            other => other,
        }
    }

    /// How many types there are.
    pub const COUNT: usize = Quant::OWN.len() + BlockType::COUNT;

    /// The type's place in tables by type, below [`Quant::COUNT`].
    #[inline]
    pub const fn index(self) -> usize {
        match self {
            Quant::F32 => 0,
            Quant::F16 => 1,
            Quant::Q8 => 2,
            Quant::Q4 => 3,
            Quant::Block(kind) => Quant::OWN.len() + kind as usize,
        }
    }

    /// All types.
    pub fn all() -> impl Iterator<Item = Quant> {
        Quant::OWN.into_iter().chain(BlockType::ALL.map(Quant::Block))
    }

    /// A row's length must be a multiple of this many numbers.
    pub const fn unit(self) -> usize {
        match self {
            Quant::F32 | Quant::F16 => 1,
            Quant::Q8 | Quant::Q4 => GROUP,
            Quant::Block(kind) => kind.form().numbers,
        }
    }

    /// What kernels for weights of this type take as input.
    pub const fn input(self) -> Input {
        match self {
            Quant::F32 | Quant::F16 | Quant::Block(BlockType::BF16) => Input::Floats,
            Quant::Q8 | Quant::Q4 => Input::Packs,
            Quant::Block(_) => Input::Blocks,
        }
    }

    /// The type of embeddings and head in a store whose other weights have this type: q8_0 in place of q4_0, and q6_k in place of smaller
    /// blocks of as many numbers, because four bits there cost too much quality for the bytes that they save.
    pub fn of_edges(self) -> Quant {
        let q6_k = BlockType::Q6_K.form();
        match self {
            Quant::Q4 => Quant::Q8,
            Quant::Block(kind) if kind.form().bits() < q6_k.bits() => {
                if kind.form().numbers == q6_k.numbers {
                    Quant::Block(BlockType::Q6_K)
                } else {
                    Quant::Q8
                }
            }
            other => other,
        }
    }

    /// The type's name in GGUF's tools.
    pub const fn ggml_name(self) -> &'static str {
        match self {
            Quant::F32 => "F32",
            Quant::F16 => "F16",
            Quant::Q8 => "Q8_0",
            Quant::Q4 => "Q4_0",
            Quant::Block(kind) => kind.form().ggml_name,
        }
    }

    /// Whether groups of [`GROUP`] numbers share a scale: true of q8_0 and q4_0.
    pub const fn is_grouped(self) -> bool {
        matches!(self, Quant::Q8 | Quant::Q4)
    }

    /// Bytes of the numbers of a row, without padding and, in our own types, without scales.
    pub const fn number_bytes(self, cols: usize) -> usize {
        match self {
            Quant::F32 => cols * 4,
            Quant::F16 => cols * 2,
            Quant::Q8 => cols,
            Quant::Q4 => cols / 2,
            Quant::Block(kind) => cols / kind.form().numbers * kind.form().bytes,
        }
    }

    /// How many bytes ahead to prefetch in a stream of rows of so many bytes. The rows of grouped types are short and need much arithmetic
    /// per byte: one row ahead took q8_0 decoding on one thread of a Zen 4 from 17.5 to 21 GB/s. f16 gained nothing that could be shown.
    #[inline]
    pub const fn ahead(self, row_bytes: usize) -> usize {
        if self.is_grouped() { row_bytes } else { 0 }
    }

    /// Bytes of a row of `cols` numbers, a multiple of [`Quant::unit`], padded.
    pub const fn row_bytes(self, cols: usize) -> usize {
        let scales = if self.is_grouped() { cols / GROUP * 2 } else { 0 };
        (self.number_bytes(cols) + scales).next_multiple_of(ROW_ALIGN)
    }
}

/// Rows at equal distances in memory: row r begins `r * stride` bytes behind `first`.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first byte of row 0.
    pub first: *const u8,
    /// Bytes from the beginning of one row to that of the next.
    pub stride: usize,
    /// Bytes from what is read to what will be read next, for kernels to prefetch; 0 where the hardware does it better.
    pub ahead: usize,
}

impl Rows {
    /// The first byte of row `r`.
    #[inline(always)]
    pub fn row(self, r: usize) -> *const u8 {
        self.first.wrapping_add(r * self.stride)
    }

    /// The same rows without the first `r`.
    #[inline(always)]
    pub fn from(self, r: usize) -> Rows {
        Rows { first: self.row(r), ..self }
    }
}

impl std::str::FromStr for Quant {
    type Err = String;
    fn from_str(text: &str) -> Result<Quant, String> {
        Quant::all().find(|quant| quant.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
            let names: Vec<&str> = Quant::all().map(Quant::name).collect();
            format!("'{text}' is not a store type; take one of {}", names.join(", "))
        })
    }
}

impl Serialize for Quant {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Quant {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Quant, D::Error> {
        let name = std::borrow::Cow::<str>::deserialize(from)?;
        let known = Quant::all().find(|quant| quant.name() == name);
        known.ok_or_else(|| serde::de::Error::custom(format_args!("'{name}' is no type of weights")))
    }
}

/// The f16 scales of a grouped row of `cols` numbers.
pub fn scales(quant: Quant, row: &[u8], cols: usize) -> &[f16] {
    let at = quant.number_bytes(cols);
    bytemuck::cast_slice(&row[at..at + cols / GROUP * 2])
}

/// Writes finite `values` as a row; `row` is [`Quant::row_bytes`] long. What is beyond f16 must have been refused before, except for f32,
/// bf16 and mxfp4: the others cannot hold it or its scale, and what it becomes here is not said.
pub fn encode(quant: Quant, values: &[f32], row: &mut [u8]) {
    encode_weighted(quant, values, None, row);
}

/// The same with a small sum of squared errors each times its `importance`, of which there is one for each value, none of them negative.
/// Without it all values count alike. f32 and f16, which have no scales, take no notice of it.
pub fn encode_weighted(quant: Quant, values: &[f32], importance: Option<&[f32]>, row: &mut [u8]) {
    let cols = values.len();
    let (numbers, rest) = row.split_at_mut(quant.number_bytes(cols));
    rest.fill(0);
    match quant {
        Quant::F32 => numbers.copy_from_slice(bytemuck::cast_slice(values)),
        Quant::F16 => bytemuck::cast_slice_mut::<u8, f16>(numbers).convert_from_f32_slice(values),
        Quant::Q8 if importance.is_some() => {
            let mut blocks = vec![0; DType::Q8_0.row_bytes(cols)];
            BlockType::Q8_0.encode(values, importance, &mut blocks);
            from_gguf_q8_0(&blocks, cols, row);
        }
        Quant::Q4 if importance.is_some() => {
            let mut blocks = vec![0; DType::Q4_0.row_bytes(cols)];
            BlockType::Q4_0.encode(values, importance, &mut blocks);
            from_gguf_q4_0(&blocks, cols, row);
        }
        Quant::Q8 => {
            for (g, group) in values.chunks_exact(GROUP).enumerate() {
                let (scale, codes) = q8_group(group);
                put_scale(rest, g, scale);
                put_q8_group(numbers, cols, g, &codes.map(|c| c as u8));
            }
        }
        Quant::Q4 => {
            numbers.fill(0);
            for (g, group) in values.chunks_exact(GROUP).enumerate() {
                let (scale, codes) = q4_group(group);
                put_scale(rest, g, scale);
                put_q4_group(numbers, cols, g, &codes);
            }
        }
        Quant::Block(kind) => kind.encode(values, importance, numbers),
    }
}

/// Reads a whole row back.
pub fn decode(quant: Quant, row: &[u8], out: &mut [f32]) {
    let cols = out.len();
    decode_range(quant, row, cols, 0, out);
}

/// Reads numbers `start..start + out.len()` of a row of `cols`. `start` is a multiple of [`PACK`] and so is the length,
/// unless the range ends with the row.
pub fn decode_range(quant: Quant, row: &[u8], cols: usize, start: usize, out: &mut [f32]) {
    let end = start + out.len();
    debug_assert!(start.is_multiple_of(PACK) && (end == cols || end.is_multiple_of(PACK)));
    match quant {
        Quant::F32 => out.copy_from_slice(bytemuck::cast_slice(&row[start * 4..end * 4])),
        Quant::F16 => bytemuck::cast_slice::<u8, f16>(&row[start * 2..end * 2]).convert_to_f32_slice(out),
        Quant::Block(kind) => {
            let form = kind.form();
            kind.decode(&row[start / form.numbers * form.bytes..end / form.numbers * form.bytes], out);
        }
        Quant::Q8 | Quant::Q4 => {
            let scales = &scales(quant, row, cols)[start / GROUP..];
            let packed = cols / PACK * PACK;
            let mut at = start;
            // One conversion for a pack: of scales one by one, each asks anew what the CPU can do.
            let mut factors = [0f32; PACK / GROUP];
            for (out, scales) in out.chunks_mut(PACK).zip(scales.chunks(PACK / GROUP)) {
                scales.convert_to_f32_slice(&mut factors[..scales.len()]);
                // Four numbers of a group lie side by side in a pack, which is what the compiler makes one register of.
                match (quant, at < packed) {
                    (Quant::Q8, true) => {
                        let (codes, _) = row[at..at + PACK].as_chunks::<4>();
                        for (g, out) in out.chunks_exact_mut(GROUP).enumerate() {
                            for (k, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                                *out = codes[k * 16 + g].map(|code| f32::from(code as i8));
                            }
                        }
                    }
                    (Quant::Q8, false) => {
                        let codes: &[i8] = bytemuck::cast_slice(&row[at..at + out.len()]);
                        out.iter_mut().zip(codes).for_each(|(o, &c)| *o = c as f32);
                    }
                    (_, true) => {
                        let (codes, _) = row[at / 2..(at + PACK) / 2].as_chunks::<4>();
                        for (g, out) in out.chunks_exact_mut(GROUP).enumerate() {
                            for (p, pair) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                                let pair = pair.as_chunks_mut::<4>().0;
                                pair[0] = codes[p * 16 + g].map(|code| f32::from(code & 15) - 8.0);
                                pair[1] = codes[p * 16 + g].map(|code| f32::from(code >> 4) - 8.0);
                            }
                        }
                    }
                    (_, false) => {
                        out.iter_mut().enumerate().for_each(|(i, o)| *o = q4_code(row, at + i, cols) as f32 - 8.0);
                    }
                }
                for (group, factor) in out.chunks_exact_mut(GROUP).zip(factors) {
                    group.iter_mut().for_each(|o| *o *= factor);
                }
                at += PACK;
            }
        }
    }
}

/// A Q8_0 row of a GGUF (34 bytes a group: scale, 32 codes) in our form, bit for bit.
pub fn from_gguf_q8_0(src: &[u8], cols: usize, row: &mut [u8]) {
    let (numbers, rest) = row.split_at_mut(cols);
    rest.fill(0);
    for (g, block) in src.chunks_exact(34).enumerate() {
        rest[g * 2..g * 2 + 2].copy_from_slice(&block[..2]);
        put_q8_group(numbers, cols, g, block[2..].try_into().expect("32 codes"));
    }
}

/// A Q4_0 row of a GGUF (18 bytes a group: scale, 16 bytes with number j low and 16+j high) in our form, bit for bit.
pub fn from_gguf_q4_0(src: &[u8], cols: usize, row: &mut [u8]) {
    let (numbers, rest) = row.split_at_mut(cols / 2);
    rest.fill(0);
    numbers.fill(0);
    for (g, block) in src.chunks_exact(18).enumerate() {
        rest[g * 2..g * 2 + 2].copy_from_slice(&block[..2]);
        let codes = std::array::from_fn(|j| if j < 16 { block[2 + j] & 15 } else { block[2 + j - 16] >> 4 });
        put_q4_group(numbers, cols, g, &codes);
    }
}

fn put_scale(scales: &mut [u8], g: usize, scale: f16) {
    scales[g * 2..g * 2 + 2].copy_from_slice(&scale.to_le_bytes());
}

fn put_q8_group(numbers: &mut [u8], cols: usize, g: usize, codes: &[u8; GROUP]) {
    for (i, code) in codes.iter().enumerate() {
        numbers[code_position(g * GROUP + i, cols)] = *code;
    }
}

/// Puts the 32 codes (0..16) of group `g` where the row layout wants them; the bytes were zero.
fn put_q4_group(numbers: &mut [u8], cols: usize, g: usize, codes: &[u8; GROUP]) {
    for (i, code) in codes.iter().enumerate() {
        let (byte, shift) = q4_place(g * GROUP + i, cols);
        numbers[byte] |= code << shift;
    }
}

/// Scale and codes of a q8_0 group: scale = max|v| / 127.
fn q8_group(values: &[f32]) -> (f16, [i8; GROUP]) {
    let top = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = top / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    (f16::from_f32(scale), std::array::from_fn(|i| (values[i] * inverse).round() as i8))
}

/// Scale and codes of a q4_0 group. The scale is signed so that the value of largest magnitude is exactly code 0, that
/// is -8 scales: the range is -8..=7, and the longer side goes where it is needed. Both candidate signs and a slightly
/// smaller scale are tried and the one with the least squared error is kept.
fn q4_group(values: &[f32]) -> (f16, [u8; GROUP]) {
    let top = values.iter().copied().fold(0f32, |m, v| if v.abs() > m.abs() { v } else { m });
    let mut best = (f32::INFINITY, f16::ZERO, [8u8; GROUP]);
    for divisor in [-8.0f32, -7.6, -7.2, 7.0] {
        let scale = f16::from_f32(top / divisor);
        let step = scale.to_f32();
        let inverse = if step != 0.0 { 1.0 / step } else { 0.0 };
        let codes: [u8; GROUP] = std::array::from_fn(|i| ((values[i] * inverse).round() + 8.0).clamp(0.0, 15.0) as u8);
        let error: f32 = values.iter().zip(&codes).map(|(v, &c)| (v - (c as f32 - 8.0) * step).powi(2)).sum();
        if error < best.0 {
            best = (error, scale, codes);
        }
    }
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(cols: usize) -> Vec<f32> {
        (0..cols).map(|i| ((i * i % 97) as f32 / 48.0 - 1.0) * (1.0 + i as f32 / 50.0)).collect()
    }

    #[test]
    fn a_row_reads_back_within_half_a_step_whatever_its_length() {
        for cols in [32, 64, 96, 512, 544, 1024, 1504] {
            let values = wave(cols);
            for (quant, steps) in [(Quant::F32, 0.0), (Quant::F16, 0.001), (Quant::Q8, 0.005), (Quant::Q4, 0.15)] {
                let mut row = vec![0xAA; quant.row_bytes(cols)];
                encode(quant, &values, &mut row);
                let mut back = vec![0.0; cols];
                decode(quant, &row, &mut back);
                for (group, values) in back.chunks(GROUP).zip(values.chunks(GROUP)) {
                    let top = values.iter().fold(0f32, |m, v| m.max(v.abs()));
                    for (b, v) in group.iter().zip(values) {
                        assert!((b - v).abs() <= steps * top, "{quant:?} {cols}: {v} read back as {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn any_range_of_a_row_is_the_same_as_in_the_whole_row() {
        let cols = 1280; // two packs and a tail of eight groups
        for quant in Quant::all() {
            let mut row = vec![0; quant.row_bytes(cols)];
            encode(quant, &wave(cols), &mut row);
            let mut whole = vec![0.0; cols];
            decode(quant, &row, &mut whole);
            for (start, end) in [(0, 512), (512, 1024), (512, 1280), (1024, 1280)] {
                let mut part = vec![0.0; end - start];
                decode_range(quant, &row, cols, start, &mut part);
                assert_eq!(part, whole[start..end], "{quant:?} {start}..{end}");
            }
        }
    }

    #[test]
    fn every_type_is_found_by_its_name() {
        for quant in Quant::all() {
            assert_eq!(quant.name().to_uppercase().parse(), Ok(quant));
        }
        let message = "q9".parse::<Quant>().unwrap_err();
        assert_eq!(
            message,
            "'q9' is not a store type; take one of f32, f16, q8_0, q4_0, bf16, gguf_q8_0, gguf_q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, \
             q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4"
        );
    }

    #[test]
    fn a_row_of_every_type_is_padded_with_zeros() {
        let values = wave(256);
        for quant in Quant::all() {
            let used = quant.row_bytes(256).min(quant.number_bytes(256) + if quant.is_grouped() { 16 } else { 0 });
            for importance in [None, Some(&values.iter().map(|v| v.abs()).collect::<Vec<f32>>()[..])] {
                let mut row = vec![0xAA; quant.row_bytes(256)];
                encode_weighted(quant, &values, importance, &mut row);
                assert!(row[used..].iter().all(|&byte| byte == 0), "{quant:?}");
                assert!(row[..used].iter().any(|&byte| byte != 0xAA), "{quant:?}");
            }
        }
    }

    #[test]
    fn our_own_types_take_importance_as_the_blocks_that_they_are_made_from() {
        let values = wave(544);
        let importance: Vec<f32> = (0..544).map(|i| (i % 7) as f32).collect();
        for (own, block) in [(Quant::Q8, BlockType::Q8_0), (Quant::Q4, BlockType::Q4_0)] {
            let [ours, theirs] = [own, Quant::Block(block)].map(|quant| {
                let (mut row, mut back) = (vec![0; quant.row_bytes(544)], vec![0.0; 544]);
                encode_weighted(quant, &values, Some(&importance), &mut row);
                decode(quant, &row, &mut back);
                back
            });
            assert_eq!(ours, theirs, "{own:?}");
        }
    }

    #[test]
    fn gguf_groups_keep_every_bit() {
        let cols = 672;
        let mut q8 = Vec::new();
        let mut q4 = Vec::new();
        for g in 0..cols / GROUP {
            let scale = f16::from_f32(0.25 + g as f32).to_le_bytes();
            q8.extend(scale);
            q8.extend((0..32).map(|j| (j * 7 + g * 3) as u8));
            q4.extend(scale);
            q4.extend((0..16).map(|j| (j * 17 + g) as u8));
        }
        let mut row = vec![0; Quant::Q8.row_bytes(cols)];
        from_gguf_q8_0(&q8, cols, &mut row);
        let mut out = vec![0.0; cols];
        decode(Quant::Q8, &row, &mut out);
        for (i, o) in out.iter().enumerate() {
            let (g, j) = (i / 32, i % 32);
            assert_eq!(*o, (0.25 + g as f32) * ((j * 7 + g * 3) as u8 as i8) as f32);
        }
        let mut row = vec![0; Quant::Q4.row_bytes(cols)];
        from_gguf_q4_0(&q4, cols, &mut row);
        decode(Quant::Q4, &row, &mut out);
        for (i, o) in out.iter().enumerate() {
            let (g, j) = (i / 32, i % 32);
            let byte = ((j % 16) * 17 + g) as u8;
            let code = if j < 16 { byte & 15 } else { byte >> 4 };
            assert_eq!(*o, (0.25 + g as f32) * (code as f32 - 8.0), "group {g} number {j}");
        }
    }
}
