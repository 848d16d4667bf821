//! One sequence of tokens on an engine.

pub use super::batch::{CHUNK, CHUNKS, MAX_CHUNK};

use super::batch::Logits;
use super::state::Engine;
use crate::cpu::MAX_COLUMNS;
use crate::error::{Error, Result};
use crate::model::{KvCache, KvType};

/// A sequence: its tokens so far, and their keys and values.
pub struct Session {
    /// Keys and values of `tokens`.
    pub kv: KvCache,
    /// The tokens whose keys and values are in `kv`.
    pub tokens: Vec<u32>,
}

impl Session {
    /// An empty sequence of up to `context` positions, whose keys and values are stored as `kind`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a context beyond the model's table of positions, if it has one; [`Error::Memory`].
    pub fn new(engine: &Engine, context: usize, kind: KvType) -> Result<Session> {
        let model = &engine.model;
        let limit = model.config.context;
        if model.positions.is_some() && context > limit {
            return Err(Error::Usage(format!("a context of {context}: this model has {limit} positions and no more")));
        }
        Ok(Session { kv: KvCache::new(&model.config, context, kind)?, tokens: Vec::new() })
    }

    /// Runs `tokens` and returns the logits after the last, `[vocab]`. `step(done)` is called after each chunk and between its layers, and may
    /// end the work.
    ///
    /// # Errors
    /// Those of [`Session::check`] and [`Engine::check`], and of `step`.
    pub fn append<'e>(
        &mut self,
        engine: &'e mut Engine,
        tokens: &[u32],
        mut step: impl FnMut(usize) -> Result<()>,
    ) -> Result<&'e mut [f32]> {
        self.check(engine, tokens)?;
        let length = engine.chunk();
        let last = tokens.len().saturating_sub(1) / length * length;
        for (i, chunk) in tokens[..last].chunks(length).enumerate() {
            self.chunk(engine, chunk, Logits::None, &mut || step(i * length))?;
            engine.check()?;
            step((i + 1) * length)?;
        }
        let rest = &tokens[last..];
        if rest.len() > MAX_COLUMNS {
            self.chunk(engine, rest, Logits::Last, &mut || step(last))?;
        } else {
            self.tokens.extend(rest);
            engine.forward(&mut self.kv, rest, Logits::Last);
        }
        // The text can be cut back to here; not to each of single tokens.
        if tokens.len() > 1 {
            self.kv.checkpoint();
        }
        step(tokens.len())?;
        engine.answer()
    }

    /// Runs a chunk, unless `step`, which is called between layers, ends it.
    fn chunk(
        &mut self,
        engine: &mut Engine,
        chunk: &[u32],
        want: Logits,
        step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut stopped = Ok(());
        engine.forward_while(&mut self.kv, chunk, want, &mut || {
            stopped = step();
            stopped.is_ok()
        });
        stopped.map(|()| self.tokens.extend(chunk))
    }

    /// Checks what [`Engine::forward`] relies on: there are tokens, they are in the vocabulary, and they fit the context.
    ///
    /// # Errors
    /// [`Error::Usage`] that says which of these is not so.
    pub fn check(&self, engine: &Engine, tokens: &[u32]) -> Result<()> {
        let vocab = engine.model.config.vocab;
        if tokens.is_empty() {
            return Err(Error::Usage("there are no tokens to run".into()));
        }
        if let Some(bad) = tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::Usage(format!("token {bad} is not below the vocabulary size {vocab}")));
        }
        let (room, asked) = (self.kv.context - self.kv.len, tokens.len());
        if asked > room {
            return Err(Error::Usage(format!(
                "{asked} tokens do not fit: the context of {} has room for {room}; raise it with -c",
                self.kv.context
            )));
        }
        Ok(())
    }

    /// Comes to the end of `begin`, with which it begins: forgets what came after, or reads again what had been given up.
    ///
    /// # Errors
    /// As [`Session::append`].
    pub fn go_to(&mut self, engine: &mut Engine, begin: &[u32], step: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let left = self.rewind(begin.len());
        if left < begin.len() {
            self.append(engine, &begin[left..], step)?;
        }
        Ok(())
    }

    /// Forgets everything from position `len` on, or all where the text cannot go on there ([`KvCache::reach`]). Returns how many tokens are
    /// left.
    pub fn rewind(&mut self, len: usize) -> usize {
        self.tokens.truncate(self.kv.rewind(len));
        self.tokens.len()
    }
}
