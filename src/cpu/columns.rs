//! The input of a kernel: columns (tokens) of activations, as f32 and, for quantised weights, as int8.

use super::aligned::{Aligned, LINE};
use super::rounding::{round, sum};
use super::shadow::{Scale, Shadow};
use super::{Bits, FloatPanels, Kernels, ManyForm, Panels, Prefill, SixteenPanels, ThreadPool};
use crate::formats::rows::{GROUP, Input, PACK, Quant};
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Columns of activations. Built once per matrix input and read by all threads.
#[derive(Default, Debug)]
pub struct Columns {
    /// How many columns (tokens) there are.
    pub n: usize,
    /// Numbers of a column: as many as a row of the matrix that it is multiplied with.
    pub cols: usize,
    /// f32 values, column after column, each beginning a cache line: a 64-byte load across two lines costs double.
    values: Aligned,
    /// int8 codes in the order of a grouped row (`formats::rows`), `[n * code_stride]`; zero beyond `cols`.
    codes: Aligned<i8>,
    /// Step of each group of 32 codes, `[n * group_stride]`; zero beyond the last group.
    steps: Aligned,
    /// Step times the sum of the group's codes: takes the bias out of unsigned weights. Laid out as `steps`.
    sums: Aligned,
    /// Codes from one column to the next: [`Columns::cols`] rounded up so that kernels may read whole registers.
    pub code_stride: usize,
    /// Numbers from one column to the next in `steps` and `sums`, which have one number for each group of 32 codes.
    pub group_stride: usize,
    /// The only column in f16, if it is longer than [`LONG`] numbers, rows are floats of two bytes and inputs of floats may be rounded
    /// ([`Kernels::rounds_floats`]); else empty.
    halves: Aligned<u16>,
    /// What the numbers of `halves` are multiplied by.
    halves_unit: f32,
    block: BlockInput,
    /// With codes of eight bits and of seven: of types that are multiplied together some may want these and some those.
    panels: [Panels; Bits::ALL.len()],
    sixteen: SixteenPanels,
    floats: FloatPanels,
    /// They were made for the row kernels, however many there are.
    by_rows: bool,
    /// How the next input that becomes [`Panels`] with one step gets it; `None` takes its largest number's.
    pub scale: Option<Scale>,
    /// What lies beyond the step.
    pub shadow: Shadow,
}

/// Input for GGUF's blocks: the same codes in their own order, with steps and sums for each 16 of them, which is the smallest group that
/// a block type has. Columns lie [`BLOCK`] numbers rounded up apart, with zeros behind the last number.
#[derive(Default, Debug)]
struct BlockInput {
    /// int8 codes, `[n * stride]`.
    codes: Aligned<i8>,
    /// Step of each 16 codes, `[n * stride / 16]`; two neighbours share one.
    steps: Aligned,
    /// Step times the sum of each 16 codes, `[n * stride / 16]`.
    sums: Aligned,
    /// The same again as [`LaneBlock`]s, `[n * stride / 256]`.
    lanes: Vec<LaneBlock>,
    /// And as [`UnitBlock`]s, `[n * stride / 256]`.
    units: Vec<UnitBlock>,
    stride: usize,
}

/// [`BLOCK`] numbers of a column with one group of [`BLOCK_GROUP`] in each lane of 32 bits: products of all four registers of codes then
/// add up in whole numbers before anything is scaled.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
pub struct LaneBlock {
    /// Register k has numbers 4k..4k+4 of each group; lane `lane` that of [`group_of_lane`].
    pub codes: [[[i8; 4]; BLOCK / BLOCK_GROUP]; BLOCK_GROUP / 4],
    /// As [`Columns::block_steps`], by lane.
    pub steps: [f32; BLOCK / BLOCK_GROUP],
    /// As [`Columns::block_sums`], by lane.
    pub sums: [f32; BLOCK / BLOCK_GROUP],
}

/// The group that lane `lane` of a [`LaneBlock`] belongs to, and also the lane of group `lane`: the order into which weights come when four
/// registers of 64 codes are transposed within their quarters.
pub const fn group_of_lane(lane: usize) -> usize {
    lane % 4 * 4 + lane / 4
}

