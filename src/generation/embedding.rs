//! A text as a vector: the mean of its hidden states, computed in steps between which answers go on.

use crate::engine::Engine;
use crate::error::Result;
use crate::model::{KvCache, KvType};
use tokio::sync::oneshot;

/// A text that waits for its vector.
pub struct Text {
    /// The client that asks, as in [`super::Job::client`].
    pub client: u64,
    /// At least one.
    pub tokens: Vec<u32>,
    /// Closed once nothing waits for the vector any more.
    pub out: oneshot::Sender<Result<Vec<f32>>>,
}

/// A text that runs. Its keys and values are its own and are dropped with it.
pub struct Embedding {
    /// The text.
    pub text: Text,
    kv: KvCache,
    /// The sum of the hidden states so far, `[hidden]`.
    sum: Vec<f32>,
}

impl Embedding {
    /// Begins a text; `None` if there is no memory for its keys and values, of which its client is told.
    pub fn begin(engine: &Engine, text: Text, kind: KvType) -> Option<Embedding> {
        let config = &engine.model.config;
        match KvCache::new(config, text.tokens.len(), kind) {
            Ok(kv) => Some(Embedding { text, kv, sum: vec![0.0; config.hidden] }),
            Err(error) => {
                // Its client may have gone.
                let _ = text.out.send(Err(error));
                None
            }
        }
    }

    /// Runs up to `most` of the tokens that are left. Returns how many, and the vector with the last of them.
    pub fn step(&mut self, engine: &mut Engine, most: usize) -> (usize, Option<Vec<f32>>) {
        let (done, hidden, tokens) = (self.kv.len, self.sum.len(), &self.text.tokens);
        let step = &tokens[done..tokens.len().min(done + most)];
        for state in engine.hidden_states(&mut self.kv, step).chunks_exact(hidden) {
            self.sum.iter_mut().zip(state).for_each(|(sum, state)| *sum += state);
        }
        (step.len(), (self.kv.len == tokens.len()).then(|| unit(&self.sum)))
    }
}

/// The vector of length 1 in the same direction: of a sum as of a mean. A vector of zeros stays one.
fn unit(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    vector.iter().map(|v| (f64::from(*v) / length) as f32).collect()
}
