//! Speculation: guesses change how fast tokens come and nothing else, and where they do not pay they are left.

use crate::gguf;
use crate::support::opened;
use dynamicinfer::clock::Duration;
use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::engine::sampler::SamplingParams;
use dynamicinfer::engine::{BatchToken, Choice, Engine, Logits, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::generation::speculation::{Guessed, Guesser, MAX_GUESSED, look_up};
use dynamicinfer::generation::{Event, Handle, Job, Limits, Speculation, start};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// Positions of every text here.
const CONTEXT: usize = 160;

/// A worker on a model, with or without guesses, whose numbers are rounded as little as may be.
fn worker(model: Model, speculation: Speculation) -> Handle {
    let tokenizer = Arc::new(Tokenizer::new(model.tokenizer().unwrap(), model.path()).unwrap());
    let mut engine = Engine::new(model, 1, Kernels::best());
    if engine.model.has_neurons() {
        let exact = Choice::Exact { activation_threshold: 0.0 };
        engine.set_sparsity(Sparsity::new(vec![exact; engine.model.config.layers().len()], 0).unwrap());
    }
    let limits = Limits {
        queue: 64,
        slots: 1,
        context: CONTEXT,
        kv: KvType::F32,
        deterministic: false,
        rest: Duration::MAX,
        slowdown: 2.0,
        prompt_cache_bytes: 0,
        prompt_cache_every: 8192,
        speculation,
    };
    start(engine, tokenizer, limits).unwrap()
}

fn job(prompt: Vec<u32>, max_tokens: usize, params: SamplingParams) -> Job {
    Job { client: 1, params, ignore_eos: true, logprobs: Some(0), ..Job::plain(prompt, max_tokens) }
}

/// The tokens of each job's answer, one job after another.
fn answers(handle: &Handle, jobs: impl Iterator<Item = Job>) -> Vec<Vec<u32>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answer = |job| {
        let mut events = handle.submit(job).unwrap();
        let mut tokens = Vec::new();
        loop {
            match runtime.block_on(events.recv()) {
                Some(Event::Delta(delta)) => tokens.extend(delta.logprobs.iter().map(|logprob| logprob.token)),
                Some(Event::Done(done)) => {
                    assert_eq!(tokens.len(), done.generated_tokens);
                    return tokens;
                }
                other => panic!("{other:?}"),
            }
        }
    };
    jobs.map(answer).collect()
}

/// A prompt in which something is said more than once.
fn prompt(seed: u64, vocab: usize) -> Vec<u32> {
    let mut rng = Prng::new(seed);
    let mut token = || 5 + (rng.next_u64() % (vocab as u64 - 5)) as u32;
    let said: Vec<u32> = (0..12).map(|_| token()).collect();
    let between: Vec<u32> = (0..4).map(|_| token()).collect();
    [&said[..], &between, &said[..8]].concat()
}

/// The tokens that were guessed, and those of them that were right.
fn guessed(handle: &Handle) -> [u64; 2] {
    [handle.metrics.guessed_tokens.get(), handle.metrics.accepted_tokens.get()]
}

/// Greedy answers to so many prompts, equal with guesses and without.
fn greedy_texts_are_equal(name: &str, model: impl Fn() -> Model, prompts: u64, penalty: f32) {
    let vocab = model().config.vocab;
    let jobs = || {
        let params = SamplingParams { repeat_penalty: penalty, ..SamplingParams::greedy() };
        (0..prompts).map(move |seed| job(prompt(seed, vocab), 16 + seed as usize % 5, params.clone()))
    };
    let [without, with] = [Speculation::Off, Speculation::On].map(|mode| worker(model(), mode));
    let (expected, found) = (answers(&without, jobs()), answers(&with, jobs()));
    let differ = expected.iter().zip(&found).filter(|(a, b)| a != b).count();
    assert_eq!(differ, 0, "{name}: {differ} of {prompts} texts differ");
    let [tried, right] = guessed(&with);
    assert!(right > 0 && tried > right, "{name}: {right} of {tried} guesses were right");
    assert_eq!(guessed(&without), [0, 0]);
    let passes = |handle: &Handle| handle.metrics.decode_passes.get();
    assert_eq!(passes(&with) + right, passes(&without), "{name}: a right guess saves a pass");
}

