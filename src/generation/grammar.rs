//! What an answer must look like, as a mask over the next token.

use crate::error::excerpt;
use crate::tokenizer::Tokenizer;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use std::sync::Arc;

/// In bytes of JSON: a schema is part of a request, and the largest in use have some 100 KB.
pub const LONGEST_SCHEMA: usize = 256 << 10;

/// Makes grammars for one tokenizer.
pub struct Grammars(ParserFactory);

/// One answer's grammar, as far as the answer is.
pub struct Grammar(Box<Matcher>);

impl Grammars {
    /// # Errors
    /// Why this tokenizer can have none.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Grammars, String> {
        let eos =
            tokenizer.eos().ok_or("the model has no end-of-text token, and so no way to end a structured answer")?;
        // Control tokens have no bytes and are never allowed; neither are rows of the head that stand for no token.
        let words: Vec<Vec<u8>> =
            (0..vocab as u32).map(|id| tokenizer.token_bytes(id).unwrap_or_default().to_vec()).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, eos), &words);
        let mut factory = ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _)).map_err(excerpt)?;
        factory.quiet();
        Ok(Grammars(factory))
    }

    /// Any JSON object.
    ///
    /// # Errors
    /// None is known; the library may have a reason.
    pub fn json_object(&self) -> Result<Grammar, String> {
        self.grammar(TopLevelGrammar::from_json_schema(compact(serde_json::json!({"type": "object"}))))
    }

    /// JSON that fits a schema.
    ///
    /// # Errors
    /// What in the schema is not supported, or is too much.
    pub fn json_schema(&self, schema: &serde_json::Value) -> Result<Grammar, String> {
        let bytes = schema.to_string().len();
        if bytes > LONGEST_SCHEMA {
            return Err(format!("the schema has {bytes} bytes; at most {LONGEST_SCHEMA} are taken"));
        }
        self.grammar(TopLevelGrammar::from_json_schema(compact(schema.clone())))
    }

    fn grammar(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let mut matcher = Matcher::new(self.0.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(excerpt(error)),
            None => {
                // The first mask is where an impossible grammar shows.
                matcher.compute_mask().map_err(excerpt)?;
                Ok(Grammar(Box::new(matcher)))
            }
        }
    }
}

/// JSON without free white space: a small model would go on with line breaks for ever.
fn compact(mut schema: serde_json::Value) -> serde_json::Value {
    if let Some(object) = schema.as_object_mut() {
        let style = serde_json::json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        object.insert("x-guidance".into(), style);
    }
    schema
}

impl Grammar {
    /// Takes from `logits` every token that the grammar does not allow here.
    ///
    /// # Errors
    /// The grammar grew beyond its limits.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.0.compute_mask_or_eos().map_err(excerpt)?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if !allowed.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Notes the token that was chosen; whether nothing may follow it.
    ///
    /// # Errors
    /// The token was not allowed.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.0.consume_token(token).map_err(excerpt)?;
        Ok(self.0.is_stopped())
    }
}
