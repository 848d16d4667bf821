//! What holds of the encoders of all types.

use super::tests::{fixture, noise, tensor};
use super::*;

/// Numbers that are nearly normally distributed, with a standard deviation of 1.
fn normal(count: usize) -> Vec<f32> {
    noise(count * 24)
        .chunks_exact(24)
        .map(|bytes| (bytes.iter().map(|&b| f32::from(b)).sum::<f32>() - 3060.0) / 362.0)
        .collect()
}

/// Importance that differs much from number to number.
fn importance(count: usize) -> Vec<f32> {
    normal(count + 1)[1..].iter().map(|x| (1.5 * x).exp()).collect()
}

fn round_trip(kind: BlockType, values: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let form = kind.form();
    let mut bytes = vec![0xAA; values.len() / form.numbers * form.bytes];
    kind.encode(values, importance, &mut bytes);
    assert_eq!(kind.first_fault(&bytes), None, "{}", form.name);
    let mut back = vec![f32::NAN; values.len()];
    kind.decode(&bytes, &mut back);
    back
}

/// Root of the weighted mean square of the errors, as a share of that of the values.
fn relative_error(values: &[f32], back: &[f32], weights: Option<&[f32]>) -> f64 {
    let (mut error, mut power) = (0.0, 0.0);
    for (i, (&value, &back)) in values.iter().zip(back).enumerate() {
        let weight = weights.map_or(1.0, |weights| f64::from(weights[i]));
        error += weight * (f64::from(value) - f64::from(back)).powi(2);
        power += weight * f64::from(value).powi(2);
    }
    (error / power).sqrt()
}

/// The most that the error on [`normal`] numbers may be, and the same with importance: what was measured and two in a hundred.
fn expected(kind: BlockType) -> (f64, f64) {
    match kind {
        BlockType::BF16 => (0.00172, 0.00175),
        BlockType::Q8_0 => (0.00497, 0.00437),
        BlockType::Q4_0 => (0.0827, 0.0718),
        BlockType::Q4_1 => (0.0712, 0.0566),
        BlockType::Q5_0 => (0.0407, 0.0352),
        BlockType::Q5_1 => (0.0342, 0.0272),
        BlockType::Q2_K => (0.268, 0.205),
        BlockType::Q3_K => (0.147, 0.129),
        BlockType::Q4_K => (0.0714, 0.0573),
        BlockType::Q5_K => (0.035, 0.0286),
        BlockType::Q6_K => (0.0169, 0.0144),
        BlockType::IQ4_NL => (0.0741, 0.0623),
        BlockType::IQ4_XS => (0.0747, 0.063),
        BlockType::MXFP4 => (0.114, 0.115),
    }
}

#[test]
fn errors_are_what_the_bits_of_the_type_make_possible() {
    let values = normal(64 * 256);
    for kind in BlockType::ALL {
        let (name, most) = (kind.form().name, expected(kind).0);
        let error = relative_error(&values, &round_trip(kind, &values, None), None);
        assert!((0.9 * most..most).contains(&error), "{name}: {error:.5}, expected is {most}");
        // Weights of another size, and of another distance from 0.
        let small: Vec<f32> = values.iter().map(|x| x * 0.02).collect();
        let error = relative_error(&small, &round_trip(kind, &small, None), None);
        assert!(error < 1.02 * most, "{name}: {error:.5} of small numbers");
        let apart: Vec<f32> = values.iter().map(|x| x * 0.1 + 1.0).collect();
        let error = relative_error(&apart, &round_trip(kind, &apart, None), None);
        assert!(error < 1.2 * most, "{name}: {error:.5} of positive numbers");
    }
}

#[test]
fn importance_lowers_the_error_of_what_is_important() {
    let (values, weights) = (normal(64 * 256), importance(64 * 256));
    for kind in BlockType::ALL {
        let (name, most) = (kind.form().name, expected(kind).1);
        let [without, with] =
            [None, Some(&weights[..])].map(|w| relative_error(&values, &round_trip(kind, &values, w), Some(&weights)));
        assert!((0.9 * most..most).contains(&with), "{name}: {with:.5}, expected is {most}");
        let gain = match kind {
            // A number has no neighbour with which it shares a scale.
            BlockType::BF16 => 1.0,
            // Scales are powers of two, of which there is seldom more than one to take.
            BlockType::MXFP4 => 0.995,
            _ => 0.9,
        };
        assert!(with <= gain * without, "{name}: {with:.5} with importance, {without:.5} without");
        // Only the proportions count.
        let tiny: Vec<f32> = weights.iter().map(|w| w * 1e-30).collect();
        let error = relative_error(&values, &round_trip(kind, &values, Some(&tiny)), Some(&weights));
        assert!(error < 1.001 * with, "{name}: {error:.5} with small importance, {with:.5} with large");
    }
}

