//! What chat and text completions have in common.

use super::dialogue::{Dialogue, Talk};
use super::error::ApiError;
use super::fields::{Numbers, TextOr};
use super::forms::{AnswerForms, Form, Forms};
use super::model::ServedModel;
use super::stored::StoredResponses;
use super::stream::{Answer, Prepared, Wire};
use super::unknown::Unknown;
use crate::child::Wanted;
use crate::engine::sampler::SamplingParams;
use crate::generation::Job;
use crate::tokenizer::TextStream;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers per prompt, and prompts per request, at most: each answer takes a place in the queue.
pub const MAX_CHOICES: usize = 8;
/// Likeliest tokens reported at each position of a chat, at most: OpenAI's limit.
pub const MAX_TOP_LOGPROBS: usize = 20;
/// Logit biases are from minus this to this: OpenAI's limit.
const MAX_BIAS: f32 = 100.0;
/// Logit biases in a request. Each is applied at every token; OpenAI takes 300.
const MAX_BIASES: usize = 1024;
/// The field `logit_bias`: token id, as text, to the number added to its logit.
pub type Biases = Numbers<MAX_BIASES>;

/// Declares a request type and the list of its fields' names, which error messages and the OpenAPI document's test use.
macro_rules! fields {
    ($(#[$of:meta])* $name:ident, $fields:ident { $($(#[$meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$of])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $($(#[$meta])* pub $field: Option<$type>,)*
        }
        /// The names of all fields of the request.
        pub const $fields: &[&str] = &[$(stringify!($field),)*];
    };
}
pub(super) use fields;

