//! The sampler against its laws.

use dynamicinfer::Error;
use dynamicinfer::engine::sampler::{Sampler, SamplingParams, argmax};
use dynamicinfer::prng::Prng;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The same cases every time: a failure is repeated by running the test again.
fn fixed() -> ProptestConfig {
    ProptestConfig { cases: 512, failure_persistence: None, rng_seed: RngSeed::Fixed(20), ..ProptestConfig::default() }
}

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

// SAFETY: everything is the system allocator's; counting neither allocates nor unwinds.
unsafe impl std::alloc::GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { std::alloc::System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { std::alloc::System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The decode loop allocates nothing; the sampler is its last step.
#[test]
fn nothing_is_allocated_after_the_first_token() {
    let penalties = SamplingParams { repeat_penalty: 1.1, ..SamplingParams::default() };
    for params in [penalties, everything_off(), SamplingParams { top_k: 0, ..SamplingParams::default() }] {
        let mut prng = Prng::new(9);
        let all: Vec<Vec<f32>> = (0..50).map(|_| random_logits(&mut prng, 5000)).collect();
        let mut sampler = sampler(params, 5000);
        let mut allocations = Vec::with_capacity(all.len());
        for mut logits in all {
            let before = ALLOCATIONS.get();
            let token = sampler.sample(&mut logits);
            sampler.accept(token);
            allocations.push(ALLOCATIONS.get() - before);
        }
        assert!(allocations[0] > 0);
        assert_eq!(allocations[1..].iter().sum::<u64>(), 0, "{:?}", sampler.params());
    }
}

fn sampler(params: SamplingParams, vocab: usize) -> Sampler {
    Sampler::new(params, vocab).unwrap()
}

fn everything_off() -> SamplingParams {
    SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplingParams::default() }
}

fn random_logits(prng: &mut Prng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (prng.next_f64() * 12.0 - 6.0) as f32).collect()
}

#[test]
fn top_k_of_one_is_greedy() {
    let mut prng = Prng::new(3);
    let mut one = sampler(SamplingParams { top_k: 1, ..SamplingParams::default() }, 1000);
    let mut greedy = sampler(SamplingParams::greedy(), 1000);
    for _ in 0..200 {
        let mut logits = random_logits(&mut prng, 1000);
        let expected = argmax(&logits).unwrap();
        assert_eq!(one.sample(&mut logits.clone()), expected);
        assert_eq!(greedy.sample(&mut logits), expected);
    }
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [1.0f32, 0.0, -1.0, 2.0, 0.5, f32::NEG_INFINITY];
    for temperature in [0.5f32, 1.0, 2.0] {
        let mut sampler = sampler(SamplingParams { temperature, seed: 11, ..everything_off() }, logits.len());
        let mut counts = [0f64; 6];
        let draws = 100_000;
        for _ in 0..draws {
            counts[sampler.sample(&mut logits.clone()) as usize] += 1.0;
        }
        let weights = logits.map(|l| f64::from(l / temperature).exp());
        let total: f64 = weights.iter().sum();
        let chi2: f64 = (0..5)
            .map(|i| {
                let expected = f64::from(draws) * weights[i] / total;
                (counts[i] - expected).powi(2) / expected
            })
            .sum();
        // 4 degrees of freedom: 23.5 is exceeded by chance once in 10,000 seeds.
        assert!(chi2 < 23.5, "temperature {temperature}: {chi2}");
        assert_eq!(counts[5], 0.0);
    }
}

