//! Laws of saved texts: a text goes on from a restored cache as it went on from its own, whatever stood there before; and slots give a prompt
//! nothing but its owner's tokens.

use crate::drawn::drawn;
use crate::support::law::with_seeds;
use crate::support::{RATES, device_bytes, on_device, opened};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::prompt_file;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::generation::prompt_policy;
use dynamicinfer::generation::slots::Slots;
use dynamicinfer::model::saved_file::{self, Key};
use dynamicinfer::model::{KvCache, KvType, Model, ModelConfig};
use dynamicinfer::open::{EngineOptions, Quiet, open};
use dynamicinfer::prng::Prng;
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const CONTEXT: usize = 256;

/// Models with windows, with layers that read another's keys, and with states of every kind.
const FAMILIES: [&str; 6] = ["gemma3", "gemma4-e2b", "qwen35", "nemotron-h", "lfm2", "deepseek-v3"];

/// The demo model, whose heads have 64 numbers: every type can hold them.
fn demo() -> Engine {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    open(&EngineOptions { context: Some(CONTEXT), ..EngineOptions::new(root) }, &Quiet).unwrap().engine
}

fn engine(model: Model) -> Engine {
    Engine::new(model, 2, Kernels::best())
}

fn cache(engine: &Engine, context: usize, kind: KvType) -> KvCache {
    KvCache::new(&engine.model.config, context, kind).unwrap()
}

/// Tokens that every vocabulary here has.
fn text(n: usize, seed: u64) -> Vec<u32> {
    let mut prng = Prng::new(seed);
    (0..n).map(|_| 5 + prng.below(80) as u32).collect()
}

/// A cache with a text of 100 tokens in passes of several lengths, the last of one token.
fn read(engine: &mut Engine, kind: KvType) -> KvCache {
    let (mut kv, text) = (cache(engine, CONTEXT, kind), text(100, 1));
    let mut rest = &text[..];
    for n in [40, 9, 1, 17, 2, 30, 1] {
        engine.forward(&mut kv, &rest[..n], Logits::None);
        if n > 1 {
            kv.checkpoint();
        }
        rest = &rest[n..];
    }
    kv
}

/// Logits behind some tokens one by one and together.
fn goes_on(engine: &mut Engine, kv: &mut KvCache, seed: u64) -> Vec<f32> {
    let more = text(4, seed);
    let mut found = engine.forward(kv, &more[..1], Logits::Last).to_vec();
    found.extend_from_slice(engine.forward(kv, &more[1..], Logits::All));
    found
}

/// A saved text is restored at every length that it reaches, in caches of several sizes in which another text stood, and goes on with the bits
/// that a copy goes on with.
fn restored_is_copied(engine: &mut Engine, kind: KvType) {
    let kv = read(engine, kind);
    let saved = kv.save(usize::MAX).unwrap();
    assert_eq!((saved.len(), saved.bytes()), (100, kv.saved_bytes(usize::MAX)));
    (0..=120).for_each(|len| assert_eq!(saved.reach(len), kv.reach(len), "{len}"));
    let reached: Vec<usize> = (1..=100).filter(|&len| kv.reach(len) == len).collect();
    assert_eq!(reached.last(), Some(&100));
    for &len in reached.iter().rev().step_by(reached.len().div_ceil(6)) {
        for context in [len + 4, CONTEXT, 2 * CONTEXT] {
            let mut copy = cache(engine, context, kind);
            copy.copy_from(&kv, len);
            let mut other = cache(engine, context, kind);
            engine.forward(&mut other, &text(len.min(70), 2), Logits::None);
            assert!(other.fits(&saved, len));
            other.renew();
            other.restore(&saved, len);
            assert_eq!((other.len, other.untouched()), (len, 0));
            assert!(goes_on(engine, &mut other, 3) == goes_on(engine, &mut copy, 3), "{len} in {context}");
        }
        assert!(!cache(engine, len - 1, kind).fits(&saved, len));
    }
}