impl LaneBlock {
    fn of(codes: &[i8], steps: &[f32], sums: &[f32]) -> LaneBlock {
        let mut block: LaneBlock = bytemuck::Zeroable::zeroed();
        let (fours, _) = codes.as_chunks::<4>();
        for lane in 0..BLOCK / BLOCK_GROUP {
            let group = group_of_lane(lane);
            (block.steps[lane], block.sums[lane]) = (steps[group], sums[group]);
            for (k, to) in block.codes.iter_mut().enumerate() {
                to[lane] = fours[group * (BLOCK_GROUP / 4) + k];
            }
        }
        block
    }
}

/// [`BLOCK`] numbers of a column in runs of 16, so that four lanes of 32 bits belong to each run and the runs of equal place in two registers
/// to one group of 32.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
pub struct UnitBlock {
    /// Register k has runs k, k + 4, k + 8 and k + 12: of even groups the first runs, then their second ones, then those of odd groups.
    pub codes: [[i8; 64]; 4],
    /// What the codes of each 32 are multiplied by.
    pub steps: [f32; BLOCK / GROUP],
    /// That times the sum of the codes.
    pub sums: [f32; BLOCK / GROUP],
}

impl UnitBlock {
    /// Of codes in their own order, and steps and sums for each 16 of them.
    fn of(codes: &[i8], steps: &[f32], sums: &[f32]) -> UnitBlock {
        let mut block: UnitBlock = bytemuck::Zeroable::zeroed();
        for (run, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
            block.codes[run % 4][run / 4 * 16..][..16].copy_from_slice(codes);
        }
        for g in 0..BLOCK / GROUP {
            (block.steps[g], block.sums[g]) = (steps[2 * g], sums[2 * g] + sums[2 * g + 1]);
        }
        block
    }
}

/// A column of more numbers than this takes so much of L1 in f32 that what the hardware prefetches into it is driven out before it is read:
/// of rows of F16 with 5632 numbers one thread of a Zen 4 read 17 GB/s, and 28 with the column in f16.
pub const LONG: usize = 4096;

/// Numbers of the longest of GGUF's blocks. Input for blocks is padded to a multiple of it.
pub const BLOCK: usize = 256;
/// Codes for which [`Columns::block_steps`] and [`Columns::block_sums`] have one number.
pub const BLOCK_GROUP: usize = 16;

impl Columns {
    /// Takes `values` (`[n * cols]`) as input of [`Kernels::dot`] for weights of type `quant`. Buffers are kept between calls.
    pub fn set(&mut self, values: &[f32], n: usize, quant: Quant) {
        self.set_for(values, n, [quant]);
    }

    /// The same for weights of several types and any number of columns, in the form that [`Kernels::form`] names for each type:
    /// [`Kernels::products`] takes all forms. In the others nothing can be read.
    pub fn set_many(
        &mut self,
        pool: &mut ThreadPool,
        kernels: &Kernels,
        values: &[f32],
        n: usize,
        quants: impl IntoIterator<Item = Quant> + Clone,
    ) {
        self.set_by(Some(pool), kernels, values, n, quants);
    }

    /// As [`Columns::set_many`], on the thread that calls.
    pub fn set_here(
        &mut self,
        kernels: &Kernels,
        values: &[f32],
        n: usize,
        quants: impl IntoIterator<Item = Quant> + Clone,
    ) {
        self.set_by(None, kernels, values, n, quants);
    }

