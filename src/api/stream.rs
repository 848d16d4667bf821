//! Turns events into JSON objects: whole answers, and chunks of a stream. Answers with choices are written here, others by `WritesParts`.

use super::anthropic_stream::MessageEvents;
use super::error::{ApiError, ErrorForm, unsupported};
use super::forms::AnswerForms;
use super::infill_events::InfillEvents;
use super::model::ServedModel;
use super::ollama_lines::AnswerLines;
use super::reader::Reader;
use super::reading::{Part, Reading};
use super::response_object::ResponseEvents;
use super::stored::Keep;
use super::tools::FunctionCall;
use super::writing::{Response, WritesParts};
use crate::child::Wanted;
use crate::generation::{Delta, Done, Event, Job, Logprob, Reason};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Which API an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// `/api/chat`.
    OllamaChat,
    /// `/api/generate`.
    OllamaGenerate,
    /// `/infill`.
    Infill,
}

impl Wire {
    /// What writes such answers; `None` for those that are lists of choices.
    fn writer(self) -> Option<Box<dyn WritesParts>> {
        match self {
            Wire::Chat | Wire::Text => None,
            Wire::Responses => Some(Box::new(ResponseEvents::default())),
            Wire::Messages => Some(Box::new(MessageEvents::default())),
            Wire::OllamaChat | Wire::OllamaGenerate => Some(Box::new(AnswerLines::new(self == Wire::OllamaChat))),
            Wire::Infill => Some(Box::new(InfillEvents)),
        }
    }

    /// Whether a stream consists of lines; else of server-sent events.
    pub fn is_lines(self) -> bool {
        matches!(self, Wire::OllamaChat | Wire::OllamaGenerate)
    }

    /// Whether a stream has an event of its own for its end. Other streams say by their last event that it is the last.
    pub fn has_end_mark(self) -> bool {
        matches!(self, Wire::Chat | Wire::Text)
    }

    /// The form of errors.
    pub fn error_form(self) -> ErrorForm {
        match self {
            Wire::Chat | Wire::Text | Wire::Responses | Wire::Infill => ErrorForm::OpenAi,
            Wire::Messages => ErrorForm::Anthropic,
            Wire::OllamaChat | Wire::OllamaGenerate => ErrorForm::Ollama,
        }
    }
}

/// A checked request: its jobs and how to answer.
pub struct Prepared {
    /// One job for each choice, in the order of their indices.
    pub jobs: Vec<Job>,
    /// Writes the answer.
    pub answer: Answer,
    /// Whether the answer is sent in chunks while it is generated.
    pub stream: bool,
    /// Choices for each prompt, whose tokens are counted once.
    pub per_prompt: usize,
    /// The forms that every answer may have, whose grammar the jobs are to have ([`Prepared::formed`]); `None` for plain text.
    pub form: Option<AnswerForms>,
    /// JSON pointers of the parts of the request's schemas that the answer is not kept to.
    pub unenforced: Vec<String>,
}

impl Prepared {
    /// Gives the jobs the grammar of their answers' form, once it was tried and compiled: that may take long, and another client's turn
    /// before. `client` is as in [`Job::client`]; the work ends once the answer is not `wanted` any more.
    ///
    /// # Errors
    /// 400 for a form that cannot be enforced: it is never silently left out. 429 if too many wait for theirs.
    pub async fn formed(mut self, client: u64, wanted: &Wanted) -> Result<Prepared, ApiError> {
        if let Some(form) = self.form.take() {
            let (grammar, unenforced) = self.answer.model.schemas.answer(form, client, wanted).await?;
            self.unenforced.extend(unenforced);
            self.jobs.iter_mut().for_each(|job| job.grammar = Some(grammar.clone()));
        }
        Ok(self)
    }
}

/// Writes the JSON of one request's answer.
#[derive(Clone)]
pub struct Answer {
    /// The API whose objects are written.
    pub wire: Wire,
    /// Id of the answer: `chatcmpl-...`, `cmpl-...`, `resp_...` or `msg_...`.
    pub id: String,
    /// When the request was accepted, in seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: Arc<ServedModel>,
    /// How an answer is read: its thoughts, its text, and the calls that it may have.
    pub reading: Arc<Reading>,
    /// Whether a last chunk of a stream reports the numbers of tokens, which are null in those before.
    pub usage: bool,
    /// What the answer repeats of the request, and what is known before it (`Response::echo`); null where that is nothing.
    pub echo: Arc<Value>,
    /// Where it is kept when it is complete; `None` for nowhere.
    pub keep: Option<Arc<Keep>>,
}