#[test]
fn a_restored_text_goes_on_with_the_same_bits() {
    let mut engine = demo();
    KvType::ALL.into_iter().for_each(|kind| restored_is_copied(&mut engine, kind));
    let foreign = read(&mut engine, KvType::F16).save(1).unwrap();
    assert!(!cache(&engine, CONTEXT, KvType::F32).fits(&foreign, 100));
    let dir = tempfile::tempdir().unwrap();
    for name in FAMILIES {
        let mut engine = self::engine(opened(dir.path(), name, Quant::F32));
        assert!(!cache(&engine, CONTEXT, KvType::F16).fits(&foreign, 100), "{name}");
        restored_is_copied(&mut engine, KvType::F32);
        restored_is_copied(&mut engine, KvType::F16);
    }
}

#[test]
fn a_restored_text_of_every_form_goes_on_with_the_same_bits() {
    with_seeds("a_restored_text_of_every_form_goes_on_with_the_same_bits", 100, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (_, model) = drawn(seed, dir.path());
        restored_is_copied(&mut engine(model), KvType::F32);
    });
}

/// Of states that are not saved, the older ones are left out, and the text reaches the others alone.
#[test]
fn fewer_states_reach_fewer_lengths() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(opened(dir.path(), "qwen35", Quant::F32));
    let kv = read(&mut engine, KvType::F32);
    let reached: Vec<usize> = (1..=100).filter(|&len| kv.reach(len) == len).collect();
    assert_eq!(reached.len(), kv.states());
    for states in 1..=reached.len() {
        let saved = kv.save(states).unwrap();
        assert_eq!(saved.bytes(), kv.saved_bytes(states));
        let found: Vec<usize> = (1..=100).filter(|&len| saved.reach(len) == len).collect();
        assert_eq!(found, reached[reached.len() - states..]);
    }
    assert!(cache(&engine, CONTEXT, KvType::F32).save(1).is_none());
}

/// Fills a cache with numbers that nothing can come from, and gives it back empty.
fn poison(engine: &Engine, kv: &mut KvCache) {
    let config = &engine.model.config;
    for position in 0..kv.context {
        for layer in 0..config.layers().len() {
            match config.mixer(layer).attention() {
                Some(attention) if attention.keys_of.is_some() => {}
                Some(attention) => {
                    let numbers = vec![f32::NAN; attention.kv_dim()];
                    // Latents are keys and values in one.
                    let parts = if attention.latent.is_some() { 1 } else { 2 };
                    (0..parts).for_each(|part| kv.put(layer, part, position, &numbers));
                }
                None => kv.state(layer, position).to.fill(f32::NAN),
            }
        }
        kv.commit(position + 1);
    }
    kv.rewind(0);
    kv.renew();
}

#[test]
fn poisoned_memory_is_never_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in FAMILIES.into_iter().chain(["mistral"]) {
        let mut engine = engine(opened(dir.path(), name, Quant::F32));
        let kv = read(&mut engine, KvType::F32);
        let saved = kv.save(usize::MAX).unwrap();
        for len in (1..=100).filter(|&len| kv.reach(len) == len).step_by(9).chain([100]) {
            let [mut fresh, mut used] = [0, 1].map(|_| cache(&engine, CONTEXT, KvType::F32));
            poison(&engine, &mut used);
            used.restore(&saved, len);
            fresh.restore(&saved, len);
            let found = goes_on(&mut engine, &mut used, 4);
            assert!(found.iter().all(|x| x.is_finite()), "{name} at {len}");
            assert!(found == goes_on(&mut engine, &mut fresh, 4), "{name} at {len}");
            // What is kept of earlier lengths is theirs, too.
            let [found, wanted] = [&mut used, &mut fresh].map(|kv| {
                kv.rewind(len - 1);
                (kv.len, goes_on(&mut engine, kv, 5))
            });
            assert!(found == wanted, "{name} below {len}");
        }
    }
}