    fn set_by(
        &mut self,
        pool: Option<&mut ThreadPool>,
        kernels: &Kernels,
        values: &[f32],
        n: usize,
        quants: impl IntoIterator<Item = Quant> + Clone,
    ) {
        let scale = self.scale.take();
        let cols = values.len() / n;
        let form_of = |quant| kernels.form(quant, n);
        let has = |form| quants.clone().into_iter().any(|quant| form_of(quant) == form);
        let (sixteen, floats) = (has(ManyForm::Sixteen), has(ManyForm::Floats));
        let codes_of = |bits| {
            let mut quants = quants.clone().into_iter();
            quants.any(|quant| form_of(quant) == ManyForm::Codes && kernels.bits(quant, n) == bits)
        };
        let codes = Bits::ALL.map(codes_of);
        if has(ManyForm::Rows) {
            let is_half = |quant: Quant| quant.input() == Input::Floats && quant.number_bytes(1) == 2;
            let halves = kernels.rounds_floats && n == 1 && cols > LONG && quants.clone().into_iter().any(is_half);
            self.set_for(values, n, quants.into_iter().filter(|&quant| form_of(quant) == ManyForm::Rows));
            if halves {
                self.set_halves(values);
            }
        } else {
            (self.n, self.cols) = (n, cols);
            self.values.resize(0);
            self.forget_codes();
        }
        self.by_rows = false;
        let mut pool = pool;
        for bits in Bits::ALL.into_iter().filter(|&bits| codes[bits as usize]) {
            self.set_panels(pool.as_deref_mut(), kernels, bits, values, n, scale);
        }
        if sixteen {
            self.set_sixteen(pool.as_deref_mut(), kernels, values, n);
        }
        if floats {
            self.floats.set(pool, &kernels.tiles, values, n);
        }
    }

    /// Takes `values` (`[n, cols]`) as the input of [`Kernels::across`], for sums over rows of type `quant`.
    pub fn set_across(
        &mut self,
        pool: Option<&mut ThreadPool>,
        kernels: &Kernels,
        values: &[f32],
        n: usize,
        quant: Quant,
    ) {
        let scale = self.scale.take();
        self.forget_codes();
        (self.n, self.cols) = (n, values.len() / n);
        match kernels.form_across(quant, self.cols) {
            ManyForm::Codes => self.set_panels(pool, kernels, Bits::Eight, values, n, scale),
            ManyForm::Sixteen => self.set_sixteen(pool, kernels, values, n),
            _ => self.floats.set(pool, &kernels.tiles, values, n),
        }
    }

    fn set_panels(
        &mut self,
        pool: Option<&mut ThreadPool>,
        kernels: &Kernels,
        bits: Bits,
        values: &[f32],
        n: usize,
        scale: Option<Scale>,
    ) {
        let panels = &mut self.panels[bits as usize];
        match scale.filter(|_| kernels.prefill == Prefill::Int8PerTensor) {
            None => panels.set(pool, kernels, bits, values, n),
            Some(scale) => {
                self.shadow.set(scale, values, n);
                panels.set_by(pool, kernels, bits, values, n, scale.step);
            }
        }
    }

    fn set_sixteen(&mut self, pool: Option<&mut ThreadPool>, kernels: &Kernels, values: &[f32], n: usize) {
        let sixteen = kernels.sixteen.as_ref().expect("only kernels that have them take this form");
        self.sixteen.set(pool, &kernels.tiles, sixteen, values, n);
    }

    /// The form in which rows of this type meet these columns.
    pub fn form(&self, kernels: &Kernels, quant: Quant) -> ManyForm {
        if self.by_rows { ManyForm::Rows } else { kernels.form(quant, self.n) }
    }

    /// What [`Columns::set_many`] has made for [`Kernels::gemm`] with so many bits.
    pub fn panels(&self, bits: Bits) -> &Panels {
        &self.panels[bits as usize]
    }

    /// What [`Columns::set_many`] has made for products in codes of 16 bits.
    pub fn sixteen(&self) -> &SixteenPanels {
        &self.sixteen
    }

    /// What [`Columns::set_many`] has made for products in f32.
    pub fn floats(&self) -> &FloatPanels {
        &self.floats
    }

    /// Leaves no codes of an earlier input behind: to read them is then a panic.
    fn forget_codes(&mut self) {
        self.panels.iter_mut().for_each(|panels| panels.n = 0);
        self.sixteen.clear();
        self.floats.clear();
        self.shadow.clear();
        self.halves.resize(0);
        self.codes.resize(0);
        self.block.codes.resize(0);
        self.block.lanes.clear();
        self.block.units.clear();
    }

