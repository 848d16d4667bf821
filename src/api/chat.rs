//! POST /v1/chat/completions.

use super::dialogue::Dialogue;
use super::error::{ApiError, refuse};
use super::fields::{Item, TextOr};
use super::messages::ChatMessage;
use super::model::ServedModel;
use super::request::{
    Asker, Biases, Conversing, Generates, MAX_TOP_LOGPROBS, ResponseFormat, StreamOptions, request, room,
};
use super::stream::{Prepared, Wire};
use super::tools::Tools;
use super::unknown::Given;
use crate::engine::sampler::SamplingParams;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;

request! {
    /// Body of POST /v1/chat/completions. A field that is not listed is refused by name; `None` is a field that was left out.
    ChatRequest, CHAT_FIELDS {
        /// Name of the loaded model, or empty. `None`: whichever is loaded.
        model: String,
        /// The conversation so far, oldest first: 1 to 4096 messages.
        messages: Vec<ChatMessage>,
        /// Whether the answer is sent as server-sent events while it is generated. `None`: no.
        stream: bool,
        /// Only taken with `stream: true`.
        stream_options: StreamOptions,
        /// Tokens of the answer at most, 1 or more. `None`: as many as the context has room for.
        max_tokens: u64,
        /// The same under OpenAI's newer name; it wins over `max_tokens`.
        max_completion_tokens: u64,
        /// 0 takes the likeliest token; above it, divides the logits before drawing. `None`: 0.8.
        temperature: f32,
        /// Draws from the likeliest tokens whose probabilities sum to at least this, 0 to 1. `None`: 0.95.
        top_p: f32,
        /// Draws from this many of the likeliest tokens; 0 for all. `None`: 40.
        top_k: u64,
        /// Draws from tokens at least this many times as likely as the likeliest, 0 to 1. `None`: 0.05.
        min_p: f32,
        /// Divides the positive logits of recent tokens and multiplies the negative ones. `None`: 1, no penalty.
        repeat_penalty: f32,
        /// Subtracted from the logit of every recent token. `None`: 0.
        presence_penalty: f32,
        /// Subtracted from the logit of a recent token for each time it occurred. `None`: 0.
        frequency_penalty: f32,
        /// Seed of the random draws; answer i of a prompt takes `seed + i`. `None`: a new one for each request.
        seed: i64,
        /// The answer ends before the first of these texts. `None`: only the model ends it.
        stop: TextOr<String>,
        /// Answers to each prompt, 1 to [`MAX_CHOICES`](super::request::MAX_CHOICES). `None`: 1.
        n: u64,
        /// Whether the log probability of each token of the answer is reported. `None`: no.
        logprobs: bool,
        /// How many of the likeliest tokens are reported at each position, 0 to 20; needs `logprobs: true`.
        top_logprobs: u64,
        /// Added to the logits of single tokens: token id (as text) to a number from -100 to 100.
        logit_bias: Biases,
        /// Plain text, any JSON object, or JSON of a schema. `None`: plain text.
        response_format: ResponseFormat,
        /// Whether generation continues after the model's end-of-text token. `None`: no.
        ignore_eos: bool,
        /// Functions that the answer may call, 128 at most ([`super::tools`]).
        #[serde(deserialize_with = "super::fields::tree")]
        tools: Value,
        /// `auto`, `none`, `required`, or the function to call. `None`: `auto`.
        #[serde(deserialize_with = "super::fields::tree")]
        tool_choice: Value,
        /// Whether an answer may have several calls, where the model's own format has them. `None`: yes.
        parallel_tool_calls: bool,
        /// Variables of the model's chat template, such as `enable_thinking`: an object. A model without a template has none.
        #[serde(deserialize_with = "super::fields::tree")]
        chat_template_kwargs: Value,
        /// How much a model thinks, for templates that know it (`low`, `medium`, `high`); `none`: as `enable_thinking: false`.
        reasoning_effort: String,
        /// The variable of the same name of the model's chat template.
        enable_thinking: bool,
        /// Accepted and ignored, as the fields that follow up to `modalities`.
        user: Given,
        /// About the request.
        metadata: Given,
        /// About the client.
        client_metadata: Given,
        /// Nothing is stored.
        store: Given,
        /// There is one service.
        service_tier: Given,
        /// How long an answer is meant to be, for models that know the word.
        verbosity: Given,
        /// Keys and values of prompts are kept without being asked for, as with the fields that follow.
        prompt_cache_key: Given,
        /// A hint.
        prompt_cache_retention: Given,
        /// A hint.
        prompt_cache_options: Given,
        /// A hint.
        cache_control: Given,
        /// A hint.
        cache_prompt: Given,
        /// About the client's user.
        safety_identifier: Given,
        /// Refused unless it is text alone.
        modalities: Item,
        /// Refused if it says anything, as the fields that follow.
        audio: Given,
        /// A text that the answer is expected to be like.
        prediction: Given,
        /// Nothing searches the web.
        web_search_options: Given,
        /// Obsolete.
        functions: Given,
        /// Obsolete.
        function_call: Given,
    }
}