/// A pass that is stopped before any layer leaves nothing in what is saved.
#[test]
fn a_stopped_pass_saves_what_was_committed() {
    with_seeds("a_stopped_pass_saves_what_was_committed", 50, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (_, model) = drawn(seed, dir.path());
        let mut engine = engine(model);
        let mut kv = read(&mut engine, KvType::F32);
        let mut clean = cache(&engine, CONTEXT, KvType::F32);
        clean.restore(&kv.save(1).unwrap(), 100);
        let wanted = goes_on(&mut engine, &mut clean, 6);
        for stop in 0..engine.model.config.layers().len() {
            let mut left = stop;
            let whole = engine.forward_while(&mut kv, &text(40, 7), Logits::Last, &mut || {
                left = left.wrapping_sub(1);
                left != usize::MAX
            });
            assert!(!whole && kv.len == 100);
            let mut other = cache(&engine, CONTEXT, KvType::F32);
            other.restore(&kv.save(usize::MAX).unwrap(), 100);
            assert!(goes_on(&mut engine, &mut other, 6) == wanted, "before layer {stop}");
        }
    });
}

/// A device that had a copy of another text's keys gets those of the restored text.
#[test]
fn a_restored_text_lies_on_the_device() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["mistral", "gemma3", "qwen35"] {
        let model = opened(dir.path(), name, Quant::F32);
        let slots = vec![8; model.config.layers().len()];
        let device = Box::new(VirtualDevice::new(device_bytes(&model, &slots), RATES));
        // SAFETY: the engine drops its device's part before its model: it has both.
        let split = unsafe { on_device(&model, device, &slots) }.expect("the budget is what it takes");
        let mut engine = engine(model);
        engine.split = Some(split);
        let mut kv = read(&mut engine, KvType::F16);
        let saved = kv.save(usize::MAX).unwrap();
        let mut copy = cache(&engine, CONTEXT, KvType::F16);
        copy.copy_from(&kv, 100);
        let wanted = goes_on(&mut engine, &mut copy, 8);
        // In place of another text and of a longer one of its own, under a new number and under the old one.
        for renews in [true, false] {
            if renews {
                kv.rewind(0);
            }
            engine.forward(&mut kv, &text(60, 9), Logits::None);
            if renews {
                kv.renew();
            }
            kv.restore(&saved, 100);
            assert!(goes_on(&mut engine, &mut kv, 8) == wanted, "{name}");
            engine.check().unwrap();
        }
    }
}

/// A number that no other beginning of a text has, nor the same one of another owner or from before a change to the engine.
fn mark(owner: u64, epoch: u64, begin: &[u32]) -> f32 {
    let number = begin.iter().fold(owner * 31 + epoch * 7, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
    });
    (number >> 40) as f32
}

/// Slots without a model: each position and state holds its [`mark`].
struct Marked {
    config: ModelConfig,
    slots: Slots,
    epoch: u64,
    /// Marks of the beginnings that ran since the last change.
    ran: HashSet<(u64, u32)>,
}

impl Marked {
    fn new(name: &str, count: usize, context: usize, reuse: bool, bytes: u64) -> Marked {
        let dir = tempfile::tempdir().unwrap();
        let config = opened(dir.path(), name, Quant::F32).config.clone();
        let caches = (0..count).map(|_| KvCache::new(&config, context, KvType::F32).unwrap()).collect();
        Marked { config, slots: Slots::new(caches, reuse, bytes), epoch: 0, ran: HashSet::new() }
    }

    /// A pass that takes a slot's text to `end`, which is not committed if it is stopped.
    fn run(&mut self, (slot, owner): (usize, u64), text: &[u32], end: usize, stopped: bool) {
        let kv = &mut self.slots.caches[slot];
        let begin = kv.len;
        for position in begin..end {
            let mark = mark(owner, self.epoch, &text[..=position]);
            for layer in 0..self.config.layers().len() {
                match self.config.mixer(layer).attention() {
                    Some(attention) if attention.keys_of.is_some() => {}
                    Some(attention) => {
                        let numbers = vec![mark; attention.kv_dim()];
                        [0, 1].into_iter().for_each(|part| kv.put(layer, part, position, &numbers));
                    }
                    None => kv.state(layer, position).to.fill(mark),
                }
            }
            if !stopped {
                self.ran.insert((owner, mark.to_bits()));
            }
        }
        if !stopped {
            kv.commit(end);
            self.slots.ran(slot, &text[begin..end]);
        }
    }

