//! Prompts with one int8 step for a whole input (W8A8), and shadow outliers beside them (mllm-NPU 3.3): steps are chosen on some texts, and
//! what each way loses is measured on others. On a processor whose products have a step for each 32 numbers anyway this gains no time; it
//! shows what an integer unit without them would lose.

use super::evaluate::negative_log_likelihood;
use crate::clock;
use crate::cpu::Prefill;
use crate::cpu::shadow::{Magnitudes, Scale};
use crate::engine::inputs::{Input, OfLayer};
use crate::engine::session::CHUNK;
use crate::engine::{Engine, Logits};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::{KvCache, KvType};
use serde::Serialize;

/// What is chosen, and how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Share of an input's numbers that lie beyond its step; 0.003 is what the paper finds of channels.
    pub beyond: f64,
    /// Share of the layers, the least important ones, whose outliers are lost and not computed.
    pub pruned: f64,
    /// Prompts of [`CHUNK`] tokens to choose by; as many more are measured.
    pub prompts: usize,
}

/// One way to compute prompts, measured.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which way.
    pub name: &'static str,
    /// Root of the squared differences from the exact logits, by that of the squared exact logits.
    pub error: f64,
    /// Perplexity of the prompts' own tokens.
    pub perplexity: f64,
    /// Perplexity beside that of exact prompts, percent more.
    pub worse_percent: f64,
    /// Time of a prompt, ms, without the logits of all of its tokens.
    pub ms: f64,
    /// Numbers beyond the step that were computed in f32, by all numbers of inputs; `None` where nothing is.
    pub extracted_share: Option<f64>,
}

/// The ways side by side, and how important each layer's outliers are: its largest number by what its step holds.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// One for each way.
    pub rows: Vec<Row>,
    /// `[layers]`
    pub importance: Vec<f64>,
}

/// Chooses steps on the first prompts of `tokens` and measures all ways on those that follow. `step(done, all)` reports prompts.
///
/// # Errors
/// [`Error::Usage`] for too few tokens or a mixture of experts; [`Error::Memory`]; [`Error::Interrupted`] after Ctrl-C.
pub fn compare(
    engine: &mut Engine,
    tokens: &[u32],
    options: Options,
    step: impl Fn(usize, usize),
) -> Result<Comparison> {
    let Options { beyond, pruned, prompts } = options;
    let needed = 2 * prompts * CHUNK;
    if tokens.len() < needed || prompts == 0 {
        let have = tokens.len();
        return Err(Error::Usage(format!("{needed} tokens of text are needed, and there are {have}; add more texts")));
    }
    if engine.model.config.is_mixture() {
        return Err(Error::Usage("inputs of experts have no fixed steps: take a dense model".into()));
    }
    let (first, second) = tokens[..needed].split_at(needed / 2);
    let (mut done, all) = (0, 7 * prompts);
    let mut told = || {
        done += 1;
        step(done, all);
    };
    let before = engine.kernels.prefill;
    engine.kernels.prefill = Prefill::Exact;
    engine.look_at_inputs();
    first.chunks(CHUNK).try_for_each(|prompt| {
        told();
        run(engine, prompt, Logits::None).map(|_| ())
    })?;
    let seen = engine.inputs_seen();
    let importance: Vec<f64> = seen.iter().map(|layer| importance(layer, beyond)).collect();
    let kept = most_important(&importance, pruned);
    let scales = |share: f64, extracts: &dyn Fn(usize) -> bool| -> Vec<OfLayer<Scale>> {
        let of = |l: usize, seen: &Magnitudes| Scale { step: step_of(seen, share), extracts: extracts(l) };
        seen.iter().enumerate().map(|(l, layer)| layer.each_ref().map(|seen| of(l, seen))).collect()
    };
    let per_tensor = Prefill::Int8PerTensor;
    let ways = [
        ("exact", Prefill::Exact, Vec::new()),
        ("per 32 numbers", Prefill::Int8, Vec::new()),
        ("per tensor, the largest of the texts", per_tensor, scales(0.0, &|_| false)),
        ("per tensor, outliers lost", per_tensor, scales(beyond, &|_| false)),
        ("per tensor, outliers beside", per_tensor, scales(beyond, &|_| true)),
        ("the same, unimportant layers pruned", per_tensor, scales(beyond, &|l| kept[l])),
    ];
    let (mut exact, mut rows) = (Vec::new(), Vec::<Row>::new());
    for (name, prefill, scales) in ways {
        engine.kernels.prefill = prefill;
        engine.set_scales(scales);
        let row = measure(engine, name, second, &mut exact, rows.first(), &mut told);
        engine.set_scales(Vec::new());
        rows.push(row.inspect_err(|_| engine.kernels.prefill = before)?);
    }
    engine.kernels.prefill = before;
    Ok(Comparison { rows, importance })
}

