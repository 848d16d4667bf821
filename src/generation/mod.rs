//! Answers for many clients from one engine: a bounded queue that is fair between clients, several sequences at once, and text as it is
//! generated.
//!
//! One thread, the [`worker`]'s, owns the engine; everybody else holds a [`Handle`]. A [`Job`] goes in, [`Event`]s come out, and dropping
//! the receiver of the events cancels the job.

pub mod embedding;
pub mod grammar;
mod guesses;
pub mod handle;
pub mod job;
mod lines;
mod logprobs;
pub mod metrics;
pub mod outbox;
mod pace;
pub mod prompt_cache;
pub mod prompt_files;
pub mod prompt_policy;
mod prompts;
pub mod queue;
mod sequence;
pub mod slots;
pub mod speculation;
pub mod thoughts;
mod turns;
pub mod worker;

pub use grammar::{Grammar, Grammars, style};
pub use handle::{Handle, Limits};
pub use job::{Delta, Done, Event, Job, Logprob, Reason, Refused};
pub use lines::LineLimits;
pub use metrics::Metrics;
pub use outbox::Events;
pub use prompt_files::PromptDir;
pub use speculation::Speculation;
pub use thoughts::ThoughtBudget;
pub use worker::{start, start_with};