#[test]
fn numbers_of_no_importance_are_kept_all_the_same() {
    let values = normal(16 * 256);
    // All of them, every second run of 32, or every second number.
    let of_none: [fn(usize) -> f32; 3] = [|_| 0.0, |i| (i / 32 % 2) as f32, |i| (i % 2) as f32];
    for kind in BlockType::ALL {
        for (case, weight) in of_none.into_iter().enumerate() {
            let weights: Vec<f32> = (0..values.len()).map(weight).collect();
            let error = relative_error(&values, &round_trip(kind, &values, Some(&weights)), None);
            assert!(error < 1.5 * expected(kind).0, "{}, case {case}: {error:.5}", kind.form().name);
        }
    }
}

/// What is written for every token without a search for scales: each number is within a step of what it was and keeps its sign, however small
/// or large all of them are, and those of the largest magnitude are no exception.
#[test]
fn the_nearest_codes_are_within_a_step_and_keep_signs() {
    let values = normal(512);
    let top = values.iter().fold(0f32, |top, x| top.max(x.abs()));
    for (kind, put) in [
        (BlockType::Q8_0, Q8_0::put_nearest as fn(&[f32], &mut [u8])),
        (BlockType::Q4_0, Q4_0::put_nearest as fn(&[f32], &mut [u8])),
    ] {
        for power in -60..=100 {
            let scaled: Vec<f32> = values.iter().map(|x| x / top * 2f32.powf(power as f32 / 2.0)).collect();
            let (mut blocks, mut back) = (vec![0; 512 / 32 * kind.form().bytes], vec![0.0; 512]);
            put(&scaled, &mut blocks);
            kind.decode(&blocks, &mut back);
            for (block, (was, is)) in scaled.chunks(32).zip(back.chunks(32)).enumerate() {
                let d = f16_at(&blocks, block * kind.form().bytes).to_owned().abs();
                for (was, is) in was.iter().zip(is) {
                    assert!(was * is >= 0.0, "{}, 2^{power}/2: {was} became {is}", kind.form().name);
                    // A subnormal scale is off by up to a half of itself, one beyond f16 by any number.
                    let exact = (6.2e-5..65504.0).contains(&d);
                    assert!(!exact || (was - is).abs() <= 1.01 * d, "{}: {was} became {is} by {d}", kind.form().name);
                }
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for kind in BlockType::ALL {
        for weights in [None, Some(&[0.0; 512][..]), Some(&[1.0; 512][..])] {
            assert!(round_trip(kind, &[0.0; 512], weights).iter().all(|&x| x == 0.0), "{}", kind.form().name);
        }
        // A block of zeros beside another.
        let mut values = normal(512);
        values[..256].fill(0.0);
        assert!(round_trip(kind, &values, None)[..256].iter().all(|&x| x == 0.0), "{}", kind.form().name);
    }
}

#[test]
fn numbers_of_every_size_have_finite_scales_and_those_within_f16_stay_what_they_are() {
    let values = normal(512);
    let top = values.iter().fold(0f32, |top, x| top.max(x.abs()));
    for kind in BlockType::ALL {
        let name = kind.form().name;
        for power in (-149..=127).step_by(3) {
            let scaled: Vec<f32> = values.iter().map(|x| x / top * 2f32.powi(power)).collect();
            let back = round_trip(kind, &scaled, None);
            assert_eq!(first_non_finite(&back), None, "{name}, 2^{power}");
            if (-4..16).contains(&power) {
                let error = relative_error(&scaled, &back, None);
                assert!(error < 1.2 * expected(kind).0, "{name}, 2^{power}: {error}");
            }
            // Nothing small becomes large.
            let most = 1.3 * 2f32.powi(power) + 6e-8;
            assert!(back.iter().all(|x| x.abs() <= most), "{name}, 2^{power}");
        }
        let mut mixed = values.clone();
        let odd = [f32::MAX, f32::MIN, 1e-45, -1e-45, f32::MIN_POSITIVE, -65_504.0, 1e30, 0.0, -0.0];
        mixed.iter_mut().step_by(97).zip(odd.iter().cycle()).for_each(|(x, odd)| *x = *odd);
        assert_eq!(first_non_finite(&round_trip(kind, &mixed, None)), None, "{name}");
        let odd: Vec<f32> = odd.iter().copied().cycle().take(512).collect();
        assert_eq!(first_non_finite(&round_trip(kind, &odd, Some(&importance(512)))), None, "{name}");
    }
}

/// Blocks of random codes with an ordinary scale, in which `ends` stand first: the codes between which all others lie.
fn exact(kind: BlockType, scale_at: Option<usize>, ends: impl Fn(&mut [u8])) -> Vec<f32> {
    let form = kind.form();
    let mut bytes = noise(form.bytes * 64);
    for (i, block) in bytes.chunks_exact_mut(form.bytes).enumerate() {
        match scale_at {
            Some(at) => put_f16(block, at, f16::from_f32((i as f32 - 31.5) / 7.0)),
            None => block[0] = 64 + 2 * i as u8,
        }
        ends(block);
    }
    let mut values = vec![0.0; form.numbers * 64];
    kind.decode(&bytes, &mut values);
    values
}

#[test]
fn rows_that_a_simple_type_can_hold_exactly_keep_every_number() {
    let positive = |block: &mut [u8]| {
        block[1] &= 0x7F;
        put_f16(block, 2, f16::from_f32(f32::from(block[4] as i8) / 8.0));
    };
    let rows = [
        (BlockType::BF16, normal(512).iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect()),
        (
            BlockType::Q8_0,
            exact(BlockType::Q8_0, Some(0), |block| {
                block[2..].iter_mut().for_each(|code| *code = (*code as i8).max(-127) as u8);
                block[2] = 127;
            }),
        ),
        (BlockType::Q4_0, exact(BlockType::Q4_0, Some(0), |block| block[2] &= 0xF0)),
        (
            BlockType::Q5_0,
            exact(BlockType::Q5_0, Some(0), |block| (block[2], block[6]) = (block[2] & !1, block[6] & 0xF0)),
        ),
        (
            BlockType::Q4_1,
            exact(BlockType::Q4_1, Some(0), |block| {
                positive(block);
                block[4] = 0xF0;
            }),
        ),
        (
            BlockType::Q5_1,
            exact(BlockType::Q5_1, Some(0), |block| {
                positive(block);
                (block[4], block[6], block[8]) = (block[4] & !1, block[6] | 1, 0xF0);
            }),
        ),
        (BlockType::IQ4_NL, exact(BlockType::IQ4_NL, Some(0), |block| block[2] &= 0xF0)),
        (BlockType::MXFP4, exact(BlockType::MXFP4, None, |block| block[1] |= 0x0F)),
    ];
    for (kind, values) in rows {
        let weights = importance(values.len());
        assert!(values.iter().any(|x| *x != values[0]));
        for weights in [None, Some(&weights[..])] {
            let back = round_trip(kind, &values, weights);
            for (i, (value, back)) in values.iter().zip(back).enumerate() {
                assert!(*value == back, "{}[{i}]: {value} became {back}", kind.form().name);
            }
        }
    }
}

#[test]
fn equal_numbers_stay_what_they_are() {
    // Each level that is not 0 fits them, but only one has a scale that is an f16.
    let ends =
        [(BlockType::Q8_0, 127.0), (BlockType::Q4_0, -8.0), (BlockType::Q5_0, -16.0), (BlockType::IQ4_NL, -127.0)];
    for (kind, end) in ends {
        for i in 1..300 {
            let value = f16::from_f32(i as f32 / 123.0).to_f32() * end;
            assert_eq!(round_trip(kind, &[value; 32], None), [value; 32], "{}", kind.form().name);
        }
    }
}

#[test]
fn no_error_is_larger_than_that_of_gguf_py() {
    let fixture = fixture();
    let values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(&fixture, "quantize.input"));
    for kind in [BlockType::BF16, BlockType::Q8_0, BlockType::Q4_0] {
        let name = kind.form().ggml_name;
        let mut theirs = vec![0.0; values.len()];
        kind.decode(tensor(&fixture, &format!("quantize.{name}")), &mut theirs);
        let [ours, theirs] = [round_trip(kind, &values, None), theirs].map(|back| relative_error(&values, &back, None));
        assert!(ours > 0.0 && ours <= theirs, "{name}: {ours}, gguf-py's is {theirs}");
    }
}

#[test]
#[should_panic(expected = "bytes of 32 q5_0 numbers")]
fn a_wrong_length_is_a_bug_of_the_caller_of_an_encoder() {
    BlockType::Q5_0.encode(&[0.0; 32], None, &mut [0; 23]);
}
