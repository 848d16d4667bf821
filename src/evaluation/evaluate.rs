//! Quality of a model: the likelihood of a text, and multiple-choice questions.

use super::audit::{Agreement, Audit, Shares};
use crate::cpu::MAX_COLUMNS;
use crate::engine::{Engine, Logits, Session, Sparsity};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::KvType;
use crate::tokenizer::{Special, Tokenizer};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;

/// Tokens per forward pass of a dense model; all their logits are held at once.
const CHUNK: usize = 128;

/// Tokens per forward pass: one with a device, else as many as the FFNs take at a time.
fn chunk(engine: &Engine) -> usize {
    match (&engine.split, engine.sparsity()) {
        // Token by token, as in decoding: only so do neurons move and thresholds get balanced.
        (Some(_), _) => 1,
        (None, sparsity) if sparsity.is_dense() || sparsity.gates_chunks() => CHUNK,
        (None, _) => MAX_COLUMNS,
    }
}

/// Whether exact gates are applied to chunks of a prompt from now on: they leave out the same of many tokens as of one.
fn gate_chunks(engine: &mut Engine, yes: bool) {
    if engine.split.is_some() || engine.cached.is_some() {
        return;
    }
    let layers = engine.model.config.layers().len();
    let mut sparsity = engine.set_sparsity(Sparsity::dense(layers));
    sparsity.set_gates_chunks(yes);
    engine.set_sparsity(sparsity);
}

/// How likely a model finds a text: the result of [`likelihood`].
#[derive(Clone, Debug, Serialize)]
pub struct Likelihood {
    /// Mean negative log-likelihood, nats per scored token.
    pub nll: f64,
    /// exp(`nll`).
    pub perplexity: f64,
    /// Sum of the negative log-likelihoods in bits / bytes of the scored tokens; `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
    /// Scored tokens.
    pub tokens: usize,
    /// Windows that the text was cut into.
    pub windows: usize,
    /// Tokens of a window; the last may have fewer.
    pub context: usize,
    /// What a sparse run computed and how close it is to the dense model; `None` for a dense run.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub sparse: Option<SparseQuality>,
}

/// How good a sparse run is, compared with the true activations and with the dense model on the same tokens.
#[derive(Clone, Debug, Serialize)]
pub struct SparseQuality {
    /// Name of the predictor that chose the neurons (`Sparsity::name`).
    pub predictor: String,
    /// Computed and active shares, recall and precision over all layers.
    #[serde(flatten)]
    pub shares: Shares,
    /// Share of tokens whose likeliest next token is the dense model's.
    pub top1_agreement: f64,
    /// Mean KL(dense || sparse), nats per token.
    pub kl: f64,
    /// Perplexity of the dense model on the same tokens.
    pub dense_perplexity: f64,
    /// The same shares layer by layer, `[layers]`.
    pub layers: Vec<Shares>,
}

/// How a text is cut for [`likelihood`].
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Tokens of each window.
    pub context: usize,
    /// Tokens at the beginning of each that are read as a prompt and not scored, but for what follows the last; 0 scores every token but
    /// the first. What comes after a prompt is read by as many tokens as row kernels take, as in decoding.
    pub prompt: usize,
    /// How keys and values are stored.
    pub kv: KvType,
}

/// Scores `tokens` in windows that do not overlap. Without a `tokenizer` there are no bits per byte. Logits of every token, without those of
/// prompts but the last, are written to `logits_out` if given. `step(done, total)` reports tokens.
///
/// # Errors
/// [`Error::Usage`] for fewer than two tokens, a context below 2 or a token outside the vocabulary, and for prompts where neurons are left
/// out; [`Error::Memory`] where keys and values do not fit; [`Error::Io`] where logits cannot be written; [`Error::Interrupted`] after
/// Ctrl-C.
pub fn likelihood(
    engine: &mut Engine,
    tokens: &[u32],
    tokenizer: Option<&Tokenizer>,
    windows: Windows,
    logits_out: Option<&mut LogitsFile>,
    step: impl FnMut(usize, usize),
) -> Result<Likelihood> {
    gate_chunks(engine, true);
    let scored = scored(engine, tokens, tokenizer, windows, logits_out, step);
    gate_chunks(engine, false);
    scored
}

