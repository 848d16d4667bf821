//! The law of the row kernels: whatever the CPU's instruction set, row type, length and number of columns, they agree
//! with the scalar truth up to rounding (grouped types: up to the rounding of their int8 inputs).

use dynamicinfer::cpu::attend::{AttendScratch, Head};
use dynamicinfer::cpu::recurrence::{Gates, LANES, Tokens};
use dynamicinfer::cpu::reference;
use dynamicinfer::cpu::{Columns, FEW_COLUMNS, Isa, Kernels, MAX_AXPY_ROWS, ManyForm, Rows};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, Input, Quant};
use dynamicinfer::model::KvType;
use dynamicinfer::prng::Prng;
use half::f16;
use proptest::prelude::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

fn normal(rng: &mut Prng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..4).map(|_| rng.next_f64() as f32 * 2.0 - 1.0).sum::<f32>()).collect()
}

/// Rows that each end where memory ends: reading a byte behind one is a fault. Those of our own types begin at multiples of 64 bytes if
/// their padding counts.
struct FencedRows {
    quant: Quant,
    cols: usize,
    map: *mut u8,
    bytes: usize,
    rows: Rows,
}

impl FencedRows {
    /// `count` random rows. For grouped types a row's padding belongs to it.
    fn random(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> FencedRows {
        let page = rustix::param::page_size();
        let row_bytes = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
        let room = row_bytes.next_multiple_of(page);
        let (stride, bytes) = (room + page, count * (room + page));
        // SAFETY: new memory.
        let map = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).unwrap()
        };
        let first = map.cast::<u8>().wrapping_add(room - row_bytes);
        for r in 0..count {
            // SAFETY: the row lies in the map, and the page behind it does.
            unsafe {
                let row = std::slice::from_raw_parts_mut(first.add(r * stride), row_bytes);
                fill(rng, quant, cols, row);
                mprotect(map.add(r * stride + room), page, MprotectFlags::empty()).unwrap();
            }
        }
        FencedRows { quant, cols, map: map.cast(), bytes, rows: Rows { first, stride, ahead: 0 } }
    }

    /// As [`FencedRows::random`], but memory ends behind the last row only.
    fn one_behind_the_other(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> FencedRows {
        let page = rustix::param::page_size();
        let stride = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
        let room = (count * stride).next_multiple_of(page);
        // SAFETY: new memory, of which the rows and the page behind them are a part.
        unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let map = mmap_anonymous(std::ptr::null_mut(), room + page, protection, MapFlags::PRIVATE).unwrap();
            let first = map.cast::<u8>().wrapping_add(room - count * stride);
            for row in std::slice::from_raw_parts_mut(first, count * stride).chunks_exact_mut(stride) {
                fill(rng, quant, cols, row);
            }
            mprotect(map.wrapping_byte_add(room), page, MprotectFlags::empty()).unwrap();
            FencedRows { quant, cols, map: map.cast(), bytes: room + page, rows: Rows { first, stride, ahead: 0 } }
        }
    }

    fn numbers(&self, r: usize) -> Vec<f32> {
        // SAFETY: the numbers of a row.
        let row = unsafe { std::slice::from_raw_parts(self.rows.row(r), self.row_bytes()) };
        reference::numbers(self.quant, row, self.cols)
    }

    fn row_bytes(&self) -> usize {
        if self.quant.is_grouped() { self.quant.row_bytes(self.cols) } else { self.quant.number_bytes(self.cols) }
    }
}

impl Drop for FencedRows {
    fn drop(&mut self) {
        // SAFETY: the map of `random`.
        unsafe { munmap(self.map.cast(), self.bytes).unwrap() };
    }
}

/// Fills a row with numbers of about one.
fn fill(rng: &mut Prng, quant: Quant, cols: usize, row: &mut [u8]) {
    match quant {
        Quant::Block(BlockType::BF16) => {
            for (to, number) in row.as_chunks_mut().0.iter_mut().zip(normal(rng, cols)) {
                *to = half::bf16::from_f32(number).to_le_bytes();
            }
        }
        Quant::Block(kind) => fill_blocks(rng, kind, cols, row),
        _ => {
            let mut whole = vec![0; quant.row_bytes(cols)];
            // Rows are encoded where they are aligned.
            let mut aligned = vec![0u64; whole.len() / 8];
            rows::encode(quant, &normal(rng, cols), bytemuck::cast_slice_mut(&mut aligned));
            whole.copy_from_slice(bytemuck::cast_slice(&aligned));
            row.copy_from_slice(&whole[..row.len()]);
        }
    }
}

