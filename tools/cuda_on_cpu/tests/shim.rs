//! The shim itself: kernels that are wrong are caught, each by its own sentence, and a right one is not.

use cuda_on_cpu::{Kernel, Order};
use dynamicinfer::prng::Prng;
use half::f16;

const THREADS: u32 = 96;

fn run(name: &str, shared: usize, order: Order) -> Result<Vec<f32>, String> {
    let x: Vec<f32> = (0..THREADS).map(|i| i as f32).collect();
    let mut out = vec![0f32; THREADS as usize];
    let kernel = Kernel::find(name).expect("a kernel of broken.cu");
    let words = [x.as_ptr() as u64, out.as_mut_ptr() as u64];
    let words = if kernel.arguments().len() == 2 { &words[..] } else { &words[1..] };
    // SAFETY: the kernels touch one number of each per thread.
    unsafe { kernel.launch([1, 1, 1], [THREADS, 1, 1], shared, words, 1, order)? };
    Ok(out)
}

#[test]
fn a_missing_barrier_shows_when_fibers_run_backward() {
    let right: Vec<f32> = (0..THREADS).map(|i| ((i + 1) % THREADS) as f32).collect();
    for order in [Order::Forward, Order::Backward] {
        assert_eq!(run("whole_barrier", 4 * THREADS as usize, order).unwrap(), right);
    }
    let [forward, backward] =
        [Order::Forward, Order::Backward].map(|order| run("broken_no_barrier", 4 * THREADS as usize, order).unwrap());
    assert!(forward.iter().zip(&backward).any(|(a, b)| a.to_bits() != b.to_bits()), "the two orders agree");
}

/// norm.cu with its barriers taken out: threads meet the rubbish that shared memory begins with.
#[test]
fn a_real_kernel_without_its_barriers_is_caught() {
    const HIDDEN: usize = 512;
    let x: Vec<f32> = (0..HIDDEN).map(|i| (i * 7919 % HIDDEN) as f32).collect();
    let normalised = |name: &str, order| {
        let mut out = vec![0f32; HIDDEN];
        // x, no weight, no bias, out; RMS.
        let words = [x.as_ptr() as u64, 0, 0, out.as_mut_ptr() as u64, HIDDEN as u64, 0, 0];
        let kernel = Kernel::find(name).expect("a kernel");
        // SAFETY: the kernel reads all of x and writes as many numbers.
        unsafe { kernel.launch([1, 1, 1], [128, 1, 1], 4 * 4, &words, 1, order).unwrap() };
        out
    };
    let rms = (x.iter().map(|v| f64::from(v * v)).sum::<f64>() / HIDDEN as f64).sqrt();
    let is_right =
        |out: &[f32]| out.iter().zip(&x).all(|(out, x)| (f64::from(*out) - f64::from(*x) / rms).abs() < 1e-5);
    for order in [Order::Forward, Order::Backward] {
        assert!(is_right(&normalised("normalise", order)));
        assert!(!is_right(&normalised("broken_normalise", order)), "{order:?}");
    }
}

#[test]
fn what_no_order_may_see_ends_in_a_sentence() {
    for (name, sentence) in [
        ("broken_divergent", "the barrier is divergent"),
        ("broken_leaves", "left the kernel"),
        ("broken_mask", "which leaves it out"),
        ("broken_gone", "left the kernel"),
        ("broken_deadlock", "wait elsewhere"),
        ("broken_overrun", "writes behind its 384 bytes of shared memory"),
    ] {
        for order in [Order::Forward, Order::Backward] {
            let said = run(name, 384, order).expect_err(name);
            assert!(said.starts_with(&format!("{name}, block (0, 0, 0): ")), "{said}");
            assert!(said.contains(sentence), "{name}: {said}");
        }
    }
}

/// Numbers whose sums are exact in any order, in the documented places of fragments: a lane that looked elsewhere would be off by far.
#[test]
fn products_of_tensor_cores_are_the_scalar_ones() {
    let launch = |name: &str, words: [u64; 3], order| {
        let kernel = Kernel::find(name).expect("a kernel of mma.cu");
        // SAFETY: a warp touches the matrices that it is given, whole.
        unsafe { kernel.launch([1, 1, 1], [32, 1, 1], 0, &words, 1, order).unwrap() };
    };
    for (seed, order) in [(1, Order::Forward), (2, Order::Backward)] {
        let mut rng = Prng::new(seed);
        let mut numbers = |count: usize, most: u64| -> Vec<i32> {
            (0..count).map(|_| rng.below(2 * most) as i32 - most as i32).collect()
        };
        let (a, b, before) = (numbers(16 * 8, 128), numbers(8 * 8, 128), numbers(16 * 8, 1 << 20));
        let halves = |of: &[i32]| -> Vec<u16> { of.iter().map(|&v| f16::from_f32(v as f32).to_bits()).collect() };
        let (words, mut d) = ([halves(&a), halves(&b)], before.iter().map(|&v| v as f32).collect::<Vec<_>>());
        launch("whole_mma_halves", [words[0].as_ptr() as u64, words[1].as_ptr() as u64, d.as_mut_ptr() as u64], order);
        assert_eq!(d, sums(&a, &b, &before, 8).iter().map(|&v| v as f32).collect::<Vec<_>>());

        let (a, b, before) = (numbers(8 * 16, 128), numbers(16 * 8, 128), numbers(8 * 8, 1 << 30));
        let bytes = |of: &[i32]| -> Vec<i8> { of.iter().map(|&v| v as i8).collect() };
        let (words, mut d) = ([bytes(&a), bytes(&b)], before.clone());
        launch("whole_mma_bytes", [words[0].as_ptr() as u64, words[1].as_ptr() as u64, d.as_mut_ptr() as u64], order);
        assert_eq!(d, sums(&a, &b, &before, 16));
    }
}

/// before + a b, where b is `[k, 8]`.
fn sums(a: &[i32], b: &[i32], before: &[i32], k: usize) -> Vec<i32> {
    let sum = |row: usize, column: usize| (0..k).map(|i| a[row * k + i] * b[i * 8 + column]).sum::<i32>();
    before.iter().enumerate().map(|(at, before)| before + sum(at / 8, at % 8)).collect()
}

#[test]
fn launches_beyond_any_card_are_refused() {
    let kernel = Kernel::find("whole_barrier").unwrap();
    for (grid, block, shared) in
        [([1, 1, 1], [1025, 1, 1], 0), ([0, 1, 1], [32, 1, 1], 0), ([1, 1, 1], [32, 1, 1], 1 << 20)]
    {
        // SAFETY: nothing runs.
        let said = unsafe { kernel.launch(grid, block, shared, &[0, 0], 1, Order::Forward) }.unwrap_err();
        assert!(said.contains("no card runs"), "{said}");
    }
}

#[test]
fn kernels_are_found_by_name_with_their_arguments() {
    assert_eq!(Kernel::find("whole_barrier").unwrap().arguments(), [8, 8]);
    assert!(Kernel::find("no_such_kernel").is_none());
    assert!(cuda_on_cpu::names().contains(&"broken_mask"));
}