fn demo(dir: &Path, name: &str) -> Model {
    let source = Source::open(&Path::new("assets").join(name), None).unwrap();
    if source.config.only_in_place().is_some() {
        return Model::in_place(source).unwrap();
    }
    let store = dir.join(name);
    if !store.exists() {
        pack(&source, &store, &PackOptions { types: Quant::F32.into(), orders: None }, &|_, _| Ok(())).unwrap();
    }
    Model::open(&store).unwrap()
}

#[test]
fn two_hundred_greedy_texts_of_the_demo_are_those_without_guesses() {
    let dir = tempfile::tempdir().unwrap();
    greedy_texts_are_equal("demo", || demo(dir.path(), "demo"), 200, 1.0);
}

#[test]
fn two_hundred_greedy_texts_of_a_mixture_are_those_without_guesses() {
    let dir = tempfile::tempdir().unwrap();
    greedy_texts_are_equal("demo-moe", || demo(dir.path(), "demo-moe"), 200, 1.0);
}

/// Biases, windows, experts, keys of other layers, latents; and penalties, which look at every token before.
#[test]
fn greedy_texts_of_every_kind_of_layer_are_those_without_guesses() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt", "mistral", "qwen2", "qwen3-moe", "gemma3", "gemma4-e2b", "deepseek-v2"] {
        for penalty in [1.0, 1.1] {
            greedy_texts_are_equal(name, || opened(dir.path(), name, Quant::F32), 40, penalty);
        }
    }
}

#[test]
fn a_model_with_states_is_not_guessed_for() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(opened(dir.path(), "qwen35", Quant::F32), Speculation::On);
    assert_eq!(answers(&handle, [job(prompt(1, 320), 20, SamplingParams::greedy())].into_iter())[0].len(), 20);
    assert_eq!(guessed(&handle), [0, 0]);
}

/// A model with a vocabulary of 32 tokens: the first rows of a fixture's embedding and head.
fn small(dir: &Path) -> Model {
    let mut file = gguf::File::read("llama.gguf").in_f32();
    file.vocabulary(32);
    file.remove("llama.vocab_size");
    for name in ["token_embd.weight", "output.weight"] {
        let tensor = file.tensor(name);
        let cols = tensor.data.len() / 320;
        tensor.data.truncate(32 * cols);
        tensor.shape.iter_mut().filter(|size| **size == 320).for_each(|size| *size = 32);
    }
    let path = dir.join("small.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    Model::in_place(Source::open(&path, None).unwrap()).unwrap()
}

/// Tokens of a temperature of 1 are drawn as without guesses: with the same seeds they are the same tokens, and with others, over 20,000 draws
/// of a place behind guesses, their shares differ by no more than chance, which is below 61.1 by chi-square with 31 degrees of freedom in 999
/// of 1000 cases.
#[test]
fn sampled_tokens_have_the_distribution_that_they_have_without_guesses() {
    const DRAWS: u64 = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let [without, with] = [Speculation::Off, Speculation::On].map(|mode| worker(small(dir.path()), mode));
    // Whatever comes behind the last token has come behind it before, and something has followed.
    let said: Vec<u32> = (3..32).flat_map(|token| [4, token, 3 + token * 7 % 29]).chain([4]).collect();
    let jobs = |seeds: std::ops::Range<u64>| {
        let said = said.clone();
        seeds.map(move |seed| {
            let params =
                SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed, ..Default::default() };
            job(said.clone(), 3, params)
        })
    };
    let found = answers(&with, jobs(0..DRAWS));
    assert_eq!(found[..1000], answers(&without, jobs(0..1000))[..], "the same seeds");
    let [tried, right] = guessed(&with);
    assert!(right > 100 && tried > DRAWS / 2, "{right} of {tried} guesses were right");
    let expected = answers(&without, jobs(DRAWS..2 * DRAWS));
    for place in 0..3 {
        let count = |texts: &[Vec<u32>]| {
            texts.iter().fold([0u32; 32], |mut counts, text| {
                counts[text[place] as usize] += 1;
                counts
            })
        };
        // Of two samples of the same size.
        let cells = count(&found).into_iter().zip(count(&expected)).filter(|(a, b)| a + b > 0);
        let chi: f64 = cells.map(|(a, b)| (f64::from(a) - f64::from(b)).powi(2) / f64::from(a + b)).sum();
        assert!(chi < 61.1, "token {place}: chi-square {chi}");
    }
}

