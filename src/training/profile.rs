//! Runs a model densely over texts and counts which neurons are active. When interrupted it keeps what was counted in a file
//! beside the profile, and a later run of the same request continues from there.

use crate::clock::{self, Duration};
use crate::engine::{Engine, Logits, Observer, Seen, SeenAttention, SeenExperts, Session};
use crate::error::{Error, Result, printable};
use crate::formats::profile_file::{self, BINS, Header, MAX_TEXTS, TextInfo};
use crate::model::{Activation, KvType, Model};
use crate::profile::{Accumulator, Extras, Profile, Reader, empty_text, magnitude};
use crate::tokenizer::{Special, Tokenizer};
use std::path::Path;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Tokens per forward pass: gates and activations of all neurons are held at once.
const CHUNK: usize = 128;
/// Tokens on which the activation thresholds of a model without exact zeros are found: with some thousand neurons a layer, tens of millions
/// of magnitudes.
const CALIBRATION: usize = 8192;
/// Time between two saves: the work that is lost at most if the machine goes down.
const SAVE_EVERY: Duration = Duration::from_secs(20);

/// A text to be counted.
pub struct Input {
    /// Name, checksum and length of the text; `tokens` in it is 0 until it is counted.
    pub info: TextInfo,
    /// The tokens to count, `info.wanted` of them.
    pub tokens: Vec<u32>,
}

impl Input {
    /// The first `most` tokens of `text`, to be counted in windows of `window` tokens.
    ///
    /// # Errors
    /// [`Error::Usage`] where the text has no tokens.
    pub fn new(name: &str, text: &str, tokenizer: &Tokenizer, most: usize, window: usize) -> Result<Input> {
        let mut tokens = tokenizer.encode_prompt(text, Special::AsText)?;
        tokens.truncate(most);
        // Some models put a token before every text, so an empty text has one, too.
        if tokens.is_empty() || text.is_empty() {
            return Err(Error::Usage(format!("{} holds no tokens to count", printable(name))));
        }
        let checksum = checksum(text);
        Ok(Input { info: TextInfo { name: name.into(), checksum, tokens: 0, wanted: tokens.len(), window }, tokens })
    }
}

/// xxh3-64 of the text in hex, by which texts are told apart.
pub fn checksum(text: &str) -> String {
    format!("{:016x}", xxh3_64(text.as_bytes()))
}

/// What to count.
pub struct Request {
    /// Texts to count, 1 to [`MAX_TEXTS`].
    pub texts: Vec<Input>,
    /// Tokens per window; each window begins with an empty context.
    pub window: usize,
    /// Type in which keys and values are stored.
    pub kv: KvType,
    /// For models without exact zeros: the share of neurons, 0 to 1, that the activation thresholds are to leave inactive.
    pub sparsity: f32,
    /// Activation thresholds to use, `[layers]`, because the profile is to be merged into one that has them; `None` finds them.
    pub activation_thresholds: Option<Vec<f32>>,
}

impl Request {
    /// A hash of everything that the counts depend on.
    fn key(&self, model: &Model) -> String {
        let texts: Vec<_> = self.texts.iter().map(|t| (&t.info.checksum, t.info.wanted)).collect();
        let all = serde_json::json!([
            model.fingerprint(),
            model.quant.name(),
            self.kv,
            self.window,
            self.sparsity,
            self.activation_thresholds,
            texts
        ]);
        format!("{:032x}", xxh3_128(all.to_string().as_bytes()))
    }

    fn header(&self, model: &Model) -> Header {
        let sparsity = (!model.config.has_zeros()).then_some(self.sparsity);
        let thresholds = self.activation_thresholds.clone().unwrap_or_else(|| vec![0.0; model.config.layers().len()]);
        Header { sparsity, activation_thresholds: thresholds, request: Some(self.key(model)), ..header(model, self.kv) }
    }
}