    /// What the next token sees in a slot is this owner's text and no other.
    fn check(&mut self, (slot, owner): (usize, u64), text: &[u32]) {
        let kv = &mut self.slots.caches[slot];
        let len = kv.len;
        if len == 0 {
            return;
        }
        assert!(self.ran.contains(&(owner, mark(owner, self.epoch, &text[..len]).to_bits())));
        for layer in 0..self.config.layers().len() {
            let Some(attention) = self.config.mixer(layer).attention() else {
                let wanted = mark(owner, self.epoch, &text[..len]);
                let state = kv.state(layer, len).from.unwrap();
                assert!(state.iter().all(|&number| number == wanted), "layer {layer} behind {len}");
                continue;
            };
            if attention.keys_of.is_some() {
                continue;
            }
            let first = attention.window.map_or(0, |window| (len + 1).saturating_sub(window));
            for position in first..len {
                let wanted = mark(owner, self.epoch, &text[..=position]).to_le_bytes();
                for head in 0..attention.kv_heads {
                    let parts = kv.head(layer, head, position..position + 1);
                    let same = |part: &[u8]| part.chunks_exact(4).all(|number| number == wanted);
                    assert!(parts.into_iter().all(same), "layer {layer}, position {position} of {len}");
                }
            }
        }
    }
}

/// Talks of three owners, many with the same beginnings, in few slots and a small cache: a prompt goes on from nothing but its owner's tokens, with
/// what was computed for them since the last change.
#[test]
fn ten_thousand_slot_steps_match_a_list_of_texts() {
    const MOST: usize = 300;
    for (name, seed) in [("gemma3", 1), ("lfm2", 2), ("qwen35", 3), ("mistral", 4)] {
        let mut prng = Prng::new(seed);
        let one = KvCache::bytes_for(&Marked::new(name, 0, 1, true, 0).config, MOST, KvType::F32);
        let mut all = Marked::new(name, 3, MOST + 1, true, 3 * one);
        let mut talks: Vec<(u64, Vec<u32>)> = (0..8).map(|i| (i % 3, text(20, i % 2))).collect();
        // Slot, and the talk that has it.
        let mut busy: Vec<(usize, usize)> = Vec::new();
        let (mut reused_tokens, mut most) = (0, 0);
        for _ in 0..2_500 {
            match prng.below(12) {
                0..=5 if busy.len() < 3 => {
                    let talk = prng.below(8) as usize;
                    if busy.iter().any(|&(_, of)| of == talk) {
                        continue;
                    }
                    if prng.below(6) == 0 || talks[talk].1.len() > MOST - 60 {
                        // Another talk, which begins as some talk does, mostly of another owner.
                        let (_, from) = &talks[prng.below(8) as usize];
                        let begin = from[..from.len().min(prng.below(120) as usize + 1)].to_vec();
                        talks[talk] = (prng.below(3), begin);
                    }
                    let (owner, tokens) = &mut talks[talk];
                    let more = 1 + prng.below(40) as usize;
                    tokens.extend(text(more, prng.below(3)));
                    let (owner, prompt) = (*owner, tokens.clone());
                    let (slot, reused) = all.slots.take(&prompt, owner).unwrap();
                    assert!(reused < prompt.len() && all.slots.caches[slot].len == reused);
                    all.check((slot, owner), &prompt);
                    (reused_tokens, most) = (reused_tokens + reused, most.max(reused));
                    while all.slots.caches[slot].len < prompt.len() {
                        let done = all.slots.caches[slot].len;
                        let end = prompt.len().min(done + 1 + prng.below(60) as usize);
                        all.run((slot, owner), &prompt, end, prng.below(4) == 0);
                        if prng.below(2) == 0 || end == prompt.len() {
                            all.slots.checkpoint(slot);
                        }
                    }
                    busy.push((slot, talk));
                }
                6..=9 if !busy.is_empty() => {
                    let (slot, talk) = busy.swap_remove(prng.below(busy.len() as u64) as usize);
                    let (owner, tokens) = &mut talks[talk];
                    let begin = tokens.len();
                    tokens.extend(text(prng.below(20) as usize, 5));
                    let (owner, answer) = (*owner, tokens.clone());
                    (begin + 1..=answer.len()).for_each(|end| all.run((slot, owner), &answer, end, false));
                    all.slots.give_back(slot);
                }
                10 if !busy.is_empty() => {
                    let (slot, _) = busy.swap_remove(prng.below(busy.len() as u64) as usize);
                    all.slots.lose(slot);
                }
                11 if prng.below(20) == 0 => {
                    all.slots.forget();
                    all.epoch += 1;
                    all.ran.clear();
                    assert_eq!(all.slots.prompts.counts().bytes, 0);
                }
                _ => {}
            }
            all.slots.assert_invariants();
        }
        let counts = all.slots.prompts.counts();
        assert!(counts.restored_tokens > 1000 && counts.evicted > 20, "{name}: {counts:?}");
        assert!(reused_tokens > 10_000 && most > 100, "{name}: {reused_tokens}, {most}");
    }
}

