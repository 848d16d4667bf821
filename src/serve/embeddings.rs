//! Texts as vectors: the mean of a text's hidden states.
//!
//! A text runs through the model as a prompt does, in chunks between which the engine's thread goes on with running answers. Its keys and
//! values are its own and are dropped with it.

use super::daemon::{Daemon, Loaded};
use crate::api::ApiError;
use crate::api::embeddings::Texts;
use crate::engine::Engine;
use crate::error::Result;
use crate::model::{KvCache, KvType};
use serde_json::Value;

/// Tokens that run at once: answers under way wait meanwhile.
const CHUNK: usize = 64;

/// A text that runs.
struct Running {
    tokens: Vec<u32>,
    kv: KvCache,
    /// The sum of the hidden states so far, `[hidden]`.
    sum: Vec<f32>,
}

impl Running {
    fn new(engine: &Engine, tokens: Vec<u32>, kind: KvType) -> Result<Running> {
        let config = &engine.model.config;
        let kv = KvCache::new(config, tokens.len(), kind)?;
        Ok(Running { tokens, kv, sum: vec![0.0; config.hidden] })
    }

    /// Runs the next chunk. The embedding if it was the last one.
    fn step(&mut self, engine: &mut Engine) -> Option<Vec<f32>> {
        let (done, hidden) = (self.kv.len, self.sum.len());
        let chunk = &self.tokens[done..self.tokens.len().min(done + CHUNK)];
        for state in engine.hidden_states(&mut self.kv, chunk).chunks_exact(hidden) {
            self.sum.iter_mut().zip(state).for_each(|(sum, state)| *sum += state);
        }
        (self.kv.len == self.tokens.len()).then(|| unit(&self.sum))
    }
}

/// The vector of length 1 in the same direction: of a sum as of a mean. A vector of zeros stays one.
fn unit(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    vector.iter().map(|v| (f64::from(*v) / length) as f32).collect()
}

/// The answer to a request for embeddings. Requests take turns with each of their texts.
///
/// # Errors
/// 400 for another number of dimensions than the model has; 429 if `serve.queue` requests wait already; 503 without memory or model; 500 if the engine failed.
pub async fn answer(daemon: &Daemon, loaded: &Loaded, texts: Texts) -> Result<Value, ApiError> {
    let _one = daemon.limits.embedding()?;
    texts.check_dimensions(loaded.handle.ask(|engine| engine.model.config.hidden).await?)?;
    let mut vectors = Vec::with_capacity(texts.tokens.len());
    for tokens in &texts.tokens {
        let _turn = daemon.embedding.lock().await;
        let (own, kind) = (tokens.clone(), loaded.handle.limits.kv);
        let mut running = loaded.handle.ask(move |engine| Running::new(engine, own, kind)).await??;
        let vector = loop {
            let step = move |engine: &mut Engine| {
                let vector = running.step(engine);
                (running, vector, engine.failure())
            };
            let (after, vector, failure) = loaded.handle.ask(step).await?;
            if let Some(why) = failure {
                return Err(crate::api::stream::failed(why.to_string()));
            }
            running = after;
            if let Some(vector) = vector {
                break vector;
            }
        };
        vectors.push(vector);
    }
    Ok(texts.answer(&loaded.model, &vectors))
}