/// A text that is cut back within a pass goes on with the same bits as a copy of what is left, into which nothing else was ever written.
#[test]
fn a_dropped_guess_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "mistral", "qwen2", "qwen3-moe", "gemma3", "gemma4-e2b", "deepseek-v2"] {
        let mut engine = Engine::new(opened(dir.path(), name, Quant::F32), 2, Kernels::best());
        let cache = || KvCache::new(&engine.model.config, CONTEXT, KvType::F16).unwrap();
        let (mut caches, mut copy) = ([cache()], cache());
        engine.forward(&mut caches[0], &prompt(3, 320), Logits::None);
        let len = caches[0].len + 2;
        let columns = [50, 61, 70, 71, 72, 73].map(|token| BatchToken { sequence: 0, token });
        engine.forward_batch(&mut caches, &columns, Logits::All);
        copy.copy_from(&caches[0], len);
        assert_eq!(caches[0].rewind(len), len);
        for token in [7, 90, 33] {
            let expected = engine.forward(&mut copy, &[token], Logits::Last).to_vec();
            assert!(engine.forward(&mut caches[0], &[token], Logits::Last) == expected, "{name}: token {token}");
        }
    }
}

/// With AVX-512 a dense model whose matrices are quantised gives few columns the bits that each has alone, so that guesses change no bit of a
/// text; elsewhere, and where tokens share lists of neurons or experts, sums are added in another order.
#[test]
fn a_dense_models_logits_are_those_without_guesses() {
    let kernels = Kernels::best();
    if kernels.isa != Isa::Avx512 {
        return;
    }
    for name in ["llama.q4_0.gguf", "llama-linear-rope.q8_0.gguf", "k256.q4_k_m.gguf", "k256.q6_k.gguf"] {
        let path = Path::new("tests/fixtures/models").join(name);
        let mut engine = Engine::new(Model::in_place(Source::open(&path, None).unwrap()).unwrap(), 2, Kernels::best());
        let vocab = engine.model.config.vocab;
        let mut run = |sizes: &[usize]| {
            let mut cache = KvCache::new(&engine.model.config, CONTEXT, KvType::F16).unwrap();
            let tokens = prompt(3, vocab);
            engine.forward(&mut cache, &tokens[..10], Logits::None);
            let (mut at, mut all) = (10, Vec::new());
            for &n in sizes {
                all.extend(engine.forward(&mut cache, &tokens[at..at + n], Logits::All).iter().map(|x| x.to_bits()));
                at += n;
            }
            all
        };
        assert!(run(&[1; 14]) == run(&[MAX_GUESSED + 1, 2, 1, 4]), "{name}");
    }
}

/// Finds what [`look_up`] does by trying every place.
fn longest_run(text: &[u32], next: u32) -> (usize, usize) {
    let whole = [text, &[next]].concat();
    let run = |end: usize| (0..8.min(end)).take_while(|&i| whole[end - 1 - i] == whole[text.len() - i]).count();
    (1..=text.len()).map(|end| (run(end), end)).max().filter(|found| found.0 >= 2).unwrap_or((0, 0))
}

#[test]
fn guesses_are_what_followed_the_longest_run_that_came_last() {
    for seed in 0..3000u64 {
        let mut rng = Prng::new(seed);
        let (len, vocab) = (rng.next_u64() % 300, 2 + seed % 7);
        let text: Vec<u32> = (0..len).map(|_| (rng.next_u64() % vocab) as u32).collect();
        let next = (rng.next_u64() % vocab) as u32;
        let (run, end) = longest_run(&text, next);
        let mut guesses = [u32::MAX; MAX_GUESSED];
        assert_eq!(look_up(&text, next, &mut guesses), run, "seed {seed}");
        if run > 0 {
            let mut whole = [&text[..], &[next]].concat();
            for (i, guess) in guesses.into_iter().enumerate() {
                assert_eq!(guess, whole[end + i], "seed {seed}: guess {i}");
                whole.push(guess);
            }
        }
    }
    let mut guesses = [0; 5];
    assert_eq!(look_up(&[1, 2, 1, 2], 1, &mut guesses), 3);
    assert_eq!(guesses, [2, 1, 2, 1, 2], "a run that reaches into itself is continued");
    assert_eq!(look_up(&[], 1, &mut guesses), 0);
}

