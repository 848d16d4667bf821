//! The backend of a chat: the daemon, or an engine in this process.

use super::daemon_verbs::{Asked, budget_of};
use super::serve::ModelLoader;
use crate::api::chat::{CHAT_FIELDS, ChatRequest};
use crate::api::reader::Reader;
use crate::api::reading::Part;
use crate::api::{ApiError, Asker, Generates, ServedModel, TOO_LONG, parse};
use crate::child::Wanted;
use crate::client::{Client, until_interrupted};
use crate::clock::Duration;
use crate::error::{Error, Result};
use crate::generation::{Event, Handle, Limits, Reason, Speculation, start};
use crate::model::KvCache;
use crate::serve::{AtEnd, Opened, SetBudget, budgets, with_sizes};
use crate::settings::Settings;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::runtime::Runtime;

pub enum Backend {
    Daemon(Client),
    Here(Here),
}

/// An engine in this process; it ends with it.
pub struct Here {
    model: Arc<ServedModel>,
    handle: Handle,
    runtime: Runtime,
    seeds: u64,
    /// Changes the budget of the device; none without one.
    set_budget: Option<Arc<SetBudget>>,
    /// Changes the host memory limit of the model; none if the whole model is in memory.
    set_ram: Option<Arc<SetBudget>>,
    at_end: Option<AtEnd>,
    /// Of the talk's keys and values.
    kv_bytes: u64,
}

impl Drop for Here {
    /// What the scheduler has learnt is kept.
    fn drop(&mut self) {
        if let Some(at_end) = self.at_end.take() {
            // A failed engine has nothing to keep.
            let _ = self.runtime.block_on(self.handle.ask(0, at_end));
        }
    }
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    /// The answer ended because it had as many tokens as it may have.
    pub cut: bool,
}

impl Backend {
    /// The model in this process, opened by `loader` as the settings say, for one answer at a time.
    pub fn here(model: &str, settings: &Settings, loader: &ModelLoader) -> Result<Backend> {
        let mut settings = settings.clone();
        settings.flag("serve.parallel", "chat", Some(1))?;
        // One talk keeps its slot.
        settings.flag("serve.prompt_cache_bytes", "chat", Some(0))?;
        let opened = loader.open(model, &settings)?;
        let Opened { engine, tokenizer, name, kv, context, sampling, system, set_budget, set_ram, at_end, .. } = opened;
        let tokenizer = Arc::new(tokenizer);
        let (vocab, fingerprint) = (engine.model.config.vocab, engine.model.fingerprint().to_owned());
        let kv_bytes = KvCache::bytes_for(&engine.model.config, context, kv);
        let limits = Limits {
            queue: 1,
            slots: 1,
            context,
            kv,
            deterministic: false,
            rest: Duration::MAX,
            slowdown: 1.0,
            prompt_cache_bytes: 0,
            prompt_cache_every: settings.whole("serve.prompt_cache_every") as usize,
            speculation: settings.text("serve.speculation").and_then(Speculation::named).unwrap_or_default(),
        };
        let model =
            ServedModel::new(name, tokenizer.clone(), vocab, context, fingerprint).with_defaults(sampling, system);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|e| Error::Failed(format!("cannot start the runtime: {e}")))?;
        let handle = start(engine, tokenizer, limits)?;
        let (model, seeds) = (Arc::new(model), crate::config::fresh_seed());
        Ok(Backend::Here(Here {
            model,
            handle,
            runtime,
            seeds,
            set_budget: set_budget.map(Arc::new),
            set_ram: set_ram.map(Arc::new),
            at_end,
            kv_bytes,
        }))
    }

    /// The model's name, its context, and whether it has a chat template.
    pub fn card(&self) -> Result<Value> {
        match self {
            Backend::Here(here) => Ok(here.model.card()),
            Backend::Daemon(client) => {
                let mut list = client.get("/v1/models")?;
                let mut cards = list["data"].as_array_mut().into_iter().flatten();
                match cards.find(|card| card["loaded"] == true) {
                    Some(card) => Ok(card.take()),
                    None => Err(Error::Usage("the daemon has no model; give one: dynamicinfer chat MODEL".into())),
                }
            }
        }
    }

    /// Streams the answer's thoughts and text to `said`.
    ///
    /// # Errors
    /// [`Error::Interrupted`] on Ctrl-C: the answer is cancelled where it is made.
    pub fn answer(&mut self, request: &Value, mut said: impl FnMut(Part) -> Result<()>) -> Result<Taken> {
        match self {
            Backend::Here(here) => here.answer(request, said),
            Backend::Daemon(client) => {
                let mut request = request.clone();
                request["stream"] = true.into();
                request["stream_options"] = json!({"include_usage": true});
                let mut taken = Taken::default();
                client.stream("/v1/chat/completions", &request, |event| {
                    let delta = &event["choices"][0]["delta"];
                    if let Some(piece) = delta["reasoning_content"].as_str() {
                        said(Part::Thought(piece.to_owned()))?;
                    }
                    if let Some(piece) = delta["content"].as_str() {
                        said(Part::Text(piece.to_owned()))?;
                    }
                    taken.cut |= event["choices"][0]["finish_reason"] == "length";
                    let usage = &event["usage"];
                    if usage.is_object() {
                        let number = |value: &Value| value.as_u64().unwrap_or_default();
                        taken = Taken {
                            prompt_tokens: number(&usage["prompt_tokens"]),
                            cached_tokens: number(&usage["prompt_tokens_details"]["cached_tokens"]),
                            generated_tokens: number(&usage["completion_tokens"]),
                            cut: taken.cut,
                        };
                    }
                    Ok(())
                })?;
                Ok(taken)
            }
        }
    }

    /// The budgets, after setting one if requested; `None` where the engine is here and has not what is asked for: a device, if nothing
    /// is to be set, or the memory whose budget is.
    pub fn budget(&self, asked: Asked) -> Result<Option<Value>> {
        let here = match self {
            Backend::Daemon(client) => return budget_of(client, asked).map(Some),
            Backend::Here(here) => here,
        };
        let change = match asked {
            Asked::Show if here.set_budget.is_none() && here.set_ram.is_none() => return Ok(None),
            Asked::Show => None,
            Asked::Vram(bytes) => Some((here.set_budget.clone(), bytes)),
            Asked::Ram(bytes) => Some((here.set_ram.clone(), bytes)),
        };
        if let Some((None, _)) = change {
            return Ok(None);
        }
        let answer = here.handle.ask(0, move |engine| {
            if let Some((Some(set), bytes)) = change {
                set(engine, bytes)?;
            }
            Ok((budgets(engine), engine.model.file_bytes()))
        });
        let answer: Result<(Value, u64)> =
            here.runtime.block_on(answer).map_err(|e| Error::Failed(ApiError::from(e).message))?;
        let (budgets, model) = answer?;
        Ok(Some(with_sizes(budgets, model, here.kv_bytes)))
    }

    /// Reads something of the daemon's; `None` where the engine is here.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Option<Value>> {
        match self {
            Backend::Daemon(client) => client.json(method, path, body).map(Some),
            Backend::Here(_) => Ok(None),
        }
    }
}