/// Blocks of random bytes, with such scales that each block's largest number is below two.
fn fill_blocks(rng: &mut Prng, kind: BlockType, cols: usize, row: &mut [u8]) {
    let form = kind.form();
    row.fill_with(|| rng.next_u64() as u8);
    assert_eq!(row.len(), cols / form.numbers * form.bytes);
    for block in row.chunks_exact_mut(form.bytes) {
        if kind == BlockType::MXFP4 {
            block[0] = 118 + rng.below(8) as u8;
        }
        let scales: Vec<f32> = form
            .scales
            .iter()
            .map(|_| (rng.next_f64() as f32 + 0.5) * if rng.below(2) == 0 { 1.0 } else { -1.0 })
            .collect();
        let put = |block: &mut [u8], factor: f32| {
            for (&at, scale) in form.scales.iter().zip(&scales) {
                block[at..at + 2].copy_from_slice(&f16::from_f32(scale * factor).to_le_bytes());
            }
        };
        put(block, 1.0);
        let mut numbers = vec![0.0; form.numbers];
        kind.decode(block, &mut numbers);
        let top = numbers.iter().fold(1f32, |top, number| top.max(number.abs()));
        put(block, top.log2().floor().exp2().recip());
    }
}

/// A row's length: `groups` groups of 32 numbers and, where rows may have any length, `odd` more.
fn length(quant: Quant, groups: usize, odd: usize) -> usize {
    (groups * 32 + if quant.unit() == 1 { odd } else { 0 }).next_multiple_of(quant.unit())
}

