//! Compiles the JSON schema of a request into a grammar without letting it do harm.
//!
//! A schema is a stranger's program for the library that compiles it. Measured (llguidance 1.9): 8,000 required names overflow a thread's
//! stack, which ends the process; a `multipleOf` of nine digits computes and takes memory without end, on a thread that nothing can stop.
//! So each schema is first checked for size, then tried in a child process with limits on memory, processor time and stack; only a schema
//! that passes is compiled here, on a thread with as large a stack. One is tried and one compiled at a time, and clients take turns. What
//! waits for its turn holds no thread and no place in which requests are read, so that slow schemas hold up schemas only.
//!
//! The trial needs no model. What the library does without a limit it does before it looks at a vocabulary: it recurses through the schema,
//! and when it makes the lexer it follows the first byte of every lexeme as far as that leads (`Lexer::from`, before any fuel is set). A
//! vocabulary only decides how many bytes ahead a mask looks, and masks have the library's fuel in the child as here. So the child's
//! vocabulary is bytes, pieces of JSON and short numbers; the real one would be a megabyte through the pipe, to be made into a tree again
//! for each request.
//!
//! Calls in a model's own format have a grammar of their own, with a copy of a schema for each value. The trial compiles both, and walks
//! through that one.
//!
//! What a grammar cannot hold of a schema is left out, unless the request wants all of it (`strict`): the trial finds it.

use super::call_grammar::NativeCalls;
use super::error::{ApiError, unsupported};
use super::forms::AnswerForms;
use super::places::{Place, Places};
use super::reading::Thoughts;
use super::schema_bounds::{check, heavy_places, place_of};
use super::schema_parts::{Way, culprits, ignored, remove};
use crate::child::{Children, Wanted, Work, say, status_bytes};
use crate::clock::{self, Duration};
use crate::error::excerpt;
use crate::generation::metrics::Number;
use crate::generation::{Grammar, Grammars, style};
use crate::tokenizer::special::Piece;
use crate::tokenizer::{Special, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// The program's first argument that makes it the child; see [`child_main`].
pub const CHILD_ARGUMENT: &str = "__try-schema";

/// Stack in bytes for compiling a schema, in the child and here. 2 MiB are too little for an object of 8,000 names and enough for 6,000;
/// all [`super::schema_bounds::MAX_VALUES`] values may be names.
const STACK: usize = 64 << 20;
/// Stack in bytes for computing masks in the child: half of what the engine's thread has.
const MASK_STACK: usize = 1 << 20;
/// Processor time of a trial: 4,096 required names take half of it, an ordinary schema some milliseconds.
const MAX_TRIAL: Duration = Duration::from_secs(2);
/// Resident memory in bytes that a trial may take; the daemon needs as much again when it compiles.
const MAX_MEMORY: u64 = 128 << 20;

static TRIAL: Work = Work {
    argument: CHILD_ARGUMENT,
    doing: "compiling",
    // The schema, that of each function once more, and the format of calls.
    longest_request: 2 * super::schema_bounds::MAX_SCHEMA_BYTES + MAX_FORMAT,
    // What is left out, of which JSON may write a byte as six, and a message.
    longest_answer: 8 * MAX_LEFT_OUT,
    // Stacks and allocators' reservations among it.
    memory: 512 << 20,
    stack: STACK,
    // The child reports its place when its time is over; this limit is for a child that does not.
    computed: MAX_TRIAL.saturating_add(Duration::from_secs(1)),
    // A machine whose cores are taken is given time.
    wall: Duration::from_secs(15),
};

/// Walks through a grammar, each by the bytes that it prefers: strings, lists and objects that end soon; ones that go on; and numbers of
/// many digits.
const WAYS: [&[u8]; 3] = [b"\"]},:0", b",[{\"", b"-9876543210"];
/// Length of a walk in bytes.
const MAX_WALK: usize = 64;
/// Bytes of a function's name and the marks around it, before a call's first argument.
const MAX_NAME: usize = 96;

/// Verdicts that are remembered; applications use a handful of schemas.
const KEPT: usize = 64;
/// Bytes of their schemas together.
const KEPT_BYTES: usize = 1 << 20;
/// Requests that may wait for their schema's trial, and as many for its compilation; each holds its prompt.
const MAX_WAITING: usize = 64;
/// How often a trial looks whether its time is over.
const LOOK: Duration = Duration::from_millis(50);

/// Bytes of a model's format of calls with the names of functions, in JSON, at most.
const MAX_FORMAT: usize = 64 << 10;
/// Bytes of the names of all parts that are left out of a schema, at most.
const MAX_LEFT_OUT: usize = 16 << 10;
/// Times that a schema is compiled again without parts that were at fault, at most: there are fewer kinds of them.
const MAX_ROUNDS: usize = 8;

/// The result of a schema's trial: the parts that no grammar enforces, or the reason of a refusal.
type Verdict = Result<LeftOut, String>;

/// Parts of a schema that no grammar holds. None if all of it was wanted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The library refuses a schema that has them.
    removed: Vec<Way>,
    /// The library passes over them.
    ignored: Vec<Way>,
}