/// [`likelihood`], with the chunks that the engine's sparsity takes.
fn scored(
    engine: &mut Engine,
    tokens: &[u32],
    tokenizer: Option<&Tokenizer>,
    Windows { context, prompt, kv }: Windows,
    mut logits_out: Option<&mut LogitsFile>,
    mut step: impl FnMut(usize, usize),
) -> Result<Likelihood> {
    let vocab = engine.model.config.vocab;
    if let Some(bad) = tokens.iter().find(|&&t| t as usize >= vocab) {
        return Err(Error::Usage(format!("token {bad} is not below the vocabulary size {vocab}")));
    }
    if tokens.len() < 2 || context < 2 {
        return Err(Error::Usage(
            "scoring needs at least two tokens: the first of a window has nothing before it".into(),
        ));
    }
    if prompt > 0 && !engine.sparsity().is_dense() {
        return Err(Error::Usage("text after prompts is scored by the dense model: add --predictor dense".into()));
    }
    let mut session = Session::new(engine, context, kv)?;
    let mut beside = match engine.sparsity().is_dense() {
        true => None,
        false => Some(Beside::new(engine, context, kv)?),
    };
    let (mut sum, mut scored, mut bytes, mut windows, mut done) = (0f64, 0usize, 0usize, 0, 0);
    let size = if prompt > 0 { MAX_COLUMNS } else { chunk(engine) };
    for window in tokens.chunks(context) {
        session.rewind(0);
        if let Some(beside) = &mut beside {
            beside.session.rewind(0);
        }
        windows += 1;
        let (prompt, rest) = window.split_at(prompt.min(window.len()));
        let chunks = (!prompt.is_empty()).then_some(prompt).into_iter().chain(rest.chunks(size));
        let mut at = 0;
        for (i, chunk) in chunks.enumerate() {
            interrupt::check()?;
            session.check(engine, chunk)?;
            let is_prompt = i == 0 && !prompt.is_empty();
            let after = &window[at + if is_prompt { chunk.len() } else { 1 }..];
            at += chunk.len();
            match &mut beside {
                None if is_prompt => _ = session.append(engine, chunk, |_| interrupt::check())?,
                None => _ = engine.forward(&mut session.kv, chunk, Logits::All),
                Some(beside) => beside.forward(engine, &mut session, chunk, after)?,
            }
            let logits = engine.answer()?;
            if let Some(out) = &mut logits_out {
                out.write(logits)?;
            }
            for (row, &next) in logits.chunks_exact(vocab).zip(after) {
                sum += negative_log_likelihood(row, next);
                scored += 1;
                bytes += tokenizer.and_then(|t| t.token_bytes(next)).map_or(0, |b| b.len());
            }
            done += chunk.len();
            step(done, tokens.len());
        }
    }
    if scored == 0 {
        return Err(Error::Usage("no window had a second token to score".into()));
    }
    let nll = sum / scored as f64;
    let bits_per_byte = (bytes > 0).then(|| sum / std::f64::consts::LN_2 / bytes as f64);
    let sparse = beside.map(|beside| beside.quality(engine, scored));
    Ok(Likelihood { nll, perplexity: nll.exp(), bits_per_byte, tokens: scored, windows, context, sparse })
}

/// The dense run on the same tokens, and the audit of the sparse run.
struct Beside {
    session: Session,
    audit: Audit,
    agreement: Agreement,
    dense_nll: f64,
}

impl Beside {
    fn new(engine: &Engine, context: usize, kv: KvType) -> Result<Beside> {
        let audit = Audit::of(engine);
        let session = Session::new(engine, context, kv)?;
        Ok(Beside { session, audit, agreement: Agreement::default(), dense_nll: 0.0 })
    }