/// Tokens of a request, summed over the choices that have ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Tokens of all prompts; each prompt counts once.
    pub prompt: usize,
    /// Of the prompts, tokens whose keys and values were still there.
    pub cached: usize,
    /// Tokens of all answers.
    pub generated: usize,
}

impl Usage {
    /// Adds a choice that has ended: number `index`, of `per_prompt` for each prompt.
    pub fn add(&mut self, done: &Done, index: usize, per_prompt: usize) {
        self.generated += done.generated_tokens;
        if index.is_multiple_of(per_prompt) {
            self.prompt += done.prompt_tokens;
            self.cached += done.cached_tokens;
        }
    }

    fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// The `finish_reason` of an answer that is a call.
const CALLED: &str = "tool_calls";

/// How an answer with so many calls ended.
fn finish_reason(reason: Reason, calls: usize) -> &'static str {
    match reason {
        Reason::Stop if calls > 0 => CALLED,
        Reason::Stop => "stop",
        Reason::Length => "length",
    }
}

/// An answer as far as it has been read.
#[derive(Default)]
struct Said {
    thoughts: String,
    text: String,
    calls: Vec<FunctionCall>,
}

impl Said {
    fn take(&mut self, part: Part) {
        match part {
            Part::Thought(more) => self.thoughts.push_str(&more),
            Part::Text(more) => self.text.push_str(&more),
            Part::Call(name) => self.calls.push(FunctionCall { name, arguments: String::new() }),
            Part::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&more);
                }
            }
        }
    }
}