impl LeftOut {
    /// The ways to all of them.
    fn ways(&self) -> impl Iterator<Item = &Way> {
        self.removed.iter().chain(&self.ignored)
    }

    fn bytes(&self) -> usize {
        self.ways().flatten().map(|step| step.len() + 3).sum()
    }
}

/// What a trial is about.
#[derive(Deserialize, Serialize)]
struct Question<S, N> {
    /// Whether all of the schema has to be enforced.
    strict: bool,
    schema: S,
    /// Calls that are written in the model's own format.
    native: Option<N>,
}

/// The forms of a schema, the first of which are calls in a model's own format.
#[derive(Clone, Deserialize, Serialize)]
struct Native {
    calls: NativeCalls,
    /// Number of all forms.
    forms: usize,
    /// Whether an answer has [`NativeCalls::trigger`] before the grammar holds.
    begun: bool,
}

impl Native {
    /// The grammar of an answer, and what of `schema` it does not hold. `literal` writes a text of the format.
    fn lark(&self, schema: &Value, strict: bool, literal: &dyn Fn(&str) -> String) -> (String, Vec<Way>) {
        self.calls.lark(schema, self.forms, self.begun, literal, &style(strict))
    }
}

/// Compiles the schemas of requests for one model, after a trial in a child process. One trial runs at a time, because each may take a core
/// and `MAX_MEMORY` bytes.
pub struct Schemas {
    children: Arc<Children>,
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    grammars: OnceLock<Result<Grammars, String>>,
    /// Schemas and their verdicts, the most recently used last. Found by the whole text: a stranger could make two texts with one hash.
    known: Mutex<VecDeque<(String, Verdict)>>,
    trials: Places,
    compiling: Places,
    /// Trials that were started.
    pub tried: Number,
    /// Requests refused because of their schema.
    pub refused: Number,
}

impl Schemas {
    /// For logits of `vocab` tokens. Trials are run by `program`, called with [`CHILD_ARGUMENT`].
    pub fn new(program: PathBuf, tokenizer: Arc<Tokenizer>, vocab: usize) -> Schemas {
        Schemas {
            children: Children::new(&TRIAL, program),
            tokenizer,
            vocab,
            grammars: OnceLock::new(),
            known: Mutex::default(),
            trials: Places::new(1, MAX_WAITING),
            compiling: Places::new(1, MAX_WAITING),
            tried: Number::default(),
            refused: Number::default(),
        }
    }