/// Declares a request type of OpenAI's older APIs, which have many fields in common.
macro_rules! request {
    ($(#[$of:meta])* $name:ident, $fields:ident { $($(#[$meta:meta])* $field:ident: $type:ty,)* }) => {
        super::request::fields! { $(#[$of])* $name, $fields { $($(#[$meta])* $field: $type,)* } }

        impl $name {
            /// Takes out the fields that both kinds of request have.
            fn common(&mut self) -> super::request::Common {
                super::request::Common {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repeat_penalty: self.repeat_penalty,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    seed: self.seed,
                    stop: self.stop.take(),
                    n: self.n,
                    logit_bias: self.logit_bias.take(),
                    response_format: self.response_format.take(),
                    ignore_eos: self.ignore_eos,
                    stream: self.stream,
                    stream_options: self.stream_options,
                }
            }
        }
    };
}
pub(super) use request;

/// Reads the JSON body of a request, in which unknown fields are refused; `fields` are the names it may have, for "did you mean".
///
/// # Errors
/// 400 that names the bad field.
pub fn parse<T: DeserializeOwned>(body: &[u8], fields: &[&str]) -> Result<T, ApiError> {
    parse_with(body, fields, &Unknown::default())
}

/// The same where `unknown` says what becomes of unknown fields.
///
/// # Errors
/// 400 that names the bad field.
pub fn parse_with<T: DeserializeOwned>(body: &[u8], fields: &[&str], unknown: &Unknown) -> Result<T, ApiError> {
    let json = &mut serde_json::Deserializer::from_slice(body);
    let request = unknown.read("", &mut *json, fields)?;
    json.end().map_err(|e| ApiError::new(400, format!("the request's JSON has text after its end: {e}")))?;
    Ok(request)
}

/// Options of a streamed answer.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// Whether a last chunk reports the numbers of tokens. `None`: no.
    pub include_usage: Option<bool>,
    /// Accepted and ignored: padding against eavesdroppers, of which a local socket has none.
    #[serde(rename = "include_obfuscation")]
    pub _include_obfuscation: Option<bool>,
}

/// The client of a request, and the numbers that the request gets.
pub struct Asker {
    /// The queue is fair between clients.
    pub client: u64,
    /// Whose kept answers it may go on from.
    pub keeper: u64,
    /// The request's own id, without its prefix.
    pub id: String,
    /// The seed of a request that names none.
    pub fresh_seed: u64,
    /// Until when the client waits for the answer.
    pub wanted: Wanted,
    /// What becomes of unknown fields in those parts that are read later than the request.
    pub unknown: Unknown,
    /// Answers of `/v1/responses` that a request may go on from.
    pub stored: Arc<StoredResponses>,
}

impl Asker {
    /// A client that waits for as long as it takes.
    pub fn patient(client: u64, id: String, fresh_seed: u64) -> Asker {
        let (wanted, unknown) = (Wanted::always(), Unknown::default());
        Asker { client, keeper: 0, id, fresh_seed, wanted, unknown, stored: Arc::new(StoredResponses::none()) }
    }
}

/// A request whose answer is generated text.
pub trait Generates: DeserializeOwned + Send + 'static {
    /// Its known fields.
    const FIELDS: &'static [&'static str];

    /// Checks the request, renders the conversation (where it is one) with the model's chat template, and makes a job for each answer.
    ///
    /// # Errors
    /// 400 that names the bad field; 404 if the request names another model; 503 if the template's process cannot be started.
    fn prepare(self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError>;

    /// An error with the names that fields have in this request, where it was made of one in another form.
    fn renamed(error: ApiError) -> ApiError {
        error
    }
}

/// A conversation that is to be answered.
pub struct Conversing<'a> {
    /// What was said.
    pub dialogue: Dialogue<'a>,
    /// The field that limits the answer's tokens, and its value.
    pub limit: (&'a str, Option<u64>),
    /// As in [`Job::logprobs`].
    pub logprobs: Option<usize>,
    /// The API of the answer.
    pub wire: Wire,
    /// The answer's id.
    pub id: String,
}

/// The fields that chat and text completions share, unchecked; `None` is a missing field. [`super::chat::ChatRequest`] says what
/// each means.
#[derive(Default)]
pub struct Common {
    /// 0 to 100; `None`: 0.8.
    pub temperature: Option<f32>,
    /// 0 to 1; `None`: 0.95.
    pub top_p: Option<f32>,
    /// 0 keeps all tokens; `None`: 40.
    pub top_k: Option<u64>,
    /// 0 to 1; `None`: 0.05.
    pub min_p: Option<f32>,
    /// 0.01 to 100; `None`: 1, no penalty.
    pub repeat_penalty: Option<f32>,
    /// -100 to 100; `None`: 0.
    pub presence_penalty: Option<f32>,
    /// -100 to 100; `None`: 0.
    pub frequency_penalty: Option<f32>,
    /// `None`: a new one for each request.
    pub seed: Option<i64>,
    /// Texts that end the answer.
    pub stop: Option<TextOr<String>>,
    /// Answers to each prompt, 1 to [`MAX_CHOICES`]; `None`: 1.
    pub n: Option<u64>,
    /// Token id, as text, to a number from -100 to 100.
    pub logit_bias: Option<Biases>,
    /// `None`: plain text.
    pub response_format: Option<ResponseFormat>,
    /// `None`: no.
    pub ignore_eos: Option<bool>,
    /// `None`: no.
    pub stream: Option<bool>,
    /// Refused without `stream`.
    pub stream_options: Option<StreamOptions>,
}

/// Checked sampling parameters and options of a request.
pub struct Plan {
    params: SamplingParams,
    stops: Vec<String>,
    /// Answers to each prompt.
    n: usize,
    logit_bias: Vec<(u32, f32)>,
    response_format: Option<ResponseFormat>,
    /// How answers to a conversation are written.
    talk: Talk,
    /// Control tokens that are a part of what is read.
    spoken: Vec<u32>,
    ignore_eos: bool,
    /// Tokens that end an answer beside the model's own.
    ends: Vec<u32>,
    stream: bool,
    usage: bool,
}

impl Common {
    /// The checked sampling parameters; what the request leaves out is as in `d`, and `fresh_seed` is used where no seed is given.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn sampling(&self, d: SamplingParams, fresh_seed: u64) -> Result<SamplingParams, ApiError> {
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(d.temperature),
            top_k: self.top_k.map_or(d.top_k, |k| usize::try_from(k).unwrap_or(usize::MAX)),
            top_p: self.top_p.unwrap_or(d.top_p),
            min_p: self.min_p.unwrap_or(d.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(d.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            seed: self.seed.map_or(fresh_seed, |seed| seed as u64),
            ..d
        };
        if params.temperature < 0.0 {
            return Err(ApiError::field(
                "temperature",
                format!("temperature is {}; it must be 0 or more", params.temperature),
            ));
        }
        params.validate().map_err(|error| {
            // The sampler names the command line's flag first.
            let message = error.to_string();
            let flag = message.split(' ').next().unwrap_or_default().to_owned();
            let param = flag.trim_start_matches('-').replace('-', "_");
            ApiError::field(param.clone(), message.replacen(&flag, &param, 1))
        })?;
        Ok(params)
    }

    /// The checked texts that end the answer.
    ///
    /// # Errors
    /// 400 for an empty or too long one, and for too many.
    pub fn stops(&mut self) -> Result<Vec<String>, ApiError> {
        let stops = match self.stop.take() {
            None => Vec::new(),
            Some(TextOr::Text(stop)) => vec![stop],
            Some(TextOr::List(stops)) => stops,
        };
        TextStream::continuation(&stops).map_err(|e| ApiError::field("stop", e.to_string()))?;
        Ok(stops)
    }

    /// Checks every field against its range; `fresh_seed` is used where no seed is given.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn check(mut self, model: &ServedModel, fresh_seed: u64) -> Result<Plan, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "stream_options needs stream: true"));
        }
        let params = self.sampling(model.sampling.clone(), fresh_seed)?;
        let stops = self.stops()?;
        let n = self.n.unwrap_or(1);
        if !(1..=MAX_CHOICES as u64).contains(&n) {
            return Err(ApiError::field("n", format!("n is {n}; it must be 1 to {MAX_CHOICES}")));
        }
        let logit_bias = bias(self.logit_bias.unwrap_or_default(), model.vocab)?;
        Ok(Plan {
            params,
            stops,
            n: n as usize,
            logit_bias,
            response_format: self.response_format,
            talk: Talk::default(),
            spoken: Vec::new(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            ends: Vec::new(),
            stream,
            usage: self.stream_options.and_then(|o| o.include_usage).unwrap_or(false),
        })
    }
}