    /// The same for weights of several types. Rows meet these columns one by one, as lists of neurons want it.
    pub fn set_for(&mut self, values: &[f32], n: usize, quants: impl IntoIterator<Item = Quant>) {
        debug_assert!(n > 0 && values.len().is_multiple_of(n));
        (self.n, self.cols, self.by_rows) = (n, values.len() / n, true);
        let stride = self.stride();
        self.values.resize(n * stride);
        for (to, from) in self.values.chunks_exact_mut(stride).zip(values.chunks_exact(self.cols)) {
            to[..self.cols].copy_from_slice(from);
        }
        let (mut packs, mut blocks) = (false, false);
        for quant in quants {
            packs |= quant.input() == Input::Packs;
            blocks |= quant.input() == Input::Blocks;
        }
        self.forget_codes();
        if packs {
            self.set_packs(values);
        }
        if blocks {
            self.set_blocks(values);
        }
    }

    /// Scaled by a power of two, so that none is too large for f16 and none too small that matters beside the largest; numbers that are not
    /// finite have no such scale.
    fn set_halves(&mut self, values: &[f32]) {
        let largest = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        if !values.iter().all(|value| value.is_finite()) {
            return;
        }
        // The largest becomes 2^14 to 2^15, of the 65504 that f16 holds.
        let exponent = (largest.to_bits() >> 23) as i32 - 127 - 14;
        let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
        let exponent = exponent.clamp(-126, 126);
        let scale = power(-exponent);
        self.halves_unit = power(exponent);
        self.halves.resize(values.len());
        let halves = self.halves.reinterpret_cast_mut::<f16>();
        for (to, from) in halves.chunks_mut(LINE).zip(values.chunks(LINE)) {
            let mut scaled = [0.0; LINE];
            scaled.iter_mut().zip(from).for_each(|(scaled, value)| *scaled = value * scale);
            to.convert_from_f32_slice(&scaled[..from.len()]);
        }
    }

    fn set_packs(&mut self, values: &[f32]) {
        let n = self.n;
        self.code_stride = self.cols.next_multiple_of(PACK);
        self.group_stride = self.code_stride / GROUP;
        self.codes.zeros(n * self.code_stride);
        self.steps.zeros(n * self.group_stride);
        self.sums.zeros(n * self.group_stride);
        for b in 0..n {
            let values = &values[b * self.cols..(b + 1) * self.cols];
            let codes = &mut self.codes[b * self.code_stride..];
            let packed = self.cols / PACK * PACK;
            for (g, group) in values.chunks_exact(GROUP).enumerate() {
                let (step, rounded) = round(group);
                let start = g * GROUP;
                if start < packed {
                    let pack = &mut codes[start / PACK * PACK..][..PACK];
                    for (k, four) in rounded.chunks_exact(4).enumerate() {
                        let at = k * 64 + start % PACK / GROUP * 4;
                        pack[at..at + 4].copy_from_slice(four);
                    }
                } else {
                    codes[start..start + GROUP].copy_from_slice(&rounded);
                }
                self.steps[b * self.group_stride + g] = step;
                self.sums[b * self.group_stride + g] = step * sum(&rounded);
            }
        }
    }

    fn set_blocks(&mut self, values: &[f32]) {
        let BlockInput { codes, steps, sums, stride, .. } = &mut self.block;
        *stride = self.cols.next_multiple_of(BLOCK);
        let (stride, groups) = (*stride, *stride / BLOCK_GROUP);
        codes.resize(self.n * stride);
        steps.resize(self.n * groups);
        sums.resize(self.n * groups);
        let columns =
            codes.chunks_exact_mut(stride).zip(steps.chunks_exact_mut(groups).zip(sums.chunks_exact_mut(groups)));
        for (values, (codes, (steps, sums))) in values.chunks_exact(self.cols).zip(columns) {
            codes[self.cols..].fill(0);
            steps[self.cols / BLOCK_GROUP..].fill(0.0);
            sums[self.cols / BLOCK_GROUP..].fill(0.0);
            let groups = steps.as_chunks_mut::<2>().0.iter_mut().zip(sums.as_chunks_mut::<2>().0);
            for ((values, codes), (steps, sums)) in
                values.chunks_exact(GROUP).zip(codes.as_chunks_mut::<GROUP>().0).zip(groups)
            {
                let step;
                (step, *codes) = round(values);
                *steps = [step; 2];
                let (low, high) = codes.split_at(BLOCK_GROUP);
                *sums = [step * sum(low), step * sum(high)];
            }
        }
        self.set_lanes();
    }

