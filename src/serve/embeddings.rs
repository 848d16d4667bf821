//! Texts as vectors: the mean of a text's hidden states.
//!
//! A text runs through the model as a prompt does, in steps between which the engine's thread continues running answers.

use super::daemon::{Daemon, Loaded};
use crate::api::ApiError;
use crate::api::embeddings::Texts;
use crate::api::stream::failed;
use crate::error::Error;

/// A vector for each text. Requests of one client take turns with each of their texts, and so do clients.
///
/// # Errors
/// 400 for another number of dimensions than the model has; 429 if `serve.queue` requests wait already; 503 without memory or model; 500 if
/// the engine failed.
pub async fn vectors(daemon: &Daemon, loaded: &Loaded, client: u64, texts: &Texts) -> Result<Vec<Vec<f32>>, ApiError> {
    let _one = daemon.limits.embedding()?;
    texts.check_dimensions(loaded.handle.dimensions)?;
    let mut vectors = Vec::with_capacity(texts.tokens.len());
    for tokens in &texts.tokens {
        let vector = loaded.handle.embed(client, tokens.clone()).await?;
        vectors.push(vector.map_err(|error| match error {
            Error::Failed(why) => failed(why),
            error => error.into(),
        })?);
    }
    Ok(vectors)
}
