//! A talk with a model: its turns, and what is sent of them.

use super::chat_backend::{Backend, Taken};
use super::wrap::{Wrap, columns};
use crate::api::reading::Part;
use crate::clock;
use crate::error::{Error, Result, safe_text};
use crate::interrupt;
use serde_json::{Map, Value, json};

const MAX_TOKENS: &str = "max_tokens";
/// Shares of the context. The conversation so far takes at most the first, and an answer without a limit at most the second: a model that
/// finds no end would leave no room for the next question, and an eighth is left for it.
const MAX_SAID: f64 = 0.625;
const MAX_ANSWER: f64 = 0.25;
/// The share of the conversation that remains when turns are dropped: the keys of the rest can then be reused for some turns.
const KEPT: f64 = 0.375;

/// The conversation so far, and its model.
pub struct ChatSession {
    pub backend: Backend,
    /// The model's name in requests, and as it is shown.
    pub model: String,
    pub name: String,
    pub system: Option<String>,
    /// (user, assistant)
    pub turns: Vec<(String, String)>,
    /// So many of the first turns are no longer sent: with them the talk is longer than the context.
    pub left_out: usize,
    /// Tokens of the model's context.
    pub context: u64,
    /// Fields of the request that /set has set.
    pub set: Map<String, Value>,
    pub last: Option<(Taken, f64)>,
}

impl ChatSession {
    pub fn messages(&self, question: &str) -> Vec<Value> {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let mut messages: Vec<Value> = self.system.iter().map(|system| message("system", system)).collect();
        for (user, assistant) in &self.turns[self.left_out..] {
            messages.extend([message("user", user), message("assistant", assistant)]);
        }
        messages.push(message("user", question));
        messages
    }

    /// Sends the question, and prints the answer as it streams. An answer interrupted by Ctrl-C is kept in part.
    pub fn ask(&mut self, question: &str) -> Result<()> {
        let start = clock::now();
        let before = self.left_out;
        self.make_room(question);
        let (mut answer, result) = self.answer_to(question);
        let mut result = result;
        while matches!(result, Err(Error::TooLong(_))) && self.left_out < self.turns.len() {
            self.left_out += 1;
            (answer, result) = self.answer_to(question);
        }
        let seconds = start.elapsed().as_secs_f64();
        super::print("\n")?;
        if self.left_out > before {
            eprintln!(
                "(the first {} of {} turns are dropped: the conversation exceeds the model's context of {} \
                 tokens; /clear starts a new one)",
                self.left_out,
                self.turns.len(),
                self.context
            );
        }
        match result {
            Ok(taken) => {
                if taken.cut && !self.set.contains_key(MAX_TOKENS) {
                    eprintln!("(cut after {} tokens; /set max_tokens N allows more)", taken.generated_tokens);
                }
                self.last = Some((taken, seconds));
            }
            Err(Error::Interrupted) => {
                interrupt::take();
                eprintln!("(stopped)");
            }
            Err(Error::TooLong(why)) => {
                eprintln!("{why}");
                eprintln!(
                    "(this message alone exceeds the context; send it in parts, or /clear to start a new \
                     conversation)"
                );
                return Ok(());
            }
            Err(error) => {
                eprintln!("{error}");
                return Ok(());
            }
        }
        self.turns.push((question.to_owned(), answer));
        Ok(())
    }

    /// The answer or its part, printed meanwhile, and how it ended.
    fn answer_to(&mut self, question: &str) -> (String, Result<Taken>) {
        let most = (self.context as f64 * MAX_ANSWER).max(1.0) as u64;
        let mut request = json!({"model": self.model, "messages": self.messages(question), (MAX_TOKENS): most});
        for (field, value) in &self.set {
            request[field] = value.clone();
        }
        let (mut answer, mut lines, mut thinks) = (String::new(), Wrap::default(), false);
        let result = self.backend.answer(&request, |part| {
            // Thoughts are shown and no part of the talk.
            let piece = match part {
                Part::Thought(piece) => {
                    thinks |= !piece.is_empty();
                    piece
                }
                Part::Text(piece) => {
                    answer.push_str(&piece);
                    let apart = !piece.is_empty() && std::mem::take(&mut thinks);
                    if apart { format!("\n\n{piece}") } else { piece }
                }
                Part::Call(_) | Part::Arguments(_) => return Ok(()),
            };
            // What a terminal acts on has no width: it is replaced before lines are measured.
            super::print_as_it_is(&lines.push(&safe_text(&piece), columns()))
        });
        let rest = super::print_as_it_is(&lines.finish(columns()));
        (answer, result.and_then(|taken| rest.map(|()| taken)))
    }

    /// Leaves out the first turns where, by the tokens that the last answer took a byte, the talk would take more than [`MAX_SAID`].
    fn make_room(&mut self, question: &str) {
        let Some((taken, _)) = self.last else { return };
        let bytes = |turns: &[(String, String)]| turns.iter().map(|(q, a)| q.len() + a.len()).sum::<usize>() as f64;
        let system = self.system.as_ref().map_or(0, String::len) as f64;
        let sent = bytes(&self.turns[self.left_out..]) + system;
        let tokens_a_byte = (taken.prompt_tokens + taken.generated_tokens) as f64 / sent.max(1.0);
        let share = |from: usize| {
            (bytes(&self.turns[from..]) + system + question.len() as f64) * tokens_a_byte / self.context as f64
        };
        if share(self.left_out) > MAX_SAID {
            let stays = (self.left_out..self.turns.len()).find(|&from| share(from) <= KEPT);
            self.left_out = stays.unwrap_or(self.turns.len());
        }
    }

    /// Begins anew with these turns.
    pub fn restart(&mut self, turns: Vec<(String, String)>) {
        (self.turns, self.left_out, self.last) = (turns, 0, None);
    }

    /// Takes the last question back.
    pub fn take_back(&mut self) -> Option<String> {
        let (question, _) = self.turns.pop()?;
        self.left_out = self.left_out.min(self.turns.len());
        Some(question)
    }
}
