//! Synthetic traces of a mixture of experts: for every token and layer exactly K of E experts, with a stated reuse distance and skew.
//!
//! Each layer draws K experts without repetition, with weights that fall as a power of their rank (the skew) and, where `topics` says so,
//! of another rank in each text. An expert that was used of late has its weight raised, which shortens the time until it is used again,
//! or lowered, which makes it longer; how strong the pull must be is found by trials, so that the reuse distance of what is drawn is
//! the one that was asked for.
//!
//! There is no model: the prediction from the layer's own residual is the router itself and is exact, and that from layers before holds
//! each of the K with the stated recall and fills up with experts that are not needed.

use crate::error::{Error, Result};
use crate::formats::trace_file::{Header, TextInfo, TraceFile, TraceSection, TraceWriter};
use crate::lab::replay::active;
use crate::prng::Prng;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// [`ExpertTrace::memory`] unless it is said: about five tokens.
pub const MEMORY: f64 = 0.8;
/// Share of a layer's experts in the cache of [`Routing::lru`].
const CACHED: f64 = 0.4;
/// Strongest pull of the past that is tried.
const STRONGEST: f64 = 40.0;
/// A trial's layers and tokens, and how often the range of the pull is halved.
const TRIAL: (usize, usize) = (3, 300);
const HALVINGS: usize = 10;

/// What trace to make. A file of these settings is a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertTrace {
    /// Layers of the trace.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// How many of them a token uses.
    pub used: usize,
    /// Number of texts.
    pub texts: usize,
    /// Tokens of each text.
    pub tokens_per_text: usize,
    /// Tokens within which half of the uses come back: an expert of a layer is used again ([`Routing::reuse`]); `None` leaves it as it
    /// comes when each token draws by itself.
    pub reuse: Option<f64>,
    /// How uneven the experts are drawn: their weights fall with this power of their rank (Zipf); 0 is flat. Since a token draws each
    /// once at most, the frequencies fall a little less ([`Routing::skew`]).
    pub skew: f64,
    /// Share of the skew, 0 to 1, that belongs to each text and not to the model: at 1 nothing learnt from other texts holds.
    pub topics: f64,
    /// What is left a token later of how lately an expert was used, where that draws it back. Where it keeps it away it is remembered for as
    /// long as all experts take to be used once.
    pub memory: f64,
    /// Share of a token's experts that a prediction from layers before finds, 0 to 1.
    pub recall: f64,
    /// Number of layers between an early prediction and its layer.
    pub ahead: usize,
    /// Bytes of an expert, for a replay's times.
    pub block_bytes: usize,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for ExpertTrace {
    /// 16 layers of 64 experts, 8 used, half of the uses back within two tokens.
    fn default() -> ExpertTrace {
        ExpertTrace {
            layers: 16,
            experts: 64,
            used: 8,
            texts: 8,
            tokens_per_text: 150,
            reuse: Some(2.0),
            skew: 0.8,
            topics: 0.0,
            memory: MEMORY,
            recall: 0.85,
            ahead: 1,
            block_bytes: 3 << 20,
            seed: 1,
        }
    }
}

/// How the experts of a trace are used: means over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Routing {
    /// Tokens within which half of all uses come back within their text, between whole tokens as the straight line between them says;
    /// infinite where fewer than half do.
    pub reuse: f64,
    /// Minus the slope of log frequency over log rank, over all texts; each expert counts as often as it was used.
    pub skew: f64,
    /// The same within each text.
    pub skew_in_text: f64,
    /// Hits of a cache of 40 % of a layer's experts that loads every miss at once and gives up what was used longest ago, 0 to 1.
    pub lru: f64,
    /// Share of the experts that the prediction from layers before finds.
    pub recall: f64,
}

