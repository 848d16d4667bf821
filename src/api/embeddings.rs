//! POST /v1/embeddings: texts as vectors.

use super::completions::prompts;
use super::error::{ApiError, TOO_LONG};
use super::fields::Item;
use super::model::ServedModel;
use super::unknown::Given;
use serde::Deserialize;
use serde_json::{Value, json};

/// Texts in a request, at most: each is a prompt of its own.
const MAX_TEXTS: usize = 256;
/// Tokens of all texts of a request, at most; a longer context may be filled by one text. A request is answered as a whole, and what was
/// computed is lost when its client goes or the daemon ends: a processor that reads 100 tokens a second takes eleven minutes for so many.
const MAX_TOKENS: usize = 64 << 10;

/// The names of all fields of the request.
pub const EMBEDDING_FIELDS: &[&str] = &["model", "input", "encoding_format", "dimensions", "user"];

/// Body of POST /v1/embeddings. A field that is not listed is refused by name; `None` is a field that was left out.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct EmbeddingRequest {
    /// Name of the loaded model, or empty. `None`: whichever is loaded.
    model: Option<String>,
    /// A text, texts, token ids, or lists of token ids; 256 texts and 65,536 tokens at most.
    input: Option<Item>,
    /// `float` or `base64` (of little-endian 32-bit floats). `None`: `float`.
    encoding_format: Option<String>,
    /// Refused unless it is the model's own.
    dimensions: Option<usize>,
    /// Accepted and ignored.
    #[serde(rename = "user")]
    _user: Option<Given>,
}

/// The checked texts of a request.
pub struct Texts {
    /// The tokens of each text.
    pub tokens: Vec<Vec<u32>>,
    base64: bool,
    dimensions: Option<usize>,
}

impl EmbeddingRequest {
    /// One of the loaded model.
    pub fn of(input: Option<Item>, dimensions: Option<usize>) -> EmbeddingRequest {
        EmbeddingRequest { input, dimensions, ..EmbeddingRequest::default() }
    }

    /// Checks the request and tokenises its texts.
    ///
    /// # Errors
    /// 400 that names the bad field or the limit of tokens; 404 if the request names another model.
    pub fn prepare(self, model: &ServedModel) -> Result<Texts, ApiError> {
        let base64 = match self.encoding_format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let other = crate::error::excerpt(other);
                let message = format!("unknown format '{other}'; use float or base64");
                return Err(ApiError::field("encoding_format", message));
            }
        };
        let input = self
            .input
            .ok_or_else(|| ApiError::field("input", "the input is missing; give a text or a list of texts"))?;
        let texts = Texts { tokens: prompts("input", input, MAX_TEXTS, model)?, base64, dimensions: self.dimensions };
        let (tokens, most) = (texts.count(), MAX_TOKENS.max(model.context));
        if tokens > most {
            let message = format!("the texts have {tokens} tokens in all; the limit is {most}: send them in parts");
            return Err(ApiError::field("input", message).code(TOO_LONG));
        }
        Ok(texts)
    }
}

impl Texts {
    /// Tokens of all texts.
    pub fn count(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    /// Checks the requested number of dimensions against the model's.
    ///
    /// # Errors
    /// 400 if the request has another number.
    pub fn check_dimensions(&self, hidden: usize) -> Result<(), ApiError> {
        match self.dimensions.filter(|&asked| asked != hidden) {
            None => Ok(()),
            Some(asked) => {
                let message = format!(
                    "dimensions is {asked}; this model's vectors have {hidden} and cannot be \
                     cut; leave it out"
                );
                Err(ApiError::field("dimensions", message))
            }
        }
    }

    /// The answer: `vectors` has one for each text.
    pub fn answer(&self, model: &ServedModel, vectors: &[Vec<f32>]) -> Value {
        let embedding = |(index, vector): (usize, &Vec<f32>)| {
            let numbers = if self.base64 { base64(bytemuck::cast_slice(vector)).into() } else { json!(vector) };
            json!({"object": "embedding", "index": index, "embedding": numbers})
        };
        let tokens = self.count();
        json!({
            "object": "list",
            "data": vectors.iter().enumerate().map(embedding).collect::<Vec<_>>(),
            "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        })
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(three.get(i).copied().unwrap_or(0)));
        for digit in 0..4 {
            let known = digit <= three.len();
            text.push(if known { char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 4648, section 10.
    #[test]
    fn base64_is_as_the_standard_has_it() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }
}