    /// Runs `tokens` densely and sparsely; the engine then has the sparse run's logits. `after` begins with the token after the first.
    fn forward(&mut self, engine: &mut Engine, session: &mut Session, tokens: &[u32], after: &[u32]) -> Result<()> {
        let c = &engine.model.config;
        let (vocab, layers) = (c.vocab, c.layers().len());
        // The dense run goes without the device, whose counters and scheduler are to see the sparse run only.
        let split = engine.split.take();
        let sparsity = engine.set_sparsity(Sparsity::dense(layers));
        let dense = engine.forward(&mut self.session.kv, tokens, Logits::All).to_vec();
        engine.split = split;
        engine.set_sparsity(sparsity);
        engine.forward_observed(&mut session.kv, tokens, Logits::All, &mut self.audit);
        let logits = engine.answer()?;
        for ((dense, sparse), &next) in dense.chunks_exact(vocab).zip(logits.chunks_exact(vocab)).zip(after) {
            self.agreement.add(dense, sparse);
            self.dense_nll += negative_log_likelihood(dense, next);
        }
        Ok(())
    }

    fn quality(&self, engine: &Engine, scored: usize) -> SparseQuality {
        let (shares, layers) = self.audit.shares();
        SparseQuality {
            predictor: engine.sparsity().name(),
            shares,
            top1_agreement: self.agreement.top1(),
            kl: self.agreement.kl(),
            dense_perplexity: (self.dense_nll / scored as f64).exp(),
            layers,
        }
    }
}

/// `-ln softmax(logits)[token]`, in f64.
pub fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&l| (l as f64 - top).exp()).sum();
    top + sum.ln() - logits[token as usize] as f64
}

/// A safetensors file with the logits of every token, `logits` of shape `[tokens, vocab]` in f32, written as they are computed.
pub struct LogitsFile {
    file: std::io::BufWriter<std::fs::File>,
    path: std::path::PathBuf,
    finished: bool,
}