/// The header of a finished profile without activation thresholds.
fn header(model: &Model, kv: KvType) -> Header {
    let c = &model.config;
    let made = serde_json::json!({
        "program": concat!("dynamicinfer ", env!("CARGO_PKG_VERSION")),
        "weights": model.quant.name(),
        "kv": kv,
    });
    Header {
        fingerprint: model.fingerprint().to_owned(),
        model: c.name.clone(),
        layers: c.layers().len(),
        hidden: c.hidden,
        ffn: c.clusters(),
        sparsity: None,
        activation_thresholds: vec![0.0; c.layers().len()],
        texts: Vec::new(),
        request: None,
        made,
        sections: Vec::new(),
    }
}

/// Opens the file `partial` that an interrupted run of the same request left.
///
/// # Errors
/// [`Error::BadFile`] for a file that cannot be read, [`Error::Usage`] for one that another request left.
pub fn unfinished(partial: &Path, request: &Request, model: &Model) -> Result<Profile> {
    let profile = Profile::read(&profile_file::open_unfinished(partial)?)?;
    let (h, c) = (&profile.header, &model.config);
    let shape = (h.layers, h.hidden, h.ffn) == (c.layers().len(), c.hidden, c.clusters());
    let last = profile.texts.len() - 1;
    let stands = profile.texts.iter().zip(&request.texts).enumerate().all(|(i, (t, wanted))| {
        let (t, wanted) = (&t.info, &wanted.info);
        let whole = t.tokens == t.wanted || (i == last && t.tokens.is_multiple_of(request.window));
        (t.wanted, &t.checksum) == (wanted.wanted, &wanted.checksum) && whole
    });
    if h.request != Some(request.key(model)) || !shape || !stands || last >= request.texts.len() {
        return Err(Error::Usage(format!("{} is of another model, other texts or options", partial.display())));
    }
    Ok(profile)
}

/// Counts the texts of `request`, continuing `begun` if there is one. `step(done, total)` reports tokens; an error it returns (Ctrl-C) ends
/// the work after what was counted has been written to `partial`.
///
/// # Errors
/// Those of `step`; [`Error::Usage`] for no texts, too many, or a token outside the vocabulary; [`Error::Failed`] where the model computes
/// values that are not numbers; [`Error::Io`] where `partial` cannot be written.
pub fn profile(
    engine: &mut Engine,
    request: &Request,
    begun: Option<Profile>,
    partial: &Path,
    mut step: impl FnMut(usize, usize) -> Result<()>,
) -> Result<Profile> {
    let vocab = engine.model.config.vocab;
    if request.texts.is_empty() || request.texts.len() > MAX_TEXTS {
        return Err(Error::Usage(format!("{} texts: take 1 to {MAX_TEXTS}", request.texts.len())));
    }
    if let Some(bad) = request.texts.iter().flat_map(|t| &t.tokens).find(|&&t| t as usize >= vocab) {
        return Err(Error::Usage(format!("token {bad} is not below the vocabulary size {vocab}")));
    }
    let all: usize = request.texts.iter().map(|t| t.tokens.len()).sum();
    let mut session = Session::new(engine, request.window, request.kv)?;
    let mut profile = match begun {
        Some(profile) => profile,
        None => {
            let mut header = request.header(&engine.model);
            if header.sparsity.is_some() && request.activation_thresholds.is_none() {
                header.activation_thresholds = calibrate(engine, &mut session, request, || step(0, all))?;
            }
            Profile { header, texts: Vec::new() }
        }
    };
    let extras = extras(&engine.model);
    let mut accumulator = Accumulator::new(&profile.header, engine.model.config.activation, extras);
    let mut done: usize = profile.texts.iter().map(|t| t.info.tokens).sum();
    let mut saved = clock::now();
    for (i, input) in request.texts.iter().enumerate() {
        if i == profile.texts.len() {
            profile.texts.push(empty_text(input.info.clone(), &profile.header, extras));
        }
        for window in input.tokens[profile.texts[i].info.tokens..].chunks(request.window) {
            let mut counted = 0;
            let mut ended = count(engine, &mut session, window, &mut accumulator, |n| {
                counted += n;
                step(done + counted, all)
            });
            // After Ctrl-C in a window's last chunk the window is complete and counts.
            if counted == window.len() {
                let orders: Vec<_> = engine.model.layers.iter().map(|l| &l.order).collect();
                accumulator.end_window(&mut profile.texts[i], window.len(), &orders).map_err(|why| {
                    let text = printable(&input.info.name);
                    Error::Failed(format!("{why}, at token {} of {text}: the model is damaged", done + window.len()))
                })?;
                done += window.len();
            }
            if saved.elapsed() > SAVE_EVERY || ended.is_err() {
                // A failed save is worse news than Ctrl-C, so it replaces that error.
                if let Err(error) = profile.write(partial) {
                    ended = Err(error);
                }
                saved = clock::now();
            }
            ended?;
        }
    }
    profile.header.request = None;
    profile.header.texts = profile.texts.iter().map(|t| t.info.clone()).collect();
    Ok(profile)
}

