//! The laws of the placement as a problem: its solution is the best of all, by impact and by time, and never above the room.

use dynamicinfer::cache::{PerTier, Tier};
use dynamicinfer::placement::problem::{LayerProblem, Prices, power_law};
use dynamicinfer::placement::{Problem, ilp, solve, upper_bound};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::costs::{Lane, StageCosts};

/// A problem of one-byte batches with falling impacts, many of them equal.
fn random_problem(prng: &mut Prng, layers: usize, batches: usize, top: u64) -> Problem {
    let layer = |prng: &mut Prng| {
        let count = 1 + prng.below(batches as u64) as usize;
        let mut impacts: Vec<u64> = (0..count).map(|_| prng.below(top)).collect();
        impacts.sort_unstable_by(|a, b| b.cmp(a));
        LayerProblem::by_impact(impacts, 1 + prng.below(count as u64) as usize)
    };
    Problem { batch: 1, batch_bytes: 1, layers: (0..layers).map(|_| layer(prng)).collect() }
}

/// Value, batches and minus the sum of squares of the best placement: all are tried.
fn brute_force(layers: &[LayerProblem], room: usize) -> (u64, usize, i64) {
    let Some((layer, rest)) = layers.split_first() else { return (0, 0, 0) };
    let counts = (0..=layer.impacts.len().min(room)).filter(|&n| n == 0 || n >= layer.min_neurons);
    let with = counts.map(|n| {
        let (impact, batches, squares) = brute_force(rest, room - n);
        (impact + layer.values[n], batches + n, squares - (n * n) as i64)
    });
    with.max().expect("none is always possible")
}

#[test]
fn the_solution_is_the_best_of_all_placements() {
    let mut prng = Prng::new(41);
    for case in 0..600 {
        let (layers, top) = (1 + case % 4, [1, 3, 1000][case % 3]);
        let problem = random_problem(&mut prng, layers, 6, top);
        for room in 0..=problem.batches() + 1 {
            let found = solve(&problem, room as u64);
            let squares = found.batches.iter().map(|n| (n * n) as i64).sum::<i64>();
            let ours = (found.impact, found.batches.iter().sum(), -squares);
            assert_eq!(ours, brute_force(&problem.layers, room), "case {case}, {room} batches of {problem:?}");
            assert!(upper_bound(&problem, room as u64) >= found.impact, "case {case}, {room} batches of {problem:?}");
        }
    }
}

/// The same problem by time: few hot neurons a layer, whose cold ones cost little beside the host's fixed part, or much.
fn by_time(problem: Problem, device_ns: u64, prng: &mut Prng) -> (Problem, Prices) {
    let lane = |fixed_ns: u64, neuron_ns: u64| Lane { fixed_ns: fixed_ns as f64, neuron_ns: neuron_ns as f64 };
    let host = lane([0, 100, 10_000][prng.below(3) as usize], 1 + prng.below(300));
    let lanes = PerTier::all(host).with(Tier::Device, lane(0, device_ns));
    let computed = [0.05, 0.3, 0.7, 1.0][prng.below(4) as usize];
    let prices = Prices::new(&problem, StageCosts { always_ns: 31.0, lanes, move_ns: 0.0 }, computed);
    (problem.by_time(&prices).unwrap(), prices)
}

/// Whole layers are worth more than the sum of their batches, so that values are not concave.
#[test]
fn by_time_the_solution_is_the_best_of_all_placements_too() {
    let mut prng = Prng::new(43);
    let mut whole = 0;
    for case in 0..600 {
        let (layers, top) = (1 + case % 4, [2, 3, 1000][case % 3]);
        let problem = random_problem(&mut prng, layers, 6, top);
        let device_ns = prng.below(2) * prng.below(30);
        let (problem, prices) = by_time(problem, device_ns, &mut prng);
        let nothing = prices.token_ns(&problem, &vec![0; layers]);
        for room in 0..=problem.batches() + 1 {
            let found = solve(&problem, room as u64);
            let squares = found.batches.iter().map(|n| (n * n) as i64).sum::<i64>();
            let ours = (found.value, found.batches.iter().sum(), -squares);
            assert_eq!(ours, brute_force(&problem.layers, room), "case {case}, {room} batches of {problem:?}");
            assert!(upper_bound(&problem, room as u64) >= found.value, "case {case}, {room} batches of {problem:?}");
            // The value is the time that is saved, but where more on the device makes it the slower one.
            let saved_ps = (nothing - prices.token_ns(&problem, &found.batches)) * 1e3;
            assert!(saved_ps <= found.value as f64 + 12.0, "case {case}: {saved_ps} of {}", found.value);
            let exact = device_ns > 0 || (saved_ps - found.value as f64).abs() <= 12.0;
            assert!(exact, "case {case}, a device that takes no time: {saved_ps} of {}", found.value);
            let full = |(n, layer): (&usize, &LayerProblem)| *n == layer.impacts.len();
            whole += found.batches.iter().zip(&problem.layers).filter(|&layer| full(layer)).count();
        }
    }
    assert!(whole > 1000, "{whole}");
    // The same as an integer programme.
    for case in 0..6 {
        let problem = random_problem(&mut prng, 5, 16, 1_000_000);
        let (problem, _) = by_time(problem, 10, &mut prng);
        let room = problem.batches() as u64 * (1 + case % 5) / 6;
        let (ours, theirs) = (solve(&problem, room), ilp::solve(&problem, room, 60.0).unwrap());
        let apart = ours.value.abs_diff(theirs.value) as f64;
        assert!(theirs.optimal && apart <= 1e-6 * ours.value as f64, "case {case}: {} {}", ours.value, theirs.value);
    }
}