impl Routing {
    /// Measures a trace of a mixture.
    pub fn of(trace: &TraceFile) -> Routing {
        let h = trace.header();
        let (mut now, mut reuse, mut all, mut within) = (Vec::new(), Reuse::new(h.ffn), Vec::new(), Vec::new());
        let (mut found, mut wanted) = (0u64, 0u64);
        for layer in 0..h.layers {
            let (mut first, mut counts) = (0, vec![0u64; h.ffn]);
            for text in &h.texts {
                let mut of_text = vec![0u64; h.ffn];
                reuse.begin();
                for token in first..first + text.tokens {
                    active(trace.row(TraceSection::Active, layer, token), &mut now);
                    reuse.token(&now);
                    now.iter().for_each(|&e| of_text[e as usize] += 1);
                    if layer >= h.ahead {
                        let early = trace.row(TraceSection::Ahead, layer, token);
                        wanted += now.len() as u64;
                        found += now.iter().filter(|&&e| early[e as usize] >= 128).count() as u64;
                    }
                }
                counts.iter_mut().zip(&of_text).for_each(|(sum, n)| *sum += n);
                within.push(slope(&of_text));
                first += text.tokens;
            }
            all.push(slope(&counts));
        }
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len().max(1) as f64;
        let recall = found as f64 / wanted.max(1) as f64;
        let lru = reuse.hits as f64 / reuse.uses.max(1) as f64;
        Routing { reuse: reuse.median(), skew: mean(&all), skew_in_text: mean(&within), lru, recall }
    }
}

/// After how many tokens experts of a layer are used again.
pub(super) struct Reuse {
    last: Vec<Option<usize>>,
    token: usize,
    uses: u64,
    /// `after[d]`: uses that came back after d tokens.
    after: Vec<u64>,
    /// Experts in the cache, the one used last at the end, and how often one was there.
    cache: Vec<u32>,
    hits: u64,
}

impl Reuse {
    pub(super) fn new(experts: usize) -> Reuse {
        Reuse { last: vec![None; experts], token: 0, uses: 0, after: Vec::new(), cache: Vec::new(), hits: 0 }
    }

    /// A text or a layer begins.
    pub(super) fn begin(&mut self) {
        self.last.fill(None);
        self.token = 0;
    }

    pub(super) fn token(&mut self, used: &[u32]) {
        for &expert in used {
            self.uses += 1;
            self.cached(expert);
            if let Some(before) = self.last[expert as usize].replace(self.token) {
                let after = self.token - before;
                self.after.resize(self.after.len().max(after + 1), 0);
                self.after[after] += 1;
            }
        }
        self.token += 1;
    }

    /// A use of the cache, which is not emptied between texts.
    fn cached(&mut self, expert: u32) {
        match self.cache.iter().position(|&e| e == expert) {
            Some(at) => {
                self.hits += 1;
                self.cache.remove(at);
            }
            None if self.cache.len() as f64 >= CACHED * self.last.len() as f64 => drop(self.cache.remove(0)),
            None => {}
        }
        self.cache.push(expert);
    }

    pub(super) fn median(&self) -> f64 {
        let half = self.uses as f64 / 2.0;
        let mut back = 0.0;
        for (after, &n) in self.after.iter().enumerate().skip(1) {
            if back + n as f64 >= half {
                return (after - 1) as f64 + (half - back) / n as f64;
            }
            back += n as f64;
        }
        f64::INFINITY
    }
}

/// Minus the slope of log count over log rank, each rank weighted by its count.
pub(super) fn slope(counts: &[u64]) -> f64 {
    let mut falling: Vec<f64> = counts.iter().filter(|&&n| n > 0).map(|&n| n as f64).collect();
    falling.sort_by(|a, b| b.total_cmp(a));
    let (mut w, mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (rank, &n) in falling.iter().enumerate() {
        let (a, b) = ((rank as f64 + 1.0).ln(), n.ln());
        (w, x, y, xx, xy) = (w + n, x + n * a, y + n * b, xx + n * a * a, xy + n * a * b);
    }
    let spread = w * xx - x * x;
    if spread > 0.0 { -(w * xy - x * y) / spread } else { 0.0 }
}

/// Draws the experts of one layer, token by token.
struct Router<'a> {
    shape: &'a ExpertTrace,
    /// How much a use raises the log weight of later ones, or lowers it.
    pull: f64,
    /// Log weight of each expert, without the past.
    weight: Vec<f64>,
    /// How lately each was used.
    recent: Vec<f64>,
    /// Log weights with luck, and experts, of the token.
    drawn: Vec<(f64, u32)>,
}