impl Common {
    /// Checks the fields and makes a job for each answer to the conversation.
    ///
    /// # Errors
    /// As [`Generates::prepare`].
    pub fn conversing(
        self,
        asked: Conversing<'_>,
        model: &Arc<ServedModel>,
        asker: &Asker,
    ) -> Result<Prepared, ApiError> {
        let Conversing { dialogue, limit: (param, asked), logprobs, wire, id } = asked;
        let plan = self.check(model, asker.fresh_seed)?;
        let begins = dialogue.begun.is_empty();
        let (prompt, talk) = dialogue.rendered(model, &asker.wanted)?;
        let plan = plan.with_talk(talk, model);
        let max_tokens = room(param, asked, prompt.len(), model.context)?;
        let whole = begins && model.tokenizer.chat_template().is_some() && model.tokenizer.drops_leading_space();
        let jobs = plan.jobs(asker.client, prompt, max_tokens, logprobs, whole);
        plan.prepared(wire, id, model, jobs)
    }
}

impl Plan {
    /// The texts before which the answers end.
    pub fn stops(&self) -> &[String] {
        &self.stops
    }

    /// The answers end with one of these tokens, too.
    pub fn end_with(&mut self, tokens: &[u32]) {
        self.ends.extend(tokens);
    }

    /// The answers are those to a conversation.
    #[must_use]
    fn with_talk(self, talk: Talk, model: &ServedModel) -> Plan {
        let mut spoken: Vec<u32> = talk.reading.marks().flat_map(|mark| model.tokenizer.controls_in(mark)).collect();
        spoken.sort_unstable();
        spoken.dedup();
        Plan { talk, spoken, ..self }
    }