/// The tokens that may be drawn, by trying often.
fn drawn(params: SamplingParams, logits: &[f32]) -> Vec<u32> {
    let mut sampler = sampler(params, logits.len());
    let mut seen: Vec<u32> = (0..5000).map(|_| sampler.sample(&mut logits.to_vec())).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn the_filters_keep_what_their_names_say() {
    // Probabilities 0.4, 0.3, 0.2, 0.1.
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let all = everything_off;
    assert_eq!(drawn(all(), &logits), [0, 1, 2, 3]);
    assert_eq!(drawn(SamplingParams { top_k: 2, ..all() }, &logits), [0, 1]);
    assert_eq!(drawn(SamplingParams { top_p: 0.65, ..all() }, &logits), [0, 1]);
    assert_eq!(drawn(SamplingParams { top_p: 0.75, ..all() }, &logits), [0, 1, 2]);
    assert_eq!(drawn(SamplingParams { top_p: 0.0, ..all() }, &logits), [0]);
    assert_eq!(drawn(SamplingParams { min_p: 0.45, ..all() }, &logits), [0, 1, 2]);
    assert_eq!(drawn(SamplingParams { min_p: 1.0, ..all() }, &logits), [0]);
    // The temperature comes last: it does not change what the filters keep.
    assert_eq!(drawn(SamplingParams { top_p: 0.65, temperature: 5.0, ..all() }, &logits), [0, 1]);
    // Among equals the lowest ids stay.
    assert_eq!(drawn(SamplingParams { top_k: 2, ..all() }, &[0.0; 5000]), [0, 1]);
}

proptest! {
    #![proptest_config(fixed())]

    /// The one-pass selection against a full sort, with ties, NaN and infinities.
    #[test]
    fn top_k_keeps_the_best(seed in any::<u64>(), k in 1usize..300, n in 1usize..3000, distinct in 2u64..2000) {
        let mut prng = Prng::new(seed);
        let logits: Vec<f32> = (0..n).map(|_| match prng.below(distinct) {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            i => -(i as f32),
        }).collect();
        let mut ids: Vec<u32> = (0..n as u32).filter(|&i| logits[i as usize] > f32::NEG_INFINITY).collect();
        ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        ids.truncate(k);
        let hot = SamplingParams { top_k: k, temperature: 100.0, seed, ..everything_off() };
        let mut sampler = sampler(hot, n);
        for _ in 0..20 {
            let token = sampler.sample(&mut logits.clone());
            prop_assert!(ids.contains(&token) || (ids.is_empty() && token == 0));
        }
        prop_assert_eq!(sampler.unusable_steps(), if ids.is_empty() { 20 } else { 0 });
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let run = |seed| {
        let mut prng = Prng::new(5);
        let mut sampler = sampler(SamplingParams { seed, ..SamplingParams::default() }, 500);
        (0..100)
            .map(|_| {
                let token = sampler.sample(&mut random_logits(&mut prng, 500));
                sampler.accept(token);
                token
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let mut sampler = sampler(SamplingParams::default(), 500);
    let mut logits = random_logits(&mut Prng::new(5), 500);
    let first: Vec<u32> = (0..20).map(|_| sampler.sample(&mut logits)).collect();
    sampler.reset();
    assert_eq!((0..20).map(|_| sampler.sample(&mut logits)).collect::<Vec<_>>(), first);
}

#[test]
fn penalties_are_those_of_llama_cpp() {
    let params = SamplingParams {
        repeat_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        repeat_last_n: 3,
        ..SamplingParams::greedy()
    };
    let mut sampler = sampler(params, 4);
    let penalised = |sampler: &mut Sampler| {
        let mut logits = [4.0, -4.0, 0.0, 1.0];
        sampler.sample(&mut logits);
        logits
    };
    assert_eq!(penalised(&mut sampler), [4.0, -4.0, 0.0, 1.0]);
    for token in [3, 0, 0, 1] {
        sampler.accept(token);
    }
    // 3 is out of the window; 0 is in it twice: 4 / 2 - 2 * 0.25 - 0.5; 1 once: -4 * 2 - 0.25 - 0.5.
    assert_eq!(penalised(&mut sampler), [1.0, -8.75, 0.0, 1.0]);
    assert_eq!(penalised(&mut sampler), [1.0, -8.75, 0.0, 1.0]);
    sampler.reset();
    assert_eq!(penalised(&mut sampler), [4.0, -4.0, 0.0, 1.0]);
}

#[test]
fn logits_that_are_no_numbers_never_win() {
    for params in [SamplingParams::greedy(), everything_off(), SamplingParams::default()] {
        let mut sampler = sampler(params, 3);
        assert_eq!(sampler.sample(&mut [f32::NAN, f32::NEG_INFINITY, -1e30]), 2);
        assert_eq!(sampler.sample(&mut [f32::NAN, f32::INFINITY, 3.0]), 1);
        assert_eq!(sampler.unusable_steps(), 0);
        assert_eq!(sampler.sample(&mut [f32::NAN; 3]), 0);
        assert_eq!(sampler.sample(&mut []), 0);
        assert_eq!(sampler.unusable_steps(), 2);
    }
}

#[test]
fn parameters_out_of_range_are_refused_by_flag() {
    let off = SamplingParams::default;
    assert_eq!(off().validate().map_err(|e| e.to_string()), Ok(()));
    for (params, expected) in [
        (SamplingParams { temperature: f32::NAN, ..off() }, "--temperature is NaN; it must be a number from -1 to 100"),
        (SamplingParams { temperature: 1e30, ..off() }, "--temperature is 1000000000000000000000000000000; "),
        (SamplingParams { top_p: 1.1, ..off() }, "--top-p is 1.1; it must be a number from 0 to 1"),
        (SamplingParams { min_p: -0.1, ..off() }, "--min-p is -0.1; it must be a number from 0 to 1"),
        (
            SamplingParams { repeat_penalty: 0.0, ..off() },
            "--repeat-penalty is 0; it must be a number from 0.01 to 100",
        ),
        (SamplingParams { presence_penalty: 1e9, ..off() }, "--presence-penalty is 1000000000; "),
        (SamplingParams { frequency_penalty: f32::INFINITY, ..off() }, "--frequency-penalty is inf; "),
        (SamplingParams { repeat_last_n: usize::MAX, ..off() }, "--repeat-last-n is 18446744073709551615; "),
    ] {
        let Err(Error::Usage(message)) = params.validate() else { panic!("{params:?}") };
        assert!(message.starts_with(expected), "{message}");
    }
}