impl Router<'_> {
    fn new(shape: &ExpertTrace, pull: f64) -> Router<'_> {
        let (weight, recent) = (vec![0.0; shape.experts], vec![0.0; shape.experts]);
        Router { shape, pull, weight, recent, drawn: Vec::new() }
    }

    /// A text begins. Its ranks are those of the model and of the text.
    fn begin(&mut self, [model, text]: [&[usize]; 2]) {
        let (log, topics) = (|rank: usize| (rank as f64 + 1.0).ln(), self.shape.topics);
        for ((weight, &model), &text) in self.weight.iter_mut().zip(model).zip(text) {
            *weight = -self.shape.skew * ((1.0 - topics) * log(model) + topics * log(text));
        }
        self.recent.fill(0.0);
    }

    /// The experts of the next token, in rising order: the largest of log weight and luck, which draws without repetition.
    fn token(&mut self, prng: &mut Prng, out: &mut Vec<u32>) {
        self.drawn.clear();
        for (expert, (weight, recent)) in self.weight.iter().zip(&self.recent).enumerate() {
            let luck = -(-(1.0 - prng.next_f64()).ln()).max(f64::MIN_POSITIVE).ln();
            self.drawn.push((weight + self.pull * recent + luck, expert as u32));
        }
        let used = self.shape.used;
        self.drawn.select_nth_unstable_by(used - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        out.clear();
        out.extend(self.drawn[..used].iter().map(|&(_, expert)| expert));
        out.sort_unstable();
        let kept = if self.pull < 0.0 { 1.0 - used as f64 / self.shape.experts as f64 } else { self.shape.memory };
        self.recent.iter_mut().for_each(|r| *r *= kept);
        out.iter().for_each(|&e| self.recent[e as usize] += 1.0 - kept);
    }
}

/// `0..n` in random order.
pub(super) fn shuffled(n: usize, prng: &mut Prng) -> Vec<usize> {
    let mut all: Vec<usize> = (0..n).collect();
    (1..n).rev().for_each(|i| all.swap(i, prng.below(i as u64 + 1) as usize));
    all
}

impl ExpertTrace {
    /// Bytes of the trace's file, but for its header.
    pub fn bytes(&self) -> u64 {
        self.header(None).token_bytes() * (self.texts * self.tokens_per_text) as u64
    }

    /// That there can be such a trace.
    ///
    /// # Errors
    /// [`Error::Usage`] naming what cannot be.
    pub fn check(&self) -> Result<()> {
        let bad = |why: String| Err(Error::Usage(why));
        if self.used == 0 || self.used >= self.experts || self.experts > 1 << 12 {
            return bad(format!(
                "{} of {} experts: take 1 or more, and fewer than all of at most 4096",
                self.used, self.experts
            ));
        }
        if self.layers == 0 || self.layers > 1 << 12 || self.ahead == 0 || self.ahead >= self.layers {
            return bad(format!(
                "{} layers, {} ahead: take 1 ahead or more, and fewer than there are layers",
                self.layers, self.ahead
            ));
        }
        if self.texts == 0 || self.tokens_per_text == 0 {
            return bad("a trace has one text of one token at least".into());
        }
        if 2 * self.used > self.experts || self.recall <= 0.5 {
            let why = "take one above 0.5, and no more than half of the experts for a token";
            return bad(format!("recall {}, {} of {} experts: {why}", self.recall, self.used, self.experts));
        }
        for (name, value, top) in [("skew", self.skew, 2.0), ("topics", self.topics, 1.0), ("recall", self.recall, 1.0)]
        {
            if !(0.0..=top).contains(&value) {
                return bad(format!("{name} {value}: take 0 to {top}"));
            }
        }
        match self.reuse.filter(|reuse| !(*reuse >= 0.5 && *reuse <= 1000.0)) {
            Some(reuse) => bad(format!("reuse {reuse}: take 0.5 to 1000 tokens")),
            None => Ok(()),
        }
    }

    fn header(&self, pull: Option<f64>) -> Header {
        let text = |i| TextInfo { name: format!("made-up {i}"), tokens: self.tokens_per_text };
        let mut made = serde_json::to_value(self).expect("plain data");
        if let Some(pull) = pull {
            made["pull"] = pull.into();
        }
        Header {
            fingerprint: String::new(),
            model: format!("made up, {} of {} experts", self.used, self.experts),
            layers: self.layers,
            ffn: self.experts,
            block_bytes: self.block_bytes,
            experts_used: Some(self.used),
            ahead: self.ahead,
            predictor: "router, made up".into(),
            own_bits: 8,
            ahead_bits: 8,
            thresholds: Vec::new(),
            texts: (0..self.texts).map(text).collect(),
            made,
            sections: Vec::new(),
        }
    }

