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
    /// Whether the answer has something that the grammar allowed, or the text after which it holds.
    begun: bool,
    /// The token that begins thoughts, as the answer's first, and the text that ends them.
    may_think: Option<(u32, Box<[u8]>)>,
}

/// Whether the answer has to follow the grammar.
#[derive(Clone, Debug, PartialEq)]
enum Holds {
    Yes,
    /// If it begins with this character; so far it has no character but white space.
    IfBegins(u8),
    /// It began otherwise, and may go on as it likes.
    No,
    /// Not before a text.
    After(Watch),
}

/// Looks for a text in what is generated.
#[derive(Clone, Debug, PartialEq)]
struct Watch {
    word: Box<[u8]>,
    /// The end of what was generated, shorter than `word`.
    seen: Vec<u8>,
    then: Box<Holds>,
}

impl Watch {
    fn for_text(word: &[u8], then: Holds) -> Holds {
        Holds::After(Watch { word: word.into(), seen: Vec::new(), then: Box::new(then) })
    }

    /// Takes what was generated; what follows the text, once it is there.
    fn take(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.seen.extend_from_slice(bytes);
        if let Some(at) = self.seen.windows(self.word.len()).position(|window| *window == *self.word) {
            return Some(self.seen.split_off(at + self.word.len()));
        }
        let old = self.seen.len().saturating_sub(self.word.len() - 1);
        self.seen.drain(..old);
        None
    }
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

    /// The grammar that a text in llguidance's dialect of Lark describes. What it holds of JSON schemas takes as much stack, memory and time as
    /// for [`Grammars::json_schema`].
    ///
    /// # Errors
    /// What in it is not supported, or is too large.
    pub fn lark(&self, text: String) -> Result<Grammar, String> {
        self.grammar(TopLevelGrammar::from_lark(text))
    }

    fn grammar(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let mut matcher = Matcher::new(self.0.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(in_short(error)),
            None => {
                // An impossible grammar shows at the first mask.
                matcher.compute_mask().map_err(in_short)?;
                Ok(Grammar { matcher: Box::new(matcher), holds: Holds::Yes, begun: false, may_think: None })
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

/// How JSON is written, as a schema says it to the library: without optional white space, because a small model would write line breaks
/// without end.
pub fn style(strict: bool) -> serde_json::Value {
    serde_json::json!({
        "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "lenient": !strict,
    })
}

fn compact(mut schema: serde_json::Value, strict: bool) -> serde_json::Value {
    if schema == true {
        // The same as an object, which can say how it is written.
        schema = serde_json::json!({});
    }
    if let Some(object) = schema.as_object_mut() {
        object.insert("x-guidance".into(), style(strict));
    }
    schema
}

/// Where in a token's bytes an answer begins: behind white space. `None` for a token of white space, and for one without bytes.
fn first_character(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|byte| !byte.is_ascii_whitespace())
}

impl Grammar {
    /// The same for an answer that may also be any text that does not begin with this character.
    pub fn if_begins(self, with: u8) -> Grammar {
        Grammar { holds: Holds::IfBegins(with), ..self }
    }

    /// The same for what follows a text, which need not come.
    pub fn after(self, text: &str) -> Grammar {
        Grammar { holds: Watch::for_text(text.as_bytes(), self.holds), ..self }
    }

    /// The same for an answer whose first token may be this one, and that follows the grammar behind `text` then.
    pub fn or_thinks(self, token: u32, text: &str) -> Grammar {
        Grammar { may_think: Some((token, text.as_bytes().into())), ..self }
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
        let begins = match self.holds {
            Holds::No | Holds::After(_) => return Ok(()),
            Holds::Yes => None,
            Holds::IfBegins(with) => Some(with),
        };
        let allowed = self.allowed()?;
        let tokens = self.matcher.tok_env().map_err(in_short)?;
        let thinks = self.may_think.as_ref().map(|(token, _)| *token as usize);
        // White space before the beginning would have to be part of the grammar; alone it is no answer yet.
        let is_text = |id: usize, with: u8| {
            let bytes = tokens.tok_trie().token(id as u32);
            first_character(bytes).is_none_or(|at| bytes[at] != with)
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if !(allowed.get(id) || Some(id) == thinks || begins.is_some_and(|with| is_text(id, with))) {
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

    /// Advances by the chosen token, which stands for `said` in the answer. Returns whether the answer is complete: nothing may follow.
    ///
    /// # Errors
    /// The token was not allowed.
    pub fn accept(&mut self, token: u32, said: &[u8]) -> Result<bool, String> {
        if let Some((_, close)) = self.may_think.take().filter(|(think, _)| *think == token) {
            self.holds = Watch::for_text(&close, self.holds.clone());
            return Ok(false);
        }
        match &mut self.holds {
            Holds::No => return Ok(false),
            Holds::Yes => {}
            Holds::IfBegins(with) => match first_character(said) {
                None => return Ok(false),
                Some(at) if said[at] == *with => self.holds = Holds::Yes,
                Some(_) => {
                    self.holds = Holds::No;
                    return Ok(false);
                }
            },
            Holds::After(watch) => {
                let Some(rest) = watch.take(said) else { return Ok(false) };
                self.holds = (*watch.then).clone();
                self.begun = self.holds == Holds::Yes;
                return self.follow(&rest);
            }
        }
        self.matcher.consume_token(token).map_err(in_short)?;
        self.begun = true;
        Ok(self.matcher.is_stopped())
    }

    /// Advances by several tokens, each with what it stands for, if the grammar allows all of them; whether it does.
    pub fn accept_all(&mut self, tokens: &[(u32, &[u8])]) -> bool {
        let mut there = self.clone();
        let accepted = tokens.iter().all(|(token, said)| there.accept(*token, said).is_ok()) && there.begun();
        if accepted {
            *self = there;
        }
        accepted
    }

    /// Whether the answer is being kept to the grammar, and has something that it allowed or the text after which it holds.
    pub fn begun(&self) -> bool {
        self.begun && self.holds == Holds::Yes
    }

    /// Whether the answer has to follow the grammar from here.
    pub fn holds(&self) -> bool {
        self.holds == Holds::Yes
    }

    /// Advances by what a token had behind the text after which the grammar holds.
    fn follow(&mut self, rest: &[u8]) -> Result<bool, String> {
        let Some(at) = first_character(rest) else { return Ok(false) };
        match &mut self.holds {
            Holds::No => return Ok(false),
            Holds::Yes => {}
            Holds::IfBegins(with) => self.holds = if rest[at] == *with { Holds::Yes } else { Holds::No },
            Holds::After(watch) => {
                let Some(rest) = watch.take(rest) else { return Ok(false) };
                self.holds = (*watch.then).clone();
                self.begun = self.holds == Holds::Yes;
                return self.follow(&rest);
            }
        }
        let tokens = self.matcher.tok_env().map_err(in_short)?.tok_trie().greedy_tokenize(rest);
        match self.matcher.validate_tokens(&tokens) {
            Ok(valid) if valid == tokens.len() => self.matcher.consume_tokens(&tokens).map_err(in_short)?,
            // It was chosen before the grammar held, and is left as it is.
            _ => self.holds = Holds::No,
        }
        Ok(self.holds == Holds::Yes && self.matcher.is_stopped())
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
            self.accept(u32::from(byte), &[byte])?;
            text.push(byte);
        }
        Ok(())
    }
}