    /// What compiles grammars for the model's tokenizer. Made by the first request that needs it, because a large vocabulary takes a while.
    fn grammars(&self) -> Result<&Grammars, String> {
        self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, self.vocab)).as_ref().map_err(Clone::clone)
    }

    /// The grammar of an answer in one of some forms, and JSON pointers of what of the request's schemas it does not hold. Waits for the
    /// trials of schemas that are not known, but no longer than the answer is `wanted`; clients take turns. Dropping the future gives up the
    /// wait.
    ///
    /// # Errors
    /// 400 with the field and the part of the schema at fault, where it can be told; 429 if too many requests wait already.
    pub async fn answer(
        self: &Arc<Schemas>,
        answer: AnswerForms,
        client: u64,
        wanted: &Wanted,
    ) -> Result<(Grammar, Vec<String>), ApiError> {
        let made = self.tried_and_compiled(answer, client, wanted).await;
        if made.is_err() {
            self.refused.add(1);
        }
        made
    }

    async fn tried_and_compiled(
        self: &Arc<Schemas>,
        answer: AnswerForms,
        client: u64,
        wanted: &Wanted,
    ) -> Result<(Grammar, Vec<String>), ApiError> {
        // They have to pass by themselves.
        for (field, whole) in answer.strict_beside_others() {
            self.admit(&whole.schema(), true, None, client, wanted).await.map_err(|e| whole.refused(field, e))?;
        }
        let (strict, any, field) = (answer.strict(), answer.is_any_object(), answer.field());
        let AnswerForms { forms, or_text, native, thoughts, .. } = answer;
        let native = native.map(|calls| {
            let begun = or_text && !calls.trigger().is_empty();
            Native { calls, forms: forms.0.len(), begun }
        });
        let mut schema = forms.schema();
        let mut left_out = LeftOut::default();
        if !any {
            let admitted = self.admit(&schema, strict, native.as_ref(), client, wanted).await;
            left_out = admitted.map_err(|e| forms.refused(field, e))?;
        }
        left_out.removed.iter().for_each(|way| remove(&mut schema, way));
        // One at a time: the limit on memory is for a single one.
        let place = turn(&self.compiling, client).await?;
        let schemas = self.clone();
        let made = place.run(move || {
            let grammars = schemas.grammars().map_err(|why| ApiError::field(field, why))?;
            let literal = |text: &str| literal(&schemas.tokenizer, text);
            let (lark, not_held) = native.as_ref().map(|native| native.lark(&schema, strict, &literal)).unzip();
            let not_held: Vec<Way> = not_held.unwrap_or_default();
            let made = match lark {
                _ if any => return grammars.json_object().map(|made| (made, not_held)).map_err(unsupported),
                Some(lark) => with_stack(STACK, || grammars.lark(lark)).and_then(|made| made),
                None => compile(grammars, &schema, strict),
            };
            let made = made.map_err(|why| unsupported(placed(&schema, &why)))?;
            let begun = native.as_ref().is_some_and(|native| native.begun);
            let made = match native.map(|native| native.calls) {
                _ if !or_text => made,
                Some(calls) if begun => made.after(&calls.trigger()),
                Some(calls) if calls.format.open.trim() == "[" => made.if_begins(b'['),
                _ => made.if_begins(b'{'),
            };
            Ok((made, not_held))
        });
        let (grammar, not_held) = made.await.map_err(|e| forms.refused(field, e))?;
        forms.refuse_strict(&not_held).map_err(|e| forms.refused(field, e))?;
        let mut ways: Vec<&Way> = left_out.ways().collect();
        ways.extend(not_held.iter().filter(|way| !left_out.ways().any(|known| known == *way)));
        let unenforced = ways.into_iter().map(|way| forms.place(way)).collect();
        Ok((self.behind(grammar, thoughts), unenforced))
    }

    /// The grammar of what follows thoughts.
    fn behind(&self, grammar: Grammar, thoughts: Option<(Thoughts, bool)>) -> Grammar {
        match thoughts {
            None => grammar,
            Some((marks, true)) => grammar.after(&marks.close),
            Some((marks, false)) => match self.tokenizer.encode(&marks.open, Special::Parse).as_deref() {
                Ok([token]) => grammar.or_thinks(*token, &marks.close),
                _ => grammar,
            },
        }
    }

    /// What no grammar holds of `schema`, by its trial.
    async fn admit(
        self: &Arc<Schemas>,
        schema: &Value,
        strict: bool,
        native: Option<&Native>,
        client: u64,
        wanted: &Wanted,
    ) -> Result<LeftOut, ApiError> {
        check(schema).map_err(unsupported)?;
        let text = serde_json::to_string(&Question { strict, schema, native }).unwrap_or_default();
        self.verdict(text, schema, client, wanted).await?.map_err(unsupported)
    }

    /// The verdict of a trial of `schema`, which the question `text` asks for, from memory or by running it. A known one does not wait for
    /// other trials.
    async fn verdict(
        self: &Arc<Schemas>,
        text: String,
        schema: &Value,
        client: u64,
        wanted: &Wanted,
    ) -> Result<Verdict, ApiError> {
        if let Some(verdict) = self.known(&text) {
            return Ok(verdict);
        }
        let place = turn(&self.trials, client).await?;
        // The trial that was waited for may have been of the same schema.
        if let Some(verdict) = self.known(&text) {
            return Ok(verdict);
        }
        let (schemas, wanted, schema) = (self.clone(), wanted.clone(), schema.clone());
        place.run(move || schemas.run_trial(text, &schema, &wanted)).await
    }

    fn run_trial(&self, text: String, schema: &Value, wanted: &Wanted) -> Result<Verdict, ApiError> {
        self.tried.add(1);
        let end = self.children.ask(text.as_bytes(), wanted)?;
        // What is the fault of the machine or the client is not remembered.
        let answer = TRIAL.answer(end).map_err(|error| ApiError::from(error).retry_after(1))?;
        let why = match answer.map(|line| serde_json::from_slice::<Verdict>(&line)) {
            Ok(Ok(verdict)) => {
                self.keep(text, verdict.clone());
                return Ok(verdict);
            }
            Ok(Err(_)) => "its trial gave no result".into(),
            Err(why) => why,
        };
        Ok(Err(weighed(schema, &why)))
    }

    fn known(&self, text: &str) -> Option<Verdict> {
        let mut known = lock(&self.known);
        let at = known.iter().position(|(schema, _)| schema == text)?;
        let entry = known.remove(at)?;
        let verdict = entry.1.clone();
        known.push_back(entry);
        Some(verdict)
    }

    fn keep(&self, text: String, verdict: Verdict) {
        let mut known = lock(&self.known);
        known.push_back((text, verdict));
        while known.len() > KEPT || known.iter().map(|(text, _)| text.len()).sum::<usize>() > KEPT_BYTES {
            known.pop_front();
        }
    }
}