    /// Reuse distance of a trial with this pull.
    fn trial(&self, pull: f64) -> f64 {
        let mut prng = Prng::new(self.seed ^ 0x7472_6961_6c73);
        let (mut reuse, mut now) = (Reuse::new(self.experts), Vec::new());
        let (layers, tokens) = TRIAL;
        for _ in 0..layers {
            let [model, text] = [(); 2].map(|()| shuffled(self.experts, &mut prng));
            let mut router = Router::new(self, pull);
            router.begin([&model, &text]);
            reuse.begin();
            for _ in 0..tokens {
                router.token(&mut prng, &mut now);
                reuse.token(&now);
            }
        }
        reuse.median()
    }

    /// The pull with which a trial's reuse distance comes nearest to what is asked for, by halving the range.
    fn pull(&self) -> f64 {
        let Some(reuse) = self.reuse else { return 0.0 };
        let (mut low, mut high) = (-STRONGEST, STRONGEST);
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            // The later they come back, the less they are pulled.
            *(if self.trial(middle) > reuse { &mut low } else { &mut high }) = middle;
        }
        (low + high) / 2.0
    }
}

/// Writes the trace to `path`. `step(done, all)` counts tokens.
///
/// # Errors
/// [`Error::Usage`] for a trace that cannot be; those of `step`; [`Error::Io`] where the file cannot be written.
pub fn write_experts(s: &ExpertTrace, path: &Path, mut step: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    s.check()?;
    let pull = s.pull();
    let header = s.header(Some(pull));
    let texts = header.texts.clone();
    let (all, words) = (header.tokens() as u64, header.words());
    let writer = TraceWriter::create(path, header)?;
    let mut prng = Prng::new(s.seed);
    let ranks: Vec<Vec<usize>> = (0..s.layers).map(|_| shuffled(s.experts, &mut prng)).collect();
    let mut routers: Vec<Router> = (0..s.layers).map(|_| Router::new(s, pull)).collect();
    let (mut bits, mut now, mut token) = (vec![0u32; words], Vec::new(), 0);
    let (mut own, mut early) = (vec![0u8; s.experts], Vec::new());
    for _ in 0..s.texts {
        for (router, ranks) in routers.iter_mut().zip(&ranks) {
            let of_text = shuffled(s.experts, &mut prng);
            router.begin([ranks, &of_text]);
        }
        for _ in 0..s.tokens_per_text {
            for (layer, router) in routers.iter_mut().enumerate() {
                router.token(&mut prng, &mut now);
                bits.fill(0);
                own.fill(0);
                for &expert in &now {
                    bits[expert as usize / 32] |= 1 << (expert % 32);
                    own[expert as usize] = 255;
                }
                writer.write(TraceSection::Active, layer, token, bytemuck::cast_slice(&bits))?;
                writer.write(TraceSection::Own, layer, token, &own)?;
                if layer >= s.ahead {
                    foresee(s, &now, &mut prng, &mut early);
                    writer.write(TraceSection::Ahead, layer, token, &early)?;
                }
            }
            token += 1;
            step(token as u64, all)?;
        }
    }
    writer.finish(texts)
}

/// Writes to `out` the probabilities, times 255, that a router gives which looks ahead: K experts with the recall, of which so many are
/// right, and the others with what is left.
fn foresee(s: &ExpertTrace, used: &[u32], prng: &mut Prng, out: &mut Vec<u8>) {
    let others = s.used as f64 * (1.0 - s.recall) / (s.experts - s.used) as f64;
    let (likely, unlikely) = ((255.0 * s.recall).round() as u8, (255.0 * others).round() as u8);
    out.clear();
    out.resize(s.experts, unlikely);
    let mut wrong = 0;
    for &expert in used {
        if prng.next_f64() < s.recall {
            out[expert as usize] = likely;
        } else {
            wrong += 1;
        }
    }
    while wrong > 0 {
        let expert = prng.below(s.experts as u64) as usize;
        if used.binary_search(&(expert as u32)).is_err() && out[expert] != likely {
            out[expert] = likely;
            wrong -= 1;
        }
    }
}