/// The step that holds all but a share of what was seen; where nothing but zeros was, any.
fn step_of(seen: &Magnitudes, share: f64) -> f32 {
    let step = seen.all_but(share) / 127.0;
    if step > 0.0 { step } else { 1.0 }
}

fn importance(layer: &OfLayer<Magnitudes>, beyond: f64) -> f64 {
    let of = |input: Input| {
        let seen = &layer[input as usize];
        f64::from(seen.top) / f64::from(127.0 * step_of(seen, beyond))
    };
    Input::ALL.into_iter().map(of).fold(0.0, f64::max)
}

/// Which layers' outliers are computed: all but a share, those of the least importance.
fn most_important(importance: &[f64], pruned: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..importance.len()).collect();
    order.sort_by(|&a, &b| importance[b].total_cmp(&importance[a]).then(a.cmp(&b)));
    let keep = ((1.0 - pruned) * importance.len() as f64).round() as usize;
    let mut kept = vec![false; importance.len()];
    order.into_iter().take(keep).for_each(|l| kept[l] = true);
    kept
}

/// Runs a prompt by itself.
fn run<'e>(engine: &'e mut Engine, prompt: &[u32], want: Logits) -> Result<&'e mut [f32]> {
    interrupt::check()?;
    let mut kv = KvCache::new(&engine.model.config, prompt.len(), KvType::F32)?;
    engine.forward(&mut kv, prompt, want);
    engine.answer()
}

/// Measures one way. The first fills `exact` with its logits.
fn measure(
    engine: &mut Engine,
    name: &'static str,
    tokens: &[u32],
    exact: &mut Vec<Vec<f32>>,
    beside: Option<&Row>,
    told: &mut impl FnMut(),
) -> Result<Row> {
    let vocab = engine.model.config.vocab;
    let (mut off, mut size, mut nll, mut scored, mut ns) = (0f64, 0f64, 0f64, 0usize, 0u64);
    engine.extracted();
    for (i, prompt) in tokens.chunks(CHUNK).enumerate() {
        told();
        let start = clock::now();
        run(engine, prompt, Logits::None)?;
        ns += start.elapsed().as_nanos() as u64;
        let logits = run(engine, prompt, Logits::All)?;
        if exact.len() == i {
            exact.push(logits.to_vec());
        }
        for (a, b) in logits.iter().zip(&exact[i]) {
            off += f64::from(a - b).powi(2);
            size += f64::from(*b).powi(2);
        }
        for (row, &next) in logits.chunks_exact(vocab).zip(&prompt[1..]) {
            nll += negative_log_likelihood(row, next);
            scored += 1;
        }
    }
    let [beyond, all] = engine.extracted();
    let perplexity = (nll / scored as f64).exp();
    Ok(Row {
        name,
        error: (off / size).sqrt(),
        perplexity,
        worse_percent: 100.0 * (perplexity / beside.map_or(perplexity, |exact| exact.perplexity) - 1.0),
        ms: ns as f64 / 1e6 / (tokens.len() / CHUNK) as f64,
        extracted_share: (beyond > 0).then(|| beyond as f64 / all as f64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_with_the_largest_numbers_keep_their_outliers() {
        let importance = [9.0, 2.0, 3.0, 2.0, 1.0, 2.5, 8.0];
        assert_eq!(most_important(&importance, 0.85), [true, false, false, false, false, false, false]);
        assert_eq!(most_important(&importance, 0.6), [true, false, true, false, false, false, true]);
        assert_eq!(most_important(&importance, 0.0), [true; 7]);
        assert_eq!(most_important(&importance, 1.0), [false; 7]);
    }
}