impl Answer {
    fn object(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let Value::Object(map) = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "choices": choices,
        }) else {
            unreachable!("an object was written")
        };
        map
    }

    fn chunk_name(&self) -> &'static str {
        match self.wire {
            Wire::Text => "text_completion",
            _ => "chat.completion.chunk",
        }
    }

    fn response(&self) -> Response {
        let Answer { id, created, model, echo, keep, .. } = self;
        let (created, model, echo, keep) = (*created, model.clone(), echo.clone(), keep.clone());
        Response { id: id.clone(), created, model, echo, keep }
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.object(self.chunk_name(), vec![choice]);
        if self.usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk.into()
    }

    /// The chunk with a piece of choice `index`; `offset` is the number of bytes of the choice's text before it.
    fn delta_chunk(&self, index: usize, text: &str, logprobs: &[Logprob], offset: usize) -> Value {
        let logprobs = self.logprobs(logprobs, offset);
        self.chunk(match self.wire {
            Wire::Text => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": null}),
            _ => json!({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null}),
        })
    }

    /// The last chunk of choice `index`, with its `finish_reason`.
    fn end_chunk(&self, index: usize, reason: &str) -> Value {
        self.chunk(match self.wire {
            Wire::Text => json!({"index": index, "text": "", "logprobs": null, "finish_reason": reason}),
            _ => json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": reason}),
        })
    }

    /// The id of call number `call` of choice `index`.
    fn call_id(&self, index: usize, call: usize) -> String {
        let own = self.id.rsplit(['-', '_']).next().unwrap_or_default();
        format!("call_{own}_{index}_{call}")
    }

    /// The chunk with a part of choice `index` that is no text; `calls` is the number of its calls so far, this one among them.
    fn part_chunk(&self, index: usize, part: &Part, calls: usize) -> Value {
        let call = calls.saturating_sub(1);
        let delta = match part {
            Part::Thought(text) => json!({"reasoning_content": text}),
            Part::Text(text) => json!({"content": text}),
            Part::Call(name) => {
                let mut begun =
                    FunctionCall { name: name.clone(), arguments: String::new() }.json(&self.call_id(index, call));
                begun["index"] = call.into();
                json!({"tool_calls": [begun]})
            }
            Part::Arguments(more) => json!({"tool_calls": [{"index": call, "function": {"arguments": more}}]}),
        };
        self.chunk(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    /// The chunk with the numbers of tokens: after all choices, and without any.
    pub fn usage_chunk(&self, usage: &Usage) -> Value {
        let mut chunk = self.object(self.chunk_name(), Vec::new());
        chunk.insert("usage".into(), usage.json());
        chunk.into()
    }

    fn whole(&self, choices: Vec<Value>, usage: &Usage) -> Value {
        let object = if self.wire == Wire::Chat { "chat.completion" } else { "text_completion" };
        let mut whole = self.object(object, choices);
        whole.insert("usage".into(), usage.json());
        whole.into()
    }

    fn choice(&self, index: usize, said: &Said, logprobs: &[Logprob], reason: Reason) -> Value {
        let logprobs = self.logprobs(logprobs, 0);
        let reason = finish_reason(reason, said.calls.len());
        if self.wire == Wire::Text {
            return json!({"index": index, "text": said.text, "logprobs": logprobs, "finish_reason": reason});
        }
        let mut message = json!({"role": "assistant", "content": said.text, "refusal": null});
        if !said.thoughts.is_empty() {
            message["reasoning_content"] = said.thoughts.as_str().into();
        }
        if !said.calls.is_empty() {
            let calls = said.calls.iter().enumerate().map(|(call, said)| said.json(&self.call_id(index, call)));
            message["tool_calls"] = calls.collect();
            if said.text.is_empty() {
                message["content"] = Value::Null;
            }
        }
        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    }

    /// How many characters begin in a token.
    fn characters(&self, l: &Logprob) -> usize {
        let begins = |byte: &&u8| **byte & 0xC0 != 0x80;
        self.model.tokenizer.token_bytes(l.token).unwrap_or_default().iter().filter(begins).count()
    }

    /// OpenAI's `logprobs` object; null if the request has none. Text offsets are in characters, the first of them `offset`.
    fn logprobs(&self, logprobs: &[Logprob], offset: usize) -> Value {
        if logprobs.is_empty() {
            return Value::Null;
        }
        let entry = |id: u32, logprob: f32| {
            let (token, bytes) = self.model.token_json(id);
            json!({"token": token, "logprob": finite(logprob), "bytes": bytes})
        };
        match self.wire {
            Wire::Text => {
                let name = |id: u32| self.model.token_json(id).0;
                let mut at = offset;
                let mut place = |l: &Logprob| {
                    let here = at;
                    at += self.characters(l);
                    here
                };
                let top = |l: &Logprob| -> Value {
                    l.top.iter().map(|&(id, p)| (name(id), json!(finite(p)))).collect::<Map<String, Value>>().into()
                };
                json!({
                    "tokens": logprobs.iter().map(|l| name(l.token)).collect::<Vec<_>>(),
                    "token_logprobs": logprobs.iter().map(|l| finite(l.logprob)).collect::<Vec<_>>(),
                    "top_logprobs": logprobs.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": logprobs.iter().map(&mut place).collect::<Vec<_>>(),
                })
            }
            _ => {
                let token = |l: &Logprob| {
                    let mut token = entry(l.token, l.logprob);
                    token["top_logprobs"] = l.top.iter().map(|&(id, p)| entry(id, p)).collect();
                    token
                };
                json!({"content": logprobs.iter().map(token).collect::<Vec<_>>(), "refusal": null})
            }
        }
    }
}

/// Writes one choice of a streamed answer.
pub struct ChoiceStream {
    answer: Answer,
    index: usize,
    /// Characters of its tokens so far, if the request wants logprobs.
    offset: usize,
    reader: Reader,
    /// Calls so far.
    calls: usize,
    /// `None` where the answer is a list of choices.
    writer: Option<Box<dyn WritesParts>>,
}

impl ChoiceStream {
    /// Choice number `index` of an answer.
    pub fn new(answer: &Answer, index: usize) -> ChoiceStream {
        let (reader, writer) = (Reader::new(&answer.reading), answer.wire.writer());
        ChoiceStream { answer: answer.clone(), index, offset: 0, reader, calls: 0, writer }
    }

    /// The events before the first piece.
    pub fn begin(&mut self) -> Vec<Value> {
        if let Some(writer) = &mut self.writer {
            return writer.begin(&self.answer.response());
        }
        if self.answer.wire == Wire::Text {
            return Vec::new();
        }
        let role = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": self.index, "delta": role, "logprobs": null, "finish_reason": null});
        vec![self.answer.chunk(choice)]
    }

    /// An event that says nothing; `None` where a comment does it.
    pub fn idle(&self) -> Option<Value> {
        self.writer.as_ref()?.idle(&self.answer.response())
    }

    /// The next piece.
    pub fn delta(&mut self, delta: &Delta) -> Vec<Value> {
        let thought = Some(delta.thought.clone()).filter(|thought| !thought.is_empty()).map(Part::Thought);
        let parts = thought.into_iter().chain(self.reader.push(&delta.text)).collect();
        self.parts(parts, &delta.logprobs)
    }

    /// The events of parts; the first one's chunk has the log probabilities.
    fn parts(&mut self, parts: Vec<Part>, mut logprobs: &[Logprob]) -> Vec<Value> {
        let mut chunks = Vec::new();
        if let Some(writer) = &mut self.writer {
            let of = self.answer.response();
            return parts.iter().flat_map(|part| writer.part(&of, part)).collect();
        }
        for part in parts {
            self.calls += usize::from(matches!(part, Part::Call(_)));
            match (self.answer.wire, &part) {
                // The older API knows text alone.
                (Wire::Text, Part::Thought(_)) => {}
                (_, Part::Text(text)) => chunks.push(self.piece(text, std::mem::take(&mut logprobs))),
                _ => chunks.push(self.answer.part_chunk(self.index, &part, self.calls)),
            }
        }
        if !logprobs.is_empty() {
            chunks.push(self.piece("", logprobs));
        }
        chunks
    }

    fn piece(&mut self, text: &str, logprobs: &[Logprob]) -> Value {
        let chunk = self.answer.delta_chunk(self.index, text, logprobs, self.offset);
        self.offset += logprobs.iter().map(|l| self.answer.characters(l)).sum::<usize>();
        chunk
    }

    /// The events after the last piece.
    pub fn end(&mut self, done: &Done) -> Vec<Value> {
        let parts = self.reader.end();
        let mut chunks = self.parts(parts, &[]);
        match &mut self.writer {
            Some(writer) => chunks.extend(writer.end(&self.answer.response(), done)),
            None => chunks.push(self.answer.end_chunk(self.index, finish_reason(done.reason, self.calls))),
        }
        chunks
    }
}

/// JSON has no minus infinity; OpenAI writes -9999.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// Collects the events of all choices into one answer that is not streamed.
pub struct Collector {
    answer: Answer,
    per_prompt: usize,
    choices: Vec<(Delta, Option<Done>)>,
}

impl Collector {
    /// For `choices` choices, `per_prompt` of them for each prompt.
    pub fn new(answer: Answer, choices: usize, per_prompt: usize) -> Collector {
        Collector { answer, per_prompt, choices: (0..choices).map(|_| (Delta::default(), None)).collect() }
    }

    /// Takes the next event of choice `index`.
    ///
    /// # Errors
    /// 500 if the engine failed; 400 if the schema became too costly while answering.
    pub fn take(&mut self, index: usize, event: Event) -> Result<(), ApiError> {
        let (said, done) = &mut self.choices[index];
        match event {
            Event::Delta(delta) => {
                said.thought.push_str(&delta.thought);
                said.text.push_str(&delta.text);
                said.logprobs.extend(delta.logprobs);
            }
            Event::Done(end) => *done = Some(end),
            Event::Failed(why) => return Err(failed(why)),
            Event::Unsupported(why) => return Err(unsupported(why)),
        }
        Ok(())
    }

    /// The whole answer.
    ///
    /// # Errors
    /// 500 if a choice has not ended, because the engine's thread has stopped.
    pub fn finish(self) -> Result<Value, ApiError> {
        let (mut usage, mut choices) = (Usage::default(), Vec::new());
        if let Some(writer) = self.answer.wire.writer().filter(|_| self.choices.is_empty()) {
            return Ok(writer.unasked(&self.answer.response()));
        }
        for (index, (Delta { thought, text, logprobs }, done)) in self.choices.iter().enumerate() {
            let done = done.as_ref().ok_or_else(cut_short)?;
            usage.add(done, index, self.per_prompt);
            let mut reader = Reader::new(&self.answer.reading);
            let mut parts: Vec<Part> =
                Some(thought.clone()).filter(|text| !text.is_empty()).map(Part::Thought).into_iter().collect();
            parts.extend(reader.push(text));
            parts.extend(reader.end());
            if let Some(mut writer) = self.answer.wire.writer() {
                return Ok(writer.whole(&self.answer.response(), &parts, done));
            }
            let mut said = Said::default();
            parts.into_iter().for_each(|part| said.take(part));
            choices.push(self.answer.choice(index, &said, logprobs, done.reason));
        }
        Ok(self.answer.whole(choices, &usage))
    }
}

/// 500: the engine could not go on, with the reason.
pub fn failed(why: String) -> ApiError {
    ApiError::new(500, why).code("engine_failed")
}

/// 500: the events ended before the answer was complete.
pub fn cut_short() -> ApiError {
    ApiError::new(500, "the engine stopped before the answer was complete").code("engine_failed")
}