    fn set_lanes(&mut self) {
        let BlockInput { codes, steps, sums, lanes, units, .. } = &mut self.block;
        const GROUPS: usize = BLOCK / BLOCK_GROUP;
        let codes = codes.chunks_exact(BLOCK);
        let scales = steps.chunks_exact(GROUPS).zip(sums.chunks_exact(GROUPS));
        let blocks = codes.zip(scales);
        lanes.clear();
        lanes.extend(blocks.clone().map(|(codes, (steps, sums))| LaneBlock::of(codes, steps, sums)));
        units.clear();
        units.extend(blocks.map(|(codes, (steps, sums))| UnitBlock::of(codes, steps, sums)));
    }

    /// Numbers from one column to the next: an odd number of cache lines, or the same places of all columns would fall into
    /// one set of L1.
    fn stride(&self) -> usize {
        (self.cols.div_ceil(LINE) | 1) * LINE
    }

    /// Column `b` as f32, `[cols]`.
    pub fn values(&self, b: usize) -> &[f32] {
        let start = b * self.stride();
        &self.values[start..start + self.cols]
    }

    /// The only column in f16, `[cols]`, and what its numbers are multiplied by: where it is long, finite and meets floats of two bytes.
    pub fn halves(&self) -> Option<(&[u16], f32)> {
        (!self.halves.is_empty()).then_some((&*self.halves, self.halves_unit))
    }

    /// Column `b` as int8 codes, `[code_stride]`; only after [`Columns::set`] for a grouped type.
    pub fn codes(&self, b: usize) -> &[i8] {
        &self.codes[b * self.code_stride..(b + 1) * self.code_stride]
    }

    /// What a code of each group of column `b` is multiplied by, `[group_stride]`; only after [`Columns::set`] for a grouped type.
    pub fn steps(&self, b: usize) -> &[f32] {
        &self.steps[b * self.group_stride..(b + 1) * self.group_stride]
    }

    /// Step times the sum of the codes of each group of column `b`, `[group_stride]`; only after [`Columns::set`] for a grouped type.
    pub fn sums(&self, b: usize) -> &[f32] {
        &self.sums[b * self.group_stride..(b + 1) * self.group_stride]
    }

    /// Column `b` as int8 codes in their own order, zeros up to a multiple of 256, from a multiple of 64 bytes; only after
    /// [`Columns::set`] for a block type.
    pub fn block_codes(&self, b: usize) -> &[i8] {
        &self.block.codes[b * self.block.stride..(b + 1) * self.block.stride]
    }

    /// What each 16 codes of column `b` are multiplied by, 16 numbers for each 256 codes; only after [`Columns::set`] for a block
    /// type.
    pub fn block_steps(&self, b: usize) -> &[f32] {
        let groups = self.block.stride / BLOCK_GROUP;
        &self.block.steps[b * groups..(b + 1) * groups]
    }

    /// Step times the sum of each 16 codes of column `b`, laid out as [`Columns::block_steps`].
    pub fn block_sums(&self, b: usize) -> &[f32] {
        let groups = self.block.stride / BLOCK_GROUP;
        &self.block.sums[b * groups..(b + 1) * groups]
    }

    /// Column `b` by lanes; only after [`Columns::set`] for a block type.
    pub fn lane_blocks(&self, b: usize) -> &[LaneBlock] {
        let blocks = self.block.stride / BLOCK;
        &self.block.lanes[b * blocks..(b + 1) * blocks]
    }

    /// Column `b` by runs of 16; only after [`Columns::set`] for a block type.
    pub fn unit_blocks(&self, b: usize) -> &[UnitBlock] {
        let blocks = self.block.stride / BLOCK;
        &self.block.units[b * blocks..(b + 1) * blocks]
    }
}