#[test]
fn without_reuse_nothing_is_kept() {
    let mut all = Marked::new("lfm2", 1, 300, false, 1 << 30);
    for seed in [1, 2, 1, 1] {
        let prompt = text(200, seed);
        let (slot, reused) = all.slots.take(&prompt, 0).unwrap();
        assert_eq!(reused, 0);
        all.run((slot, 0), &prompt, 200, false);
        all.slots.checkpoint(slot);
        all.slots.give_back(slot);
    }
    let counts = all.slots.prompts.counts();
    assert_eq!((counts.bytes, counts.budget, counts.saved), (0, 0, 0));
}

/// In one slot, a talk whose place another has taken goes on where it was, and an owner's talk is not another's.
#[test]
fn a_displaced_talk_goes_on_where_it_was() {
    for name in ["mistral", "gemma3", "lfm2", "qwen35"] {
        let mut all = Marked::new(name, 1, 500, true, 1 << 24);
        let mut turn = |owner: u64, prompt: &[u32]| {
            let (slot, reused) = all.slots.take(prompt, owner).unwrap();
            all.check((slot, owner), prompt);
            all.run((slot, owner), prompt, prompt.len(), false);
            all.slots.checkpoint(slot);
            all.slots.give_back(slot);
            reused
        };
        // They have most of their beginning in common, as prompts of one program have.
        let [mut a, mut b] = [text(200, 1), text(200, 1)];
        a.extend(text(100, 2));
        b.extend(text(100, 3));
        assert_eq!(turn(0, &a), 0);
        turn(0, &b);
        a.extend(text(50, 4));
        assert_eq!(turn(0, &a), 300, "{name}");
        b.extend(text(50, 5));
        assert_eq!(turn(0, &b), 300, "{name}");
        a.extend(text(50, 6));
        assert_eq!(turn(1, &a), 0, "{name}");
        assert_eq!(turn(0, &a), 350, "{name}");
        a.extend(text(20, 7));
        assert_eq!(turn(1, &a), 400, "{name}");
    }
}