/// A text in virtual time: how long its tokens take, and how many passes had guesses.
struct Told {
    seconds: f64,
    plain: f64,
    guessing: usize,
}

/// `tokens` tokens of a text, in half of whose places there is a guess; each is right with a probability by its place. A pass of n columns
/// takes `time(n)` seconds, and some scatter by a fifth.
fn tell(
    guesser: &mut Guesser,
    seed: u64,
    tokens: usize,
    right: impl Fn(usize) -> f64,
    time: impl Fn(usize) -> f64,
) -> Told {
    let mut rng = Prng::new(seed);
    let mut told = Told { seconds: 0.0, plain: 0.0, guessing: 0 };
    let mut at = 0;
    while at < tokens {
        let run = if rng.next_f64() < 0.5 { 0 } else { 2 + (rng.next_u64() % 7) as usize };
        let count =
            if run > 0 && guesser.may_guess() { guesser.plan(run, MAX_GUESSED.min(tokens - at - 1)) } else { 0 };
        let accepted = (0..count).take_while(|_| rng.next_f64() < right(at)).count();
        let seconds = time(1 + count) * (0.9 + 0.2 * rng.next_f64());
        guesser.note(Guessed { run, count }, 1 + accepted, seconds);
        told.seconds += seconds;
        told.plain += (1 + accepted) as f64 * time(1);
        told.guessing += usize::from(count > 0);
        at += 1 + accepted;
    }
    told
}

/// Bound by reading, bound by arithmetic, and in steps of four columns.
const MACHINES: [fn(usize) -> f64; 3] =
    [|n| 0.02 * (0.96 + 0.04 * n as f64), |n| 0.02 * n as f64, |n| 0.02 * (0.7 + 0.3 * n.div_ceil(4) as f64)];

#[test]
fn where_no_guess_is_right_a_text_is_as_fast_as_without() {
    for (machine, time) in MACHINES.into_iter().enumerate() {
        for seed in 0..20 {
            let mut guesser = Guesser::new(Speculation::Auto);
            let told = tell(&mut guesser, seed, 2000, |_| 0.0, time);
            let share = told.plain / told.seconds;
            assert!(share > 0.98, "machine {machine}, seed {seed}: {share} of the speed");
            assert!(told.guessing > 0, "machine {machine}: nothing was tried");
        }
    }
}

/// Whatever the share of right guesses is, no text of 300 tokens or more is much slower than without.
#[test]
fn guesses_that_are_seldom_right_cost_little_and_others_pay() {
    for (machine, time) in MACHINES.into_iter().enumerate() {
        for tenth in 0..=10 {
            for seed in 0..10 {
                let mut guesser = Guesser::new(Speculation::Auto);
                let told = tell(&mut guesser, seed, 600, |_| f64::from(tenth) / 10.0, time);
                let share = told.plain / told.seconds;
                assert!(share > 0.97, "machine {machine}, {tenth} tenths right: {share} of the speed");
                if machine == 0 && tenth >= 8 {
                    assert!(share > 1.5, "{tenth} tenths right: {share} of the speed");
                }
            }
        }
    }
}

#[test]
fn a_text_that_begins_to_repeat_itself_is_guessed_again() {
    let mut guesser = Guesser::new(Speculation::Auto);
    tell(&mut guesser, 1, 5000, |_| 0.0, MACHINES[0]);
    let told = tell(&mut guesser, 2, 600, |_| 0.95, MACHINES[0]);
    assert!(told.plain / told.seconds > 1.5, "{} of the speed", told.plain / told.seconds);
    let told = tell(&mut guesser, 3, 1000, |_| 0.0, MACHINES[0]);
    assert!(told.plain / told.seconds > 0.98, "{} of the speed", told.plain / told.seconds);
}

#[test]
fn nothing_is_guessed_where_guesses_are_off() {
    let mut guesser = Guesser::new(Speculation::Off);
    assert_eq!(tell(&mut guesser, 1, 500, |_| 1.0, MACHINES[0]).guessing, 0);
    for mode in [Speculation::Auto, Speculation::On, Speculation::Off] {
        assert_eq!(Speculation::named(mode.name()), Some(mode));
    }
}