    /// The forms that the answers may have; `None` for plain text.
    ///
    /// # Errors
    /// 400 for a `response_format` that is not known.
    fn forms(&self) -> Result<Option<AnswerForms>, ApiError> {
        let Talk { tools, native, reading } = &self.talk;
        let format = self.response_format.as_ref().map_or(Ok(Vec::new()), |f| f.forms(tools.is_some()))?;
        let thoughts = reading.thoughts.clone().map(|marks| (marks, reading.thinking));
        let Some(tools) = tools else {
            let forms = (!format.is_empty()).then_some(Forms(format));
            return Ok(forms.map(|forms| AnswerForms { forms, calls: 0, or_text: false, native: None, thoughts }));
        };
        let mut forms = tools.forms();
        let (calls, or_text) = (forms.len(), !tools.required && format.is_empty());
        forms.extend(format.into_iter().filter(|_| !tools.required));
        Ok(Some(AnswerForms { forms: Forms(forms), calls, or_text, native: native.clone(), thoughts }))
    }

    /// One job for each answer to `prompt`, without the grammar of the answer's form; answer i draws with seed + i. `whole`: the answer is a
    /// text of its own and does not continue the prompt ([`Job::whole`]). `client` is as in [`Job::client`].
    pub fn jobs(
        &self,
        client: u64,
        prompt: Vec<u32>,
        max_tokens: usize,
        logprobs: Option<usize>,
        whole: bool,
    ) -> Vec<Job> {
        let job = |i: usize| Job {
            client,
            owner: 0,
            prompt: prompt.clone(),
            params: SamplingParams { seed: self.params.seed.wrapping_add(i as u64), ..self.params.clone() },
            max_tokens,
            lines: None,
            ends: self.ends.clone(),
            stops: self.stops.clone(),
            whole,
            ignore_eos: self.ignore_eos,
            logit_bias: self.logit_bias.clone(),
            logprobs,
            spoken: self.spoken.clone(),
            thoughts: None,
            grammar: None,
        };
        (0..self.n).map(job).collect()
    }

    /// Puts `jobs`, of all prompts, together with what is needed to write the answer.
    ///
    /// # Errors
    /// 400 for a `response_format` that is not known.
    pub fn prepared(
        self,
        wire: Wire,
        id: String,
        model: &Arc<ServedModel>,
        jobs: Vec<Job>,
    ) -> Result<Prepared, ApiError> {
        let form = self.forms()?;
        let Plan { talk: Talk { tools, reading, .. }, stream, usage, n: per_prompt, .. } = self;
        let reading = Arc::new(reading);
        let (created, echo) = (crate::clock::unix_seconds(), Arc::new(Value::Null));
        let (usage, model) = (stream && usage, model.clone());
        let answer = Answer { wire, id, created, model, reading, usage, echo, keep: None };
        let unenforced = tools.map_or(Vec::new(), |tools| tools.left_out);
        Ok(Prepared { per_prompt, jobs, answer, stream, form, unenforced })
    }
}

/// Checks token ids and biases.
fn bias(biases: Biases, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let refuse = |why: String| ApiError::field("logit_bias", why);
    let entry = |(token, bias): (&String, &f64)| {
        let id = token.parse::<u32>().ok().filter(|&id| (id as usize) < vocab);
        let id = id.ok_or_else(|| {
            refuse(format!("logit_bias: '{}' is not a token id below {vocab}", crate::error::excerpt(token)))
        })?;
        let bias = Some(*bias as f32).filter(|b| (-MAX_BIAS..=MAX_BIAS).contains(b));
        let bias =
            bias.ok_or_else(|| refuse(format!("logit_bias of {id} must be a number from -{MAX_BIAS} to {MAX_BIAS}")))?;
        Ok((id, bias))
    };
    biases.0.iter().map(entry).collect()
}

