//! Keeps an answer to a grammar: each step masks the tokens that the grammar does not allow.

use crate::clock::{self, Duration};
use crate::error::excerpt;
use crate::tokenizer::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use std::sync::Arc;

/// Processor time for one mask: the engine's thread computes them, and every other answer waits meanwhile. The library's own limits end a
/// mask after some 20 ms; this one is for work that they do not count.
const MAX_MASK: Duration = Duration::from_millis(500);

/// Compiles grammars for one tokenizer.
pub struct Grammars(ParserFactory);

/// The grammar of one answer and how far the answer has come in it. A clone continues independently.
#[derive(Clone)]
pub struct Grammar {
    matcher: Box<Matcher>,
    holds: Holds,
}

/// Whether the answer has to follow the grammar.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holds {
    Yes,
    /// If it begins with `{`; so far it has no character but white space.
    IfJson,
    /// It began otherwise, and may go on as it likes.
    No,
}

impl Grammars {
    /// For logits of `vocab` tokens.
    ///
    /// # Errors
    /// Why this tokenizer cannot have grammars: it has no end-of-text token, or the library refuses it.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Grammars, String> {
        let eos =
            tokenizer.eos().ok_or("the model has no end-of-text token, and so no way to end a structured answer")?;
        // Control tokens have no bytes and are never allowed; neither are rows of the head that stand for no token.
        let words: Vec<Vec<u8>> =
            (0..vocab as u32).map(|id| tokenizer.token_bytes(id).unwrap_or_default().to_vec()).collect();
        Grammars::of(&words, eos)
    }

    /// With a vocabulary of all bytes, pieces of JSON and short numbers: for trying a schema without a model.
    ///
    /// # Errors
    /// What the library refuses; no case is known.
    pub fn small() -> Result<Grammars, String> {
        let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        words.extend((0..100).map(|number| format!("{number:02}").into_bytes()));
        words.extend(
            ["{\"", "\"}", "\": ", "\": \"", "\", \"", ", \"", "[\"", "\"]", "}}", "]}"].map(|w| w.as_bytes().to_vec()),
        );
        words.push(Vec::new());
        Grammars::of(&words, words.len() as u32 - 1)
    }

    fn of(words: &[Vec<u8>], eos: u32) -> Result<Grammars, String> {
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos), words);
        let mut factory =
            ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _)).map_err(in_short)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // A state takes some 2 KiB: 32 MiB for an answer at most. The library's default of 250,000 states would be half a gigabyte.
            max_lexer_states: 16 << 10,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Grammars(factory))
    }

    /// The grammar of any JSON object.
    ///
    /// # Errors
    /// What the library refuses; no case is known.
    pub fn json_object(&self) -> Result<Grammar, String> {
        self.grammar(TopLevelGrammar::from_json_schema(compact(serde_json::json!({"type": "object"}), true)))
    }

    /// The grammar of JSON that fits a schema. Compiling takes as much stack, memory and time as the schema demands, so a stranger's schema
    /// is tried in a child process before. If it is not `strict`, words of the schema that no grammar can hold are left out
    /// ([`Grammar::warnings`]).
    ///
    /// # Errors
    /// What in the schema is not supported, or is too large.
    pub fn json_schema(&self, schema: &serde_json::Value, strict: bool) -> Result<Grammar, String> {
        self.grammar(TopLevelGrammar::from_json_schema(compact(schema.clone(), strict)))
    }

    fn grammar(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let mut matcher = Matcher::new(self.0.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(in_short(error)),
            None => {
                // An impossible grammar shows at the first mask.
                matcher.compute_mask().map_err(in_short)?;
                Ok(Grammar { matcher: Box::new(matcher), holds: Holds::Yes })
            }
        }
    }
}

/// The library's message without the traces that it adds.
fn in_short(error: impl std::fmt::Display) -> String {
    let error = error.to_string();
    let lines: Vec<&str> = error.lines().take_while(|line| !line.starts_with('<')).map(str::trim).collect();
    excerpt(lines.join("; "))
}

/// JSON without optional white space: a small model would write line breaks without end.
fn compact(mut schema: serde_json::Value, strict: bool) -> serde_json::Value {
    if schema == true {
        // The same as an object, which can say how it is written.
        schema = serde_json::json!({});
    }
    if let Some(object) = schema.as_object_mut() {
        let style = serde_json::json!({
            "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "lenient": !strict,
        });
        object.insert("x-guidance".into(), style);
    }
    schema
}

/// Where in a token's bytes an answer begins: behind white space. `None` for a token of white space, and for one without bytes.
fn first_character(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|byte| !byte.is_ascii_whitespace())
}

impl Grammar {
    /// The same for an answer that may also be any text that does not begin with `{`.
    pub fn if_json(self) -> Grammar {
        Grammar { holds: Holds::IfJson, ..self }
    }

    /// What of its schema it does not hold, in the library's words; before the first token.
    pub fn warnings(&mut self) -> Vec<String> {
        self.matcher.grammar_warnings()
    }

    /// Sets the logits of all tokens that the grammar does not allow here to minus infinity; `logits` is `[vocab]`.
    ///
    /// # Errors
    /// The grammar exceeded its limits of memory or time.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if self.holds == Holds::No {
            return Ok(());
        }
        let allowed = self.allowed()?;
        let tokens = self.matcher.tok_env().map_err(in_short)?;
        // White space before the brace would have to be part of the grammar; alone it is no answer yet.
        let is_text = |id: usize| {
            let bytes = tokens.tok_trie().token(id as u32);
            first_character(bytes).is_none_or(|at| bytes[at] != b'{')
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if !(allowed.get(id) || self.holds == Holds::IfJson && is_text(id)) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn allowed(&mut self) -> Result<SimpleVob, String> {
        let before = clock::computed();
        let allowed = self.matcher.compute_mask_or_eos().map_err(in_short)?;
        let took = clock::computed() - before;
        if took > MAX_MASK {
            return Err(format!("finding what may come next took {took:.1?}; at most {MAX_MASK:?} are given"));
        }
        Ok(allowed)
    }

    /// Advances by the chosen token. Returns whether the answer is complete: nothing may follow.
    ///
    /// # Errors
    /// The token was not allowed.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        if self.holds == Holds::IfJson {
            let tokens = self.matcher.tok_env().map_err(in_short)?;
            let bytes = tokens.tok_trie().token(token);
            self.holds = match first_character(bytes) {
                None => return Ok(false),
                Some(at) if bytes[at] == b'{' => Holds::Yes,
                Some(_) => Holds::No,
            };
        }
        if self.holds == Holds::No {
            return Ok(false);
        }
        self.matcher.consume_token(token).map_err(in_short)?;
        Ok(self.matcher.is_stopped())
    }

    /// For a grammar of [`Grammars::small`]: writes a text of at most `most` bytes that the grammar allows, at each place the first byte of
    /// `preferred` that is allowed there. `told` is given the text before each mask.
    ///
    /// # Errors
    /// As [`Grammar::mask`].
    pub fn walk(&mut self, preferred: &[u8], most: usize, mut told: impl FnMut(&[u8])) -> Result<(), String> {
        let mut text = Vec::new();
        while text.len() < most && !self.matcher.is_stopped() {
            told(&text);
            let allowed = self.allowed()?;
            let may = |byte: &u8| allowed.get(usize::from(*byte));
            let next = preferred.iter().copied().find(may).or_else(|| (b' '..=b'~').chain(0..=255).find(may));
            let Some(byte) = next else { break };
            self.accept(u32::from(byte))?;
            text.push(byte);
        }
        Ok(())
    }
}