/// A text as a grammar has it, with control tokens as tokens.
fn literal(tokenizer: &Tokenizer, text: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut plain = String::new();
    let end = |plain: &mut String, parts: &mut Vec<String>| {
        if !plain.is_empty() {
            parts.push(Value::from(std::mem::take(plain)).to_string());
        }
    };
    for piece in tokenizer.pieces(text) {
        match piece {
            Piece::Text(text) => plain.push_str(text),
            Piece::Token(id) => match tokenizer.token_bytes(id).unwrap_or_default() {
                [] => {
                    end(&mut plain, &mut parts);
                    parts.push(format!("<[{id}]>"));
                }
                bytes => plain.push_str(&String::from_utf8_lossy(bytes)),
            },
        }
    }
    end(&mut plain, &mut parts);
    parts.join(" ")
}

/// A client's turn.
async fn turn(places: &Places, client: u64) -> Result<Place, ApiError> {
    places.take(client).await.map_err(|waiting| {
        let message = format!("{waiting} requests wait for a trial of their schema; retry later");
        ApiError::new(429, message).code("queue_full").retry_after(1)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Compiles on a thread with [`STACK`] bytes of stack.
fn compile(grammars: &Grammars, schema: &Value, strict: bool) -> Result<Grammar, String> {
    with_stack(STACK, || grammars.json_schema(schema, strict))?
}

fn with_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let worker = std::thread::Builder::new().name("schema".into()).stack_size(bytes).spawn_scoped(scope, work);
        let worker = worker.map_err(|e| format!("its thread cannot start: {e}"))?;
        worker.join().map_err(|_| "the library failed".to_owned())
    })
}

/// The library's complaint, with the place in the schema that it is about where that can be told.
fn placed(schema: &Value, why: &str) -> String {
    place_of(schema, why).map_or_else(|| weighed(schema, why), |place| format!("{place}: {why}"))
}

/// The same with the places that make the schema heavy.
fn weighed(schema: &Value, why: &str) -> String {
    match heavy_places(schema) {
        places if places.is_empty() => why.to_owned(),
        places => format!("{why}; see {}", places.join(", ")),
    }
}

/// The whole life of the child: reads a schema as JSON from standard input and writes a `Verdict` as JSON to standard output. `main`
/// calls it when the first argument is [`CHILD_ARGUMENT`].
pub fn child_main() -> ExitCode {
    TRIAL.run(|request| {
        let question = serde_json::from_slice::<Question<Value, Native>>(&request).ok()?;
        check(&question.schema).ok()?;
        serde_json::to_vec(&watched(&question)).ok()
    })
}

/// The verdict of a trial; if the trial takes too long, a message that says where it was, and the process ends.
fn watched(question: &Question<Value, Native>) -> Verdict {
    let at = &Mutex::new(None::<Vec<u8>>);
    std::thread::scope(|scope| {
        let (done, over) = channel::<()>();
        let watch = move || {
            while over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if clock::process_computed() > MAX_TRIAL {
                    let late: Verdict = Err(weighed(&question.schema, &late(lock(at).as_deref())));
                    serde_json::to_vec(&late).ok().and_then(say);
                    // A computation cannot be stopped from outside; the process is a child that is not needed any more.
                    std::process::exit(0);
                }
            }
        };
        let _ = std::thread::Builder::new().spawn_scoped(scope, watch);
        let verdict = trial(question, |text| *lock(at) = Some(text.to_vec()));
        drop(done);
        verdict
    })
}