/// Tokens that an answer may have: what was `asked` for, and no more than the context has left after `prompt` tokens. `param` names the
/// field.
///
/// # Errors
/// 400 if the request has 0, or the prompt fills the context.
pub fn room(param: &str, asked: Option<u64>, prompt: usize, context: usize) -> Result<usize, ApiError> {
    if asked == Some(0) {
        return Err(ApiError::field(param, format!("{param} is 0; it must be 1 or more")));
    }
    if prompt >= context {
        return Err(ApiError::too_long("messages", prompt, false, context));
    }
    let room = context - prompt;
    Ok(asked.map_or(room, |asked| usize::try_from(asked).unwrap_or(usize::MAX).min(room)))
}

/// The field `response_format`: which form the answer must have.
#[derive(Clone, Debug, Deserialize)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Needed by type `json_schema`, refused for the others.
    pub json_schema: Option<JsonSchema>,
}

/// A named schema, as OpenAI's API wraps it.
#[derive(Clone, Debug, Deserialize)]
pub struct JsonSchema {
    /// Accepted and ignored.
    #[serde(rename = "name")]
    pub _name: Option<String>,
    /// Accepted and ignored.
    #[serde(rename = "description")]
    pub _description: Option<String>,
    /// The JSON schema; `None` is refused.
    #[serde(default, deserialize_with = "super::fields::tree")]
    pub schema: Option<Value>,
    /// Whether a schema that no grammar can hold all of is refused. `None`: no, as much of it is enforced as can be.
    pub strict: Option<bool>,
    /// JSON pointer of the schema in the request; `None`: as in a chat.
    #[serde(skip)]
    place: Option<&'static str>,
}

impl JsonSchema {
    /// A schema without a name, at the place with this JSON pointer.
    pub fn at(place: &'static str, schema: Option<Value>, strict: Option<bool>) -> JsonSchema {
        JsonSchema { _name: None, _description: None, schema, strict, place: Some(place) }
    }
}

impl ResponseFormat {
    /// The forms that the answer may have; none for plain text. `calls`: it may also be a call of a function.
    ///
    /// # Errors
    /// 400 for a format that is not known: it is never silently left out.
    pub fn forms(&self, calls: bool) -> Result<Vec<Form>, ApiError> {
        let refuse = |why: String| ApiError::field("response_format", why);
        let object = |schema: Value| Form { schema, strict: None, given: "", place: "/response_format".into() };
        match (self.kind.as_str(), &self.json_schema) {
            ("text", None) => Ok(Vec::new()),
            ("json_object", None) if !calls => Ok(vec![object(json!({"type": "object"}))]),
            // What has both names is a call, whose schema would not be kept to if any object could have them.
            ("json_object", None) => {
                let without = |name: &str| object(json!({"type": "object", "properties": {name: false}}));
                Ok(["name", "arguments"].map(without).into())
            }
            ("json_schema", Some(JsonSchema { schema: Some(schema), strict, place, .. })) => {
                let place = place.unwrap_or("/response_format/json_schema/schema").into();
                Ok(vec![Form { schema: schema.clone(), strict: Some(*strict == Some(true)), given: "", place }])
            }
            ("json_schema", _) => {
                Err(ApiError::field("response_format.json_schema.schema", "json_schema needs a schema"))
            }
            ("text" | "json_object", Some(_)) => Err(refuse("json_schema needs type: json_schema".into())),
            (kind, _) => {
                let kind = crate::error::excerpt(kind);
                Err(refuse(format!("unknown type '{kind}'; use text, json_object or json_schema")))
            }
        }
    }

    /// Whether it requires JSON.
    pub fn is_json(&self) -> bool {
        self.kind != "text"
    }
}