impl Here {
    fn answer(&mut self, request: &Value, mut said: impl FnMut(Part) -> Result<()>) -> Result<Taken> {
        let refused = |e: ApiError| match e.code {
            Some(TOO_LONG) => Error::TooLong(e.message),
            _ => Error::Usage(e.message),
        };
        let request: ChatRequest = parse(request.to_string().as_bytes(), CHAT_FIELDS).map_err(refused)?;
        self.seeds = self.seeds.wrapping_add(1);
        let prepared = request.prepare(&self.model, &Asker::patient(0, String::new(), self.seeds)).map_err(refused)?;
        let prepared = self.runtime.block_on(prepared.formed(0, &Wanted::always())).map_err(refused)?;
        let mut reader = Reader::new(&prepared.answer.reading);
        let job = prepared.jobs.into_iter().next().expect("n is 1");
        let span = tracing::debug_span!("request", id = self.seeds, client = 0, model = self.model.name);
        let mut events = span.in_scope(|| self.handle.submit(job)).map_err(|e| refused(e.into()))?;
        self.runtime.block_on(until_interrupted(async move {
            while let Some(event) = events.recv().await {
                match event {
                    Event::Delta(delta) => {
                        said(Part::Thought(delta.thought))?;
                        reader.push(&delta.text).into_iter().try_for_each(&mut said)?;
                    }
                    Event::Failed(why) | Event::Unsupported(why) => return Err(Error::Failed(why)),
                    Event::Done(done) => {
                        reader.end().into_iter().try_for_each(&mut said)?;
                        return Ok(Taken {
                            prompt_tokens: done.prompt_tokens as u64,
                            cached_tokens: done.cached_tokens as u64,
                            generated_tokens: done.generated_tokens as u64,
                            cut: done.reason == Reason::Length,
                        });
                    }
                }
            }
            Err(Error::Failed("the engine stopped before the answer was complete".into()))
        }))
    }
}