#[test]
fn the_integer_programme_finds_the_same_impact() {
    let mut prng = Prng::new(5);
    for case in 0..12 {
        let problem = random_problem(&mut prng, 6, 24, 1_000_000);
        let room = problem.batches() as u64 * (1 + case % 5) / 6;
        let (ours, theirs) = (solve(&problem, room), ilp::solve(&problem, room, 60.0).unwrap());
        assert!(theirs.optimal, "case {case}: its time was over");
        assert_eq!(
            (ours.value, theirs.value),
            (theirs.value, problem.value(&theirs.batches)),
            "case {case}: {problem:?}"
        );
    }
}

#[test]
fn more_budget_never_means_less_and_none_is_exceeded() {
    let mut prng = Prng::new(77);
    let counts: Vec<Vec<u64>> = (0..7).map(|_| (0..640).map(|_| prng.below(50).pow(3)).collect()).collect();
    for least in [1, 100, 333, 640, 5000] {
        let problem = Problem::new(&counts, 24, least).unwrap();
        assert_eq!((problem.batch, problem.batch_bytes), (64, 64 * 24));
        let full = problem.batches() as u64 * problem.batch_bytes;
        let mut last = 0;
        for budget in (0..=full + 5000).step_by(997).chain([full - 1, full, u64::MAX]) {
            let found = solve(&problem, budget);
            let neurons: usize = found.batches.iter().sum::<usize>() * 64;
            assert!(neurons as u64 * 24 <= budget);
            assert!(found.batches.iter().all(|&n| n == 0 || n * 64 >= least.min(640)), "{least}: {:?}", found.batches);
            assert!(found.impact >= last || budget == full - 1, "{budget} bytes hold {} after {last}", found.impact);
            assert!(found.impact <= upper_bound(&problem, budget));
            assert_eq!(found, solve(&problem, budget));
            last = found.impact;
        }
        assert_eq!(last, problem.total_impact());
    }
}

#[test]
fn equal_layers_share_evenly_and_neurons_that_never_fired_still_fill_the_room() {
    let problem = Problem::new(&vec![vec![1; 640]; 8], 1, 1).unwrap();
    assert_eq!(solve(&problem, 40 * 64).batches, [5; 8]);
    let silent = Problem::new(&vec![vec![0; 640]; 8], 1, 1).unwrap();
    assert_eq!(solve(&silent, 40 * 64 + 63).batches, [5; 8]);
}

#[test]
fn batches_divide_a_layer() {
    for (neurons, batch) in [(11008, 64), (13824, 64), (28672, 64), (96, 48), (640, 64), (40, 40), (101, 1), (1, 1)] {
        let problem = Problem::new(&power_law(2, neurons), 1, 1).unwrap();
        assert_eq!((problem.batch, problem.batches() * batch), (batch, 2 * neurons), "{neurons} neurons");
    }
    // A table of a billion cells would be needed in batches of 1.
    let problem = Problem::new(&vec![vec![1; 2 * 50021]; 40], 1, 1).unwrap();
    assert_eq!(problem.batch, 50021);
    let wrong = |counts: &[Vec<u64>]| Problem::new(counts, 1, 1).unwrap_err();
    assert_eq!(wrong(&[]), "there are no neurons to place");
    assert_eq!(wrong(&[vec![1, 2], vec![1]]), "layer 1 has 1 neurons and another 2");
    assert_eq!(wrong(&[vec![u64::MAX, 1]]), "the counts are too large to be added up");
}

#[test]
fn the_assumed_activations_are_the_power_law_that_is_written_down() {
    let layers = power_law(32, 11008);
    let sum = |counts: &[u64]| counts.iter().sum::<u64>() as f64;
    for counts in &layers {
        assert!(counts.is_sorted_by(|a, b| a >= b));
        assert!((sum(&counts[..11008 * 2 / 5]) / sum(counts) - 0.8).abs() < 1e-4);
    }
    assert!((sum(&layers[31]) / sum(&layers[0]) - 3.0).abs() < 1e-4);
}
