//! Any bytes as a predictor file, as they are and put right, also as one of a small model: refused, or every table turns scores into
//! probabilities and every network computes.
#![no_main]

mod support;

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::Engine;
use dynamicinfer::formats::predictor_file;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::model::Model;
use dynamicinfer::model::config::Activation;
use dynamicinfer::predictor::{self, Calibration};
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use std::path::Path;

thread_local! {
    /// Two layers of 32 neurons, hidden size 32.
    static ENGINE: RefCell<Engine> = RefCell::new({
        let (hidden, layers, ffn) = (32, 2, 32);
        let (activation, active, outliers, experts) = (Activation::Relu, None, 0, None);
        let shape = Shape { hidden, layers, ffn, heads: 1, kv_heads: 1, vocab: 259, context: 16, activation, active, outliers, experts, seed: 1 };
        let path = support::DIR.join("small.neurons");
        write_store(&shape, Quant::F16, &path, &|_, _| Ok(())).unwrap();
        Engine::new(Model::open(&path).unwrap(), 1, Kernels::best())
    });
}

fn check(path: &Path) {
    let remedy = "make it again";
    let Some(file) = support::accepted(predictor_file::open(path), remedy) else { return };
    let share = |p: f32| assert!((0.0..=1.0).contains(&p), "{p}");
    for t in &file.header.tables {
        let calibration = Calibration::new(t.scores.clone(), t.probabilities.clone());
        for score in [f32::MIN, -1.0, 0.0, 0.3, t.scores[0], f32::MAX] {
            share(calibration.probability(score));
        }
        calibration.bytes();
        calibration.score_at(0.5);
    }
    ENGINE.with_borrow_mut(|engine| {
        let Some(predictor) = support::accepted(predictor::open(path, &engine.model), remedy) else { return };
        for t in &file.header.tables {
            share(predictor.threshold(t.layer, t.ahead));
            let mut scores = vec![0.0; 2 * 32];
            let residual: Vec<f32> = (0..2 * 32).map(|i| i as f32 / 16.0 - 1.0).collect();
            predictor.score(&mut engine.tools(), t.layer, t.ahead, &residual, 2, &mut scores);
        }
    });
}

fuzz_target!(|bytes: &[u8]| {
    support::both(bytes, b"PREDICT\0", |_| (), check);
    // A fuzzer cannot guess a fingerprint either.
    let ours = ENGINE.with_borrow(|engine| engine.model.fingerprint().to_owned());
    if let Some(right) = support::put_right(bytes, b"PREDICT\0", |header| header["fingerprint"] = ours.into()) {
        check(&support::file(&right));
    }
});