/// The field `chat_template_kwargs`: variables of the model's chat template.
///
/// # Errors
/// 400 for what is no object, and for variables that the request has in another place.
fn variables(given: Option<Value>) -> Result<Map<String, Value>, ApiError> {
    /// Where a request has what a template finds in them.
    const OWN: [(&str, &str); 6] = [
        ("messages", "the field messages has them"),
        ("tools", "the field tools has them"),
        ("add_generation_prompt", "a prompt always ends where the answer begins"),
        ("chat_template", "the model has its own"),
        ("bos_token", "the model has its own"),
        ("eos_token", "the model has its own"),
    ];
    const FIELD: &str = "chat_template_kwargs";
    match given {
        None => Ok(Map::new()),
        Some(Value::Object(given)) => match OWN.into_iter().find(|(name, _)| given.contains_key(*name)) {
            None => Ok(given),
            Some((name, why)) => {
                Err(ApiError::field(format!("{FIELD}.{name}"), format!("'{name}' cannot be set: {why}")))
            }
        },
        Some(_) => Err(ApiError::field(FIELD, format!("{FIELD} must be an object of names and values"))),
    }
}

/// Tells the template how much the model is to think; what is said in another place counts.
pub fn effort(variables: &mut Map<String, Value>, effort: Option<&str>) {
    let Some(effort) = effort.filter(|effort| !effort.is_empty()) else { return };
    if effort == "none" {
        variables.entry("enable_thinking").or_insert(false.into());
    } else {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
}

impl ChatRequest {
    /// The variables of the template: what the request says in fields of their own, and the rest.
    fn variables(&mut self) -> Result<Map<String, Value>, ApiError> {
        let mut given = variables(self.chat_template_kwargs.take())?;
        if let Some(thinks) = self.enable_thinking {
            given.insert("enable_thinking".into(), thinks.into());
        }
        effort(&mut given, self.reasoning_effort.as_deref());
        Ok(given)
    }

    /// Checks the values of all fields that can be checked without the model and the messages.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn check_values(mut self) -> Result<(), ApiError> {
        for (field, asked) in [("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)] {
            room(field, asked, 0, usize::MAX)?;
        }
        self.variables()?;
        let mut common = self.common();
        common.sampling(SamplingParams::default(), 0)?;
        common.stops().map(drop)
    }
}

impl ChatRequest {
    /// Refuses what could change the answer and is not supported.
    fn refuse(&self) -> Result<(), ApiError> {
        let given = |field: Option<Given>| field.is_some_and(|field| field.0);
        let only_text = |item: &Item| matches!(item, Item::Texts(list) if list.iter().all(|kind| kind == "text"));
        let modalities = self.modalities.as_ref().is_some_and(|item| !only_text(item) && *item != Item::Tokens(vec![]));
        let refused = [
            ("modalities", modalities, "answers are text only; leave it out"),
            ("audio", given(self.audio), "answers are text only; leave it out"),
            ("prediction", given(self.prediction), "a predicted text is not supported; leave it out"),
            ("web_search_options", given(self.web_search_options), "nothing searches the web here; leave it out"),
            ("functions", given(self.functions), "it is obsolete; send the functions in tools"),
            ("function_call", given(self.function_call), "it is obsolete; send the choice in tool_choice"),
        ];
        refuse(refused)
    }
}

impl Generates for ChatRequest {
    const FIELDS: &'static [&'static str] = CHAT_FIELDS;

    fn prepare(mut self, model: &Arc<ServedModel>, asker: &Asker) -> Result<Prepared, ApiError> {
        self.refuse()?;
        let tools = Tools::read(self.tools.take(), self.tool_choice.take(), &asker.unknown)?;
        let dialogue = Dialogue {
            field: "messages",
            said: self.messages.take().unwrap_or_default(),
            instructions: None,
            begun: String::new(),
            tools,
            parallel: self.parallel_tool_calls.unwrap_or(true),
            json: self.response_format.as_ref().is_some_and(ResponseFormat::is_json),
            variables: self.variables()?,
        };
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
            (true, top) => {
                let top = top.unwrap_or(0);
                if top > MAX_TOP_LOGPROBS as u64 {
                    let message = format!("top_logprobs is {top}; it must be 0 to {MAX_TOP_LOGPROBS}");
                    return Err(ApiError::field("top_logprobs", message));
                }
                Some(top as usize)
            }
        };
        let limit = match self.max_completion_tokens {
            Some(most) => ("max_completion_tokens", Some(most)),
            None => ("max_tokens", self.max_tokens),
        };
        let asked = Conversing { dialogue, limit, logprobs, wire: Wire::Chat, id: format!("chatcmpl-{}", asker.id) };
        self.common().conversing(asked, model, asker)
    }
}