/// States at the ends of messages and after every so many tokens of a long prompt: a prompt that parts from it there goes on from there.
#[test]
fn kept_states_cover_a_long_prompt() {
    const END: u32 = 200;
    const EVERY: usize = 4096;
    const LEN: usize = 20_000;
    for (name, bytes) in [("lfm2", 1 << 28), ("qwen35", 1 << 28), ("qwen35", 0)] {
        let mut all = Marked::new(name, 1, LEN + 100, true, bytes);
        let mut prompt = text(LEN, 1);
        [13_000, 19_990].into_iter().for_each(|end| prompt[end - 1] = END);
        let marks = prompt_policy::marks(&prompt, |token| token == END);
        assert_eq!(marks, [Some(13_000), Some(19_990)]);
        let (slot, _) = all.slots.take(&prompt, 0).unwrap();
        let mut kept = Vec::new();
        while all.slots.caches[slot].len < LEN {
            let end = prompt_policy::next_end(all.slots.caches[slot].len, 512, LEN, marks, EVERY);
            all.run((slot, 0), &prompt, end, false);
            if prompt_policy::is_kept(end, LEN, marks, EVERY) {
                all.slots.checkpoint(slot);
                kept.push(end);
            }
        }
        all.slots.give_back(slot);
        assert_eq!(kept, [4096, 8192, 12_288, 13_000, 16_384, 19_990, LEN]);
        let mut found = 0;
        for &end in kept.iter().rev() {
            let mut other = prompt[..end].to_vec();
            other.extend(text(40, 2));
            let (slot, reused) = all.slots.take(&other, 0).unwrap();
            all.check((slot, 0), &other);
            found += usize::from(reused == end);
            all.slots.give_back(slot);
        }
        assert_eq!(found, if bytes > 0 { kept.len() } else { 4 }, "{name} within {bytes}");
    }
}

/// A file that is cut, damaged in any section or of another kind is refused, and one that is whole is the text that was saved.
#[test]
fn a_saved_file_is_whole_or_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.prompt");
    for name in ["gemma3", "gemma4-e2b", "qwen35"] {
        let mut engine = engine(opened(dir.path(), name, Quant::F32));
        let saved = read(&mut engine, KvType::F16).save(usize::MAX).unwrap();
        let key = Key { fingerprint: "f".repeat(32), variant: "v".into(), owner: u64::MAX - 5 };
        saved_file::write(&path, &saved, &key, &text(100, 1)).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let (of, again) = saved_file::read(&path).unwrap().unwrap();
        assert_eq!((&of.key, &of.tokens, of.bytes), (&key, &text(100, 1), path.metadata().unwrap().len()));
        assert_eq!(again.bytes(), saved.bytes());
        for len in 0..=120 {
            assert_eq!([of.reach(len), again.reach(len)], [saved.reach(len); 2], "{name} at {len}");
        }
        let logits = [&saved, &again].map(|saved| {
            let mut kv = cache(&engine, CONTEXT, KvType::F16);
            kv.restore(saved, 100);
            goes_on(&mut engine, &mut kv, 3)
        });
        assert!(logits[0] == logits[1], "{name}");

        let whole = std::fs::read(&path).unwrap();
        let file = prompt_file::open(&path).unwrap();
        let sections = file.header.sections.clone();
        let header = sections.iter().map(|section| section.offset + section.bytes).max().unwrap() as usize;
        drop(file);
        let is_refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            saved_file::read(&path).is_err()
        };
        let cuts = (0..70).chain((70..whole.len()).step_by(409)).chain(whole.len() - 20..whole.len());
        cuts.for_each(|cut| assert!(is_refused(&whole[..cut]), "{name} cut to {cut}"));
        let flipped = |at: usize| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            bytes
        };
        let middle = sections.iter().map(|section| (section.offset + section.bytes / 2) as usize);
        let places = middle.chain(0..12).chain(16..48).chain((header..whole.len()).step_by(7));
        places.for_each(|at| assert!(is_refused(&flipped(at)), "{name}, bit in byte {at}"));
        let store = std::fs::read(crate::support::packed(dir.path(), "llama", Quant::F32)).unwrap();
        assert!(is_refused(&store) && is_refused(b"PROMPTS\0") && is_refused(&[0; 4096]));
    }
}