/// What a profile of this model has besides what every profile has. For a mixture it records which neurons of its experts are active, if they
/// have zeros, and not how large the inputs of its matrices are.
pub fn extras(model: &Model) -> Extras {
    let c = &model.config;
    let inside = c.is_routed() && c.activation.is_sparse();
    Extras { q_dim: (!c.is_mixture()).then(|| c.most_of_mixers(|m| m.cols())), inside: inside.then(|| c.widest_ffn()) }
}

/// Whether a text that was counted lacks some of these.
pub fn lacks(text: &profile_file::Text, extras: Extras) -> bool {
    text.inputs.is_none() && extras.q_dim.is_some() || text.inside.is_none() && extras.inside.is_some()
}

/// Runs a window from its beginning. `step(n)` is called after each chunk of n tokens.
fn count(
    engine: &mut Engine,
    session: &mut Session,
    window: &[u32],
    accumulator: &mut Accumulator,
    mut step: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let activation = engine.model.config.activation;
    accumulator.begin_window();
    session.rewind(0);
    for chunk in window.chunks(CHUNK) {
        session.check(engine, chunk)?;
        engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut Counting { accumulator, activation });
        step(chunk.len())?;
    }
    Ok(())
}

/// Texts one after the other, from which windows are taken.
#[derive(Clone, Debug, Default)]
pub struct JoinedTexts {
    /// The tokens of all texts.
    pub tokens: Vec<u32>,
    /// Name and checksum of each text, and the index of its first token.
    texts: Vec<(String, String, usize)>,
}

impl JoinedTexts {
    /// Adds a text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_prompt`].
    pub fn add(&mut self, name: &str, text: &str, tokenizer: &Tokenizer) -> Result<()> {
        let (checksum, first) = (checksum(text), self.tokens.len());
        // What is named twice, or is one too many, counts as a part of the text before it.
        if self.texts.len() < MAX_TEXTS && self.texts.iter().all(|(_, other, _)| *other != checksum) {
            self.texts.push((name.into(), checksum, first));
        }
        self.tokens.extend(tokenizer.encode_prompt(text, Special::AsText)?);
        Ok(())
    }

    /// The names of the texts.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(|(name, ..)| &name[..])
    }
}

/// Counts a profile while a model with zeros runs over windows of texts for another reason.
pub struct ProfileCounter {
    profile: Profile,
    accumulator: Accumulator,
    activation: Activation,
    /// The first token of each text.
    firsts: Vec<usize>,
}

impl ProfileCounter {
    /// An empty profile of these texts, to be counted in windows of at most `window` tokens; `None` for a model without zeros, whose activation
    /// thresholds have to be found first.
    pub fn new(model: &Model, texts: &JoinedTexts, window: usize, kv: KvType) -> Option<ProfileCounter> {
        if !model.config.has_zeros() {
            return None;
        }
        let (header, extras) = (header(model, kv), extras(model));
        let info = |(name, checksum, _): &(String, String, usize)| TextInfo {
            name: name.clone(),
            checksum: checksum.clone(),
            tokens: 0,
            wanted: 0,
            window,
        };
        let firsts = texts.texts.iter().map(|(.., first)| *first).collect();
        let texts = texts.texts.iter().map(|text| empty_text(info(text), &header, extras)).collect();
        let accumulator = Accumulator::new(&header, model.config.activation, extras);
        let (profile, activation) = (Profile { header, texts }, model.config.activation);
        Some(ProfileCounter { profile, accumulator, activation, firsts })
    }

    /// A window begins.
    pub fn begin_window(&mut self) {
        self.accumulator.begin_window();
    }