fn supported() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn dots_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..40, odd in 0usize..32,
                                        n in prop_oneof![1usize..=32, Just(40)], count in 1usize..=7) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let cols = length(quant, groups, odd);
            let rows = FencedRows::random(&mut rng, quant, cols, count);
            let input = normal(&mut rng, n * cols);
            let mut x = Columns::default();
            x.set(&input, n, quant);
            // What is asked for ahead changes nothing.
            let at = Rows { ahead: if seed % 2 == 0 { 0 } else { rows.rows.stride }, ..rows.rows };
            let numbers: Vec<Vec<f32>> = (0..count).map(|r| rows.numbers(r)).collect();
            for kernels in supported() {
                let mut y = vec![f32::NAN; n * count];
                // SAFETY: the rows are whole, the kernels are supported here.
                unsafe { kernels.dot(quant)(at, count, &x, y.as_mut_ptr(), count) };
                for (i, y) in y.iter().enumerate() {
                    let (b, r) = (i / count, i % count);
                    let column = &input[b * cols..(b + 1) * cols];
                    let exact = reference::dot(&numbers[r], column);
                    // int8 inputs are off by half a step of max/127 each, with random signs.
                    let tolerance = if quant.input() == Input::Floats { 1e-6 } else { 0.02 };
                    let scale = reference::dot_scale(&numbers[r], column);
                    prop_assert!(
                        (*y as f64 - exact).abs() <= tolerance * scale,
                        "{} {} cols {cols} row {r} column {b} of {n}: {y}, truth {exact}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    /// A matrix is divided among threads anywhere, so a row's product must not depend on the rows beside it. Some kernels take several long
    /// rows together where they lie one behind the other; no byte behind the last is read.
    #[test]
    fn a_row_gives_the_same_bits_alone_and_among_others(seed in any::<u64>(), groups in prop_oneof![1usize..40, 120usize..200],
                                                        odd in 0usize..32, n in prop_oneof![4 => Just(1usize), 1 => 2usize..=5], count in 1usize..=35) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let cols = length(quant, groups, odd);
            let memory = FencedRows::one_behind_the_other(&mut rng, quant, cols, count);
            let mut x = Columns::default();
            x.set(&normal(&mut rng, n * cols), n, quant);
            for (words, kernels) in Isa::ALL.into_iter().flat_map(Kernels::kinds) {
                let [mut all, mut alone] = [(); 2].map(|()| vec![f32::NAN; n * count]);
                let rows = memory.rows;
                // SAFETY: as above.
                unsafe { kernels.dot(quant)(rows, count, &x, all.as_mut_ptr(), count) };
                for r in 0..count {
                    unsafe { kernels.dot(quant)(rows.from(r), 1, &x, alone[r..].as_mut_ptr(), count) };
                }
                let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<u32>>();
                prop_assert!(bits(&all) == bits(&alone), "{} {words} {} cols {cols} of {count} rows", kernels.isa.name(), quant.name());
            }
        }
    }

    /// With AVX-512 few columns have the bits that each has alone; of floats four.
    #[test]
    fn a_column_gives_the_same_bits_alone_and_among_few(seed in any::<u64>(), groups in 1usize..40, odd in 0usize..32,
                                                        n in 2usize..=FEW_COLUMNS, count in 1usize..=7) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let cols = length(quant, groups, odd);
            let memory = FencedRows::one_behind_the_other(&mut rng, quant, cols, count);
            let n = if quant.input() == Input::Floats { n.min(4) } else { n };
            let input = normal(&mut rng, n * cols);
            for (words, kernels) in Kernels::kinds(Isa::Avx512) {
                prop_assert_eq!(kernels.form(quant, n), ManyForm::Rows);
                let (mut x, mut alone) = (Columns::default(), Columns::default());
                x.set(&input, n, quant);
                let [mut few, mut one] = [(); 2].map(|()| vec![f32::NAN; n * count]);
                // SAFETY: as above.
                unsafe { kernels.dot(quant)(memory.rows, count, &x, few.as_mut_ptr(), count) };
                for b in 0..n {
                    alone.set(&input[b * cols..(b + 1) * cols], 1, quant);
                    unsafe { kernels.dot(quant)(memory.rows, count, &alone, one[b * count..].as_mut_ptr(), count) };
                }
                let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<u32>>();
                prop_assert!(bits(&few) == bits(&one), "{words} {} cols {cols}, {n} columns", quant.name());
            }
        }
    }

    /// One long column meets rows of two bytes in f16 on some processors, whatever its numbers' size; with an infinite number among them
    /// the product is infinite.
    #[test]
    fn long_columns_agree_with_the_scalar_truth(seed in any::<u64>(), cols in 4097usize..7000, size in -30i32..30, count in 1usize..=11) {
        let mut rng = Prng::new(seed);
        for quant in [Quant::F16, Quant::Block(BlockType::BF16)] {
            let rows = FencedRows::one_behind_the_other(&mut rng, quant, cols, count);
            let numbers: Vec<Vec<f32>> = (0..count).map(|r| rows.numbers(r)).collect();
            let mut input: Vec<f32> = normal(&mut rng, cols).iter().map(|v| v * 10f32.powi(size)).collect();
            // One that stands out, as models have them.
            input[cols / 2] *= 1000.0;
            for infinite in [false, true] {
                if infinite {
                    input[cols / 3] = f32::INFINITY;
                }
                let mut bits = std::collections::HashMap::new();
                for (words, mut kernels) in Isa::ALL.into_iter().flat_map(Kernels::kinds) {
                    kernels.rounds_floats = true;
                    let mut x = Columns::default();
                    x.set_here(&kernels, &input, 1, [quant]);
                    prop_assert_eq!(x.halves().is_some(), !infinite);
                    let [mut y, mut alone] = [(); 2].map(|()| vec![f32::NAN; count]);
                    // SAFETY: as above.
                    unsafe { kernels.dot(quant)(rows.rows, count, &x, y.as_mut_ptr(), count) };
                    for r in 0..count {
                        unsafe { kernels.dot(quant)(rows.rows.from(r), 1, &x, alone[r..].as_mut_ptr(), count) };
                    }
                    let of = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<u32>>();
                    prop_assert!(of(&y) == of(&alone), "{} {words}: a row alone", kernels.isa.name());
                    prop_assert!(*bits.entry(kernels.isa.name()).or_insert(of(&y)) == of(&y), "{} {words}", kernels.isa.name());
                    for (row, y) in numbers.iter().zip(&y) {
                        let (exact, scale) = (reference::dot(row, &input), reference::dot_scale(row, &input));
                        let right = if infinite { !y.is_finite() } else { (*y as f64 - exact).abs() <= 5e-4 * scale };
                        prop_assert!(right, "{} {words} {} cols {cols}: {y}, truth {exact}", kernels.isa.name(), quant.name());
                    }
                }
            }
        }
    }

    #[test]
    fn dots_are_exact_for_inputs_that_int8_holds(seed in any::<u64>(), groups in 1usize..40,
                                                 n in prop_oneof![1usize..=32, Just(40)], count in 1usize..=7) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all().filter(|quant| quant.input() != Input::Floats) {
            let cols = length(quant, groups, 0);
            let rows = FencedRows::random(&mut rng, quant, cols, count);
            // Whole numbers with 127 in each group: the step is one.
            let input: Vec<f32> =
                (0..n * cols).map(|i| if i % 32 == 5 { 127.0 } else { (rng.below(255) as f32) - 127.0 }).collect();
            let mut x = Columns::default();
            x.set(&input, n, quant);
            let numbers: Vec<Vec<f32>> = (0..count).map(|r| rows.numbers(r)).collect();
            for kernels in supported() {
                let mut y = vec![f32::NAN; n * count];
                // SAFETY: as above.
                unsafe { kernels.dot(quant)(rows.rows, count, &x, y.as_mut_ptr(), count) };
                for (i, y) in y.iter().enumerate() {
                    let (b, r) = (i / count, i % count);
                    let column = &input[b * cols..(b + 1) * cols];
                    let exact = reference::dot(&numbers[r], column);
                    let scale = reference::dot_scale(&numbers[r], column);
                    prop_assert!(
                        (*y as f64 - exact).abs() <= 2e-6 * scale,
                        "{} {} cols {cols} row {r} column {b}: {y}, truth {exact}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    #[test]
    fn axpys_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..20, odd in 0usize..32,
                                        n in 1usize..=5, count in 1usize..=MAX_AXPY_ROWS) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let cols = length(quant, groups, odd);
            let rows = FencedRows::random(&mut rng, quant, cols, count);
            let a = normal(&mut rng, count * n);
            let before = normal(&mut rng, n * cols);
            let mut exact: Vec<f64> = before.iter().map(|&v| v as f64).collect();
            for r in 0..count {
                let numbers = rows.numbers(r);
                for b in 0..n {
                    reference::axpy(a[r * n + b], &numbers, &mut exact[b * cols..(b + 1) * cols]);
                }
            }
            // Each kernel starts from zero: its output order is its own until `add_axpy` puts it right.
            let pointers: Vec<*const u8> = (0..count).map(|r| rows.rows.row(r)).collect();
            for kernels in supported() {
                let mut sums = vec![0.0; n * cols];
                // SAFETY: as above.
                unsafe { kernels.axpy(quant)(&pointers, (seed % 2 * 64) as usize, &a, cols, &mut sums) };
                let mut out = before.clone();
                for (sums, out) in sums.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
                    rows::add_axpy(quant, sums, out);
                }
                for (i, (o, e)) in out.iter().zip(&exact).enumerate() {
                    prop_assert!(
                        (*o as f64 - e).abs() <= 2e-5 * (1.0 + e.abs()),
                        "{} {} cols {cols} number {i}: {o}, truth {e}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    /// An engine may take either kind for any type, by a measurement: the text must not depend on it.
    #[test]
    fn kinds_of_one_instruction_set_differ_in_no_bit(seed in any::<u64>(), groups in 1usize..40, odd in 0usize..32,
                                                     n in prop_oneof![1usize..=8, Just(32), Just(40)], count in 1usize..=MAX_AXPY_ROWS) {
        let mut rng = Prng::new(seed);
        for kinds in Isa::ALL.map(Kernels::kinds).into_iter().filter(|kinds| kinds.len() > 1) {
            for quant in Quant::all() {
                let cols = length(quant, groups, odd);
                let rows = FencedRows::random(&mut rng, quant, cols, count);
                let (input, a) = (normal(&mut rng, n * cols), normal(&mut rng, count * n));
                let mut x = Columns::default();
                x.set(&input, n, quant);
                let pointers: Vec<*const u8> = (0..count).map(|r| rows.rows.row(r)).collect();
                let ahead = if seed % 2 == 0 { 0 } else { rows.rows.stride };
                let results = kinds.iter().map(|(_, kernels)| {
                    let (mut y, mut out) = (vec![f32::NAN; n * count], vec![0.25; n * cols]);
                    // SAFETY: as above.
                    unsafe {
                        kernels.dot(quant)(Rows { ahead, ..rows.rows }, count, &x, y.as_mut_ptr(), count);
                        kernels.axpy(quant)(&pointers, ahead, &a, cols, &mut out);
                    }
                    y.into_iter().chain(out).map(f32::to_bits).collect::<Vec<u32>>()
                });
                let results: Vec<Vec<u32>> = results.collect();
                for (other, (words, kernels)) in results.iter().zip(&kinds).skip(1) {
                    prop_assert!(results[0] == *other, "{} {} cols {cols}: {words}", kernels.isa.name(), quant.name());
                }
            }
        }
    }

    /// All tokens at once, or in two passes; the delta rule, and the one without it.
    #[test]
    fn the_delta_rule_is_that_of_f64(seed in any::<u64>(), sixteens in 1usize..=8, n in 1usize..40, is_delta in any::<bool>()) {
        let mut rng = Prng::new(seed);
        let (keys, stride) = (16 * sixteens, 16 * sixteens * 2 + LANES + 3);
        // Keys and queries have length 1, as the engine makes them.
        let mut numbers = normal(&mut rng, n * stride);
        for token in numbers.chunks_exact_mut(stride) {
            for part in [0..keys, keys..2 * keys] {
                let part = &mut token[part];
                let length = part.iter().map(|x| x * x).sum::<f32>().sqrt();
                part.iter_mut().for_each(|x| *x /= length);
            }
        }
        let gate = |rng: &mut Prng, t: usize| {
            let (query, key) = numbers[t * stride..][..2 * keys].split_at(keys);
            let key_query = query.iter().zip(key).map(|(q, k)| q * k).sum();
            Gates { decay: rng.next_f64() as f32, beta: rng.next_f64() as f32, key_query }
        };
        let gates: Vec<Gates> = (0..n).map(|t| gate(&mut rng, t)).collect();
        let start: Vec<[f32; LANES]> = (0..keys).map(|_| normal(&mut rng, LANES).try_into().unwrap()).collect();
        let mut truth: Vec<[f64; LANES]> = start.iter().map(|row| row.map(f64::from)).collect();
        let mut expected = Vec::new();
        for (token, gates) in numbers.chunks_exact(stride).zip(&gates) {
            let (query, rest) = token.split_at(keys);
            let (key, value) = rest.split_at(keys);
            expected.extend((0..LANES).map(|i| reference::state_rule(is_delta, &mut truth, i, (query, key, value[i]), gates)));
        }
        for kernels in supported() {
            let mut activated = numbers.clone();
            // SAFETY: the kernels are for this machine.
            unsafe { (kernels.recurrences.silu)(&mut activated) };
            for (x, found) in numbers.iter().map(|x| f64::from(*x)).zip(activated) {
                prop_assert!((f64::from(found) - x / (1.0 + (-x).exp())).abs() < 1e-6, "{}: silu", kernels.isa.name());
            }
            let (queries, of_keys, values) = (&numbers[..], &numbers[keys..], &numbers[2 * keys..]);
            let tokens = Tokens { queries, keys: of_keys, values, stride, value_stride: stride, gates: &gates };
            let all = kernels.recurrences;
            let rule = if is_delta { all.delta_rule } else { all.additive_rule };
            // The tokens at once, and in two passes, give the same bits.
            let run = |first: usize| {
                let (mut state, mut out) = (start.clone(), vec![f32::NAN; n * (LANES + 5)]);
                let [queries, keys, values] = [queries, of_keys, values].map(|of| &of[first * stride..]);
                let rest = Tokens { queries, keys, values, gates: &gates[first..], ..tokens };
                // SAFETY: each token has a place for its outputs.
                unsafe {
                    rule(&mut state, tokens, first, out.as_mut_ptr(), LANES + 5);
                    let out = out.as_mut_ptr().add(first * (LANES + 5));
                    rule(&mut state, rest, n - first, out, LANES + 5);
                }
                let out: Vec<f32> = out.chunks_exact(LANES + 5).flat_map(|out| out[..LANES].to_vec()).collect();
                (state, out)
            };
            let (state, out) = run(0);
            prop_assert_eq!(&(state.clone(), out.clone()), &run(n / 2));
            for (found, expected) in out.iter().zip(&expected) {
                let off = (f64::from(*found) - expected).abs();
                prop_assert!(off < 2e-5, "{}: {found} and not {expected}", kernels.isa.name());
            }
            for (found, expected) in state.iter().flatten().zip(truth.iter().flatten()) {
                prop_assert!((f64::from(*found) - expected).abs() < 2e-5, "{}: state", kernels.isa.name());
            }
        }
    }

    /// Each query mixes the values that it sees and no other, behind which stands NaN; a sink takes its share of the weights and brings nothing.
    #[test]
    fn attention_is_that_of_f64(seed in any::<u64>(), dim in 1usize..140, positions in 1usize..150, n in 1usize..=12) {
        let mut rng = Prng::new(seed);
        for kind in KvType::ALL {
            let quant = kind.quant();
            let dim = dim.next_multiple_of(quant.unit());
            let numbers = |values: &[f32]| {
                let mut bytes = vec![0; quant.number_bytes(values.len())];
                rows::encode(quant, values, &mut bytes);
                bytes
            };
            let of = |bytes: &[u8]| reference::numbers(quant, bytes, dim);
            let (mut keys, mut values) = (numbers(&normal(&mut rng, positions * dim)), numbers(&normal(&mut rng, positions * dim)));
            let whole = keys.len();
            keys.extend([0xff; 64]);
            values.extend([0xff; 64]);
            let heads = [0, 1, n.min(3)][rng.below(3) as usize];
            let sinks: Vec<f32> = normal(&mut rng, heads).iter().map(|sink| 4.0 * sink).collect();
            let head = Head { quant, keys: &keys[..whole], values: &values[..whole], mixed: dim, sinks: &sinks };
            let queries: Vec<f32> = normal(&mut rng, n * dim).iter().map(|q| 4.0 * q).collect();
            let sees: Vec<_> = (0..n).map(|_| {
                let end = 1 + rng.below(positions as u64) as usize;
                rng.below(end as u64) as usize..end
            }).collect();
            for kernels in supported() {
                let mut room = AttendScratch::default();
                room.queries(n * dim).copy_from_slice(&queries);
                let mixed = match n.is_multiple_of(2) {
                    true => room.attend(&kernels, head, dim, |b| sees[b].clone()).to_vec(),
                    false => room.attend_many(&kernels, head, dim, |b| sees[b].clone()).to_vec(),
                };
                for (b, seen) in sees.iter().enumerate() {
                    let query = &queries[b * dim..(b + 1) * dim];
                    let row = |of_what: &[u8], p: usize| {
                        let each = quant.number_bytes(dim);
                        of(&of_what[p * each..(p + 1) * each])
                    };
                    let scores: Vec<f64> = seen.clone().map(|p| reference::dot(&row(&keys, p), query) / (dim as f64).sqrt()).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let sink = if heads == 0 { 0.0 } else { (f64::from(sinks[b % heads]) - top).exp() };
                    let sum = weights.iter().sum::<f64>() + sink;
                    for i in 0..dim {
                        let truth: f64 = seen.clone().zip(&weights).map(|(p, w)| w / sum * f64::from(row(&values, p)[i])).sum();
                        let found = f64::from(mixed[b * dim + i]);
                        prop_assert!((found - truth).abs() < 2e-5, "{quant:?} {:?} query {b}, number {i}: {found} and not {truth}", kernels.isa);
                    }
                }
            }
        }
    }
}