impl LogitsFile {
    /// Creates the file and writes the header for logits of shape `[tokens, vocab]`.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be created or written.
    pub fn create(path: &Path, tokens: usize, vocab: usize) -> Result<LogitsFile> {
        let bytes = tokens as u64 * vocab as u64 * 4;
        let header = serde_json::json!({
            "logits": { "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, bytes] }
        });
        let mut header = header.to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = std::fs::File::create(path).map_err(Error::io("create", path))?;
        let mut file = std::io::BufWriter::new(file);
        let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        Ok(LogitsFile { file, path: path.to_owned(), finished: false })
    }

    fn write(&mut self, logits: &[f32]) -> Result<()> {
        self.file.write_all(bytemuck::cast_slice(logits)).map_err(Error::io("write", &self.path))
    }

    /// Writes what is still buffered and keeps the file; one that is dropped without this is removed.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be written.
    pub fn finish(mut self) -> Result<()> {
        self.finished = true;
        self.file.flush().map_err(Error::io("write", &self.path))
    }
}

impl Drop for LogitsFile {
    /// Removes the file of an evaluation that failed; a device file, such as /dev/null, stays.
    fn drop(&mut self) {
        if !self.finished && self.path.is_file() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A multiple-choice question: which of `choices` continues `context`?
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Text before the choices; may be empty.
    pub context: String,
    /// Possible continuations, at least two.
    pub choices: Vec<String>,
    /// Index of the right choice.
    pub answer: usize,
}

/// Accuracy over all questions: the result of [`choices`].
#[derive(Clone, Debug, Serialize)]
pub struct Choices {
    /// Number of questions.
    pub questions: usize,
    /// Share of the questions where the right choice had the largest log-likelihood.
    pub accuracy: f64,
    /// The same with log-likelihood per byte, which does not favour short choices.
    pub accuracy_per_byte: f64,
    /// Expected accuracy of guessing: the mean of 1 / choices.
    pub chance: f64,
}

/// Parses one JSON question per line; empty lines are skipped. `path` is named in errors.
///
/// # Errors
/// [`Error::Usage`] with the line that is not a question, or where there is none.
pub fn read_questions(text: &str, path: &Path) -> Result<Vec<Question>> {
    let mut questions = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let bad = |why: String| Error::Usage(format!("{} line {}: {why}", path.display(), i + 1));
        let question: Question =
            serde_json::from_str(line).map_err(|e| bad(format!("not a question {{context, choices, answer}}: {e}")))?;
        if question.choices.len() < 2 || question.answer >= question.choices.len() {
            return Err(bad(format!("answer {} of {} choices", question.answer, question.choices.len())));
        }
        questions.push(question);
    }
    if questions.is_empty() {
        return Err(Error::Usage(format!("{} holds no questions", path.display())));
    }
    Ok(questions)
}

/// Answers each question with the choice of the largest log-likelihood after its context. `context` is the room in tokens that each
/// question with a choice has to fit into; `step(done, total)` reports questions.
///
/// # Errors
/// [`Error::Usage`] for a question that does not fit, [`Error::Memory`] where keys and values do not, [`Error::Interrupted`] after Ctrl-C.
pub fn choices(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    questions: &[Question],
    context: usize,
    kv: KvType,
    mut step: impl FnMut(usize, usize),
) -> Result<Choices> {
    let mut session = Session::new(engine, context, kv)?;
    let (mut right, mut right_per_byte, mut chance) = (0, 0, 0.0);
    for (i, question) in questions.iter().enumerate() {
        let mut scores = Vec::new();
        let mut per_byte = Vec::new();
        for choice in &question.choices {
            interrupt::check()?;
            let score = continuation(engine, &mut session, tokenizer, &question.context, choice)?;
            scores.push(score);
            per_byte.push(score / choice.len().max(1) as f64);
        }
        right += usize::from(largest(&scores) == question.answer);
        right_per_byte += usize::from(largest(&per_byte) == question.answer);
        chance += 1.0 / question.choices.len() as f64;
        step(i + 1, questions.len());
    }
    let n = questions.len() as f64;
    Ok(Choices {
        questions: questions.len(),
        accuracy: right as f64 / n,
        accuracy_per_byte: right_per_byte as f64 / n,
        chance: chance / n,
    })
}

/// Log-likelihood of `choice` after `context`, with a space between them where neither has white space there. Both are tokenised together,
/// so that tokens at the border are those of running text.
fn continuation(
    engine: &mut Engine,
    session: &mut Session,
    tokenizer: &Tokenizer,
    context: &str,
    choice: &str,
) -> Result<f64> {
    let gap =
        !context.is_empty() && !context.ends_with(char::is_whitespace) && !choice.starts_with(char::is_whitespace);
    let text = format!("{context}{}{choice}", if gap { " " } else { "" });
    let bos = tokenizer.bos_if_added();
    let encode = |text: &str| -> Result<Vec<u32>> {
        Ok(bos.into_iter().chain(tokenizer.encode(text, Special::AsText)?).collect())
    };
    let (whole, before) = (encode(&text)?, encode(context)?);
    let shared = whole.iter().zip(&before).take_while(|(a, b)| a == b).count();
    // The first token has nothing before it, so it is never scored.
    let first = shared.clamp(1, whole.len().max(2) - 1);
    if whole.len() > session.kv.context {
        return Err(Error::Usage(format!(
            "a question of {} tokens does not fit the context of {}; raise it with -c",
            whole.len(),
            session.kv.context
        )));
    }
    if whole.len() < 2 {
        return Ok(0.0);
    }
    let vocab = engine.model.config.vocab;
    session.rewind(0);
    let mut position = 0;
    let mut sum = 0.0;
    for chunk in whole[..whole.len() - 1].chunks(chunk(engine)) {
        session.check(engine, chunk)?;
        engine.forward(&mut session.kv, chunk, Logits::All);
        let logits = engine.answer()?;
        for row in logits.chunks_exact(vocab) {
            position += 1;
            if position >= first {
                sum -= negative_log_likelihood(row, whole[position]);
            }
        }
    }
    Ok(sum)
}

fn largest(values: &[f64]) -> usize {
    (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b]).then(b.cmp(&a))).unwrap_or(0)
}