fn late(at: Option<&[u8]>) -> String {
    match at {
        None => format!("compiling takes more than {MAX_TRIAL:?}"),
        Some(text) => {
            let text = excerpt(String::from_utf8_lossy(&text[text.len().saturating_sub(40)..]));
            format!("finding what may follow '{text}' takes more than {MAX_TRIAL:?}")
        }
    }
}

/// Compiles a schema and walks through the grammar. `told` is given the text before each mask.
///
/// # Errors
/// Why the schema is refused, in words.
fn trial(question: &Question<Value, Native>, mut told: impl FnMut(&[u8]) + Send) -> Verdict {
    let Question { strict, schema, native } = question;
    let small = Grammars::small()?;
    let before = status_bytes("VmHWM:").unwrap_or(0);
    let (mut grammar, rest, left_out) = without_culprits(&small, schema, *strict)?;
    let left_out = LeftOut { ignored: ignored(schema, &grammar.warnings()), ..left_out };
    let mut most = MAX_WALK;
    // What answers are kept to then.
    if let Some(native) = native {
        // Here no token is a control token.
        let literal = |text: &str| if text.is_empty() { String::new() } else { Value::from(text).to_string() };
        grammar = small.lark(native.lark(&rest, *strict, &literal).0).map_err(|why| placed(schema, &why))?;
        most += MAX_NAME;
    }
    if left_out.bytes() > MAX_LEFT_OUT {
        let n = left_out.removed.len() + left_out.ignored.len();
        return Err(format!("{n} of its parts cannot be enforced, too many to list; leave them out"));
    }
    let mut walk = move |way| grammar.clone().walk(way, most, &mut told);
    with_stack(MASK_STACK, move || WAYS.into_iter().try_for_each(&mut walk))??;
    match status_bytes("VmHWM:").unwrap_or(0).saturating_sub(before) {
        more if more > MAX_MEMORY => {
            Err(weighed(schema, &format!("it takes more than {} MiB of memory", MAX_MEMORY >> 20)))
        }
        _ => Ok(left_out),
    }
}

/// The grammar of `schema`, without the parts that the library refuses where not all is wanted; the rest of the schema; and those parts.
fn without_culprits(small: &Grammars, schema: &Value, strict: bool) -> Result<(Grammar, Value, LeftOut), String> {
    let (mut rest, mut left_out) = (schema.clone(), LeftOut::default());
    for _ in 0..MAX_ROUNDS {
        let why = match small.json_schema(&rest, strict) {
            Ok(grammar) => return Ok((grammar, rest, left_out)),
            Err(why) => why,
        };
        let parts = if strict { Vec::new() } else { culprits(small, &rest, &why) };
        if parts.is_empty() {
            return Err(placed(schema, &why));
        }
        parts.iter().for_each(|way| remove(&mut rest, way));
        left_out.removed.extend(parts);
    }
    Err("too many kinds of its parts cannot be enforced".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::call_format::{Body, CallFormat};
    use crate::api::reading::Callable;
    use serde_json::json;

    /// The trial was of the schema alone, and the daemon compiled a grammar that no child had tried.
    #[test]
    fn the_grammar_of_calls_is_tried_too() {
        let tried = |names: usize, between_marks: bool| {
            let arguments: serde_json::Map<_, _> =
                (0..names).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
            let arguments = json!({"type": "object", "properties": arguments, "additionalProperties": false});
            let [between, before_key, before_value, after_value] = [">", "<p=", ">", "</p>"].map(str::to_owned);
            let body = Body::Parameters { between, before_key, before_value, after_value };
            let format = CallFormat { open: "<f=".into(), body, join: None, close: "</f>".into() };
            let callable = vec![Callable { name: "f".into(), arguments: arguments.clone() }];
            let native = Native { calls: NativeCalls { format, callable, parallel: false }, forms: 1, begun: false };
            let schema = json!({"type": "object", "properties": {"name": {"const": "f"}, "arguments": arguments}});
            trial(&Question { strict: true, schema, native: between_marks.then_some(native) }, |_| {})
        };
        assert_eq!(tried(100, true), Ok(LeftOut::default()));
        assert_eq!(tried(1000, false), Ok(LeftOut::default()));
        assert!(tried(1000, true).unwrap_err().contains("items"));
    }
}