    /// What is to see the passes of a window.
    pub fn observer(&mut self) -> impl Observer {
        Counting { accumulator: &mut self.accumulator, activation: self.activation }
    }

    /// A window of `tokens` tokens is complete, which begins with token `first` of all texts: it belongs to the text of that token.
    ///
    /// # Errors
    /// [`Error::Failed`] where the model computes values that are not numbers.
    pub fn end_window(&mut self, model: &Model, first: usize, tokens: usize) -> Result<()> {
        let text = self.firsts.partition_point(|&begin| begin <= first) - 1;
        let orders: Vec<_> = model.layers.iter().map(|layer| &layer.order).collect();
        let ended = self.accumulator.end_window(&mut self.profile.texts[text], tokens, &orders);
        ended.map_err(|why| Error::Failed(format!("{why}, in the window from token {first} on: the model is damaged")))
    }

    /// The profile of the texts in which a window began; `None` if there are none.
    pub fn finish(self) -> Option<Profile> {
        let Profile { mut header, mut texts } = self.profile;
        texts.retain(|text| text.info.tokens > 0);
        texts.iter_mut().for_each(|text| text.info.wanted = text.info.tokens);
        header.texts = texts.iter().map(|text| text.info.clone()).collect();
        (!texts.is_empty()).then_some(Profile { header, texts })
    }
}

struct Counting<'a> {
    accumulator: &'a mut Accumulator,
    activation: Activation,
}

impl Observer for Counting<'_> {
    fn attention(&mut self, seen: &SeenAttention<'_>) {
        let n = self.accumulator.tokens_of(seen.input);
        self.accumulator.inputs(seen.layer, Reader::Qkv, (n, seen.input));
        self.accumulator.inputs(seen.layer, Reader::Output, (n, seen.attended));
    }

    fn layer(&mut self, seen: &Seen<'_>) {
        self.accumulator.inputs(seen.layer, Reader::Ffn, (self.accumulator.tokens_of(seen.input), seen.input));
        self.accumulator.layer(seen.layer, seen.residual, seen.gates, seen.activations);
    }

    fn looks_inside(&self) -> bool {
        self.accumulator.looks_inside()
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        for (group, _, products) in seen.each() {
            let (gates, ups) = products.split_at(products.len() / 2);
            let active = gates.iter().zip(ups).map(|(gate, up)| seen.active(self.activation, *gate, *up));
            self.accumulator.inside(seen.layer, group.expert, active);
        }
    }
}

/// Finds the activation thresholds that leave the wanted share of neurons inactive. All texts weigh the same, in windows spread over each,
/// since the beginning of a book (its titles) is not typical.
fn calibrate(
    engine: &mut Engine,
    session: &mut Session,
    request: &Request,
    mut step: impl FnMut() -> Result<()>,
) -> Result<Vec<f32>> {
    let c = &engine.model.config;
    let mut magnitudes = Magnitudes { activation: c.activation, bins: vec![0; c.layers().len() * BINS] };
    let each = CALIBRATION.div_ceil(request.texts.len());
    for text in &request.texts {
        let all = text.tokens.len();
        let windows = each.min(all).div_ceil(request.window);
        for i in 0..windows {
            let window = &text.tokens[i * all / windows..(i + 1) * all / windows];
            let window = &window[..window.len().min(request.window).min(each)];
            session.rewind(0);
            for chunk in window.chunks(CHUNK) {
                step()?;
                session.check(engine, chunk)?;
                engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut magnitudes);
            }
        }
    }
    let activation_threshold = |bins: &[u64]| magnitude::threshold_for_sparsity(bins, request.sparsity as f64);
    Ok(magnitudes.bins.chunks_exact(BINS).map(activation_threshold).collect())
}

struct Magnitudes {
    activation: Activation,
    /// `[layers, BINS]`
    bins: Vec<u64>,
}

impl Observer for Magnitudes {
    fn layer(&mut self, seen: &Seen<'_>) {
        let bins = &mut self.bins[seen.layer * BINS..(seen.layer + 1) * BINS];
        for &gate in seen.gates {
            bins[magnitude::bin(self.activation.apply(gate).abs())] += 1;
        }
    }
}
