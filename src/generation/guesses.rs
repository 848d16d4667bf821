//! The worker's steps over guesses: which tokens go along in a pass to be compared, and what an answer gets of them.

use super::sequence::Phase;
use super::speculation::{Guessed, MAX_GUESSED, look_up};
use super::worker::{Worker, is_prompt, leave};
use crate::engine::BatchToken;

impl Worker {
    /// Adds guesses to a pass that has the next token of the only answer, where nothing else waits for its end.
    pub(super) fn add_guesses(&mut self) -> Guessed {
        if !self.guesser.may_guess() || self.has_texts() || self.running.iter().any(is_prompt) {
            return Guessed::default();
        }
        let Some(sequence) = self.running.iter().find(|s| s.goes_on()) else { return Guessed::default() };
        let Phase::Decoding(next) = sequence.phase else { return Guessed::default() };
        let text = self.slots.tokens(sequence.slot);
        let room = self.limits.context - text.len() - 1;
        let mut guesses = [0; MAX_GUESSED];
        let run = look_up(text, next, &mut guesses);
        let most = room.min(sequence.left() - 1);
        let count = if run > 0 { self.guesser.plan(run, most) } else { 0 };
        self.columns.extend(guesses[..count].iter().map(|&token| BatchToken { sequence: sequence.slot, token }));
        self.metrics.guessed_tokens.add(count as u64);
        Guessed { run, count }
    }

    /// Gives the answers at `places`, which were in the last pass in this order, their next tokens: one each, or where `guessed` tokens went
    /// along as many as come one after another as they were guessed. Each is chosen and sent as if it came alone. Returns how many all got.
    pub(super) fn deal(&mut self, places: impl Iterator<Item = usize>, guessed: usize) -> usize {
        let mut tokens = 0;
        let vocab = self.engine.model.config.vocab;
        let mut rows = self.engine.logits().chunks_exact_mut(vocab);
        let mut columns = self.columns.chunks_exact(1 + guessed);
        for at in places {
            let sequence = &mut self.running[at];
            if !sequence.goes_on() {
                continue;
            }
            let guesses = &columns.next().expect("columns for each")[1..];
            let first = self.slots.caches[sequence.slot].len - guessed;
            let (mut taken, mut ended) = (0, None);
            for (i, logits) in rows.by_ref().take(1 + guessed).enumerate() {
                let room = self.limits.context - first - i;
                ended = sequence.step(logits, room, &self.tokenizer, &self.metrics);
                taken = i;
                let is_guessed = |guess: &BatchToken| sequence.phase == Phase::Decoding(guess.token);
                if ended.is_some() || !guesses.get(i).is_some_and(is_guessed) {
                    break;
                }
            }
            tokens += 1 + taken;
            self.metrics.decode_columns.add(1);
            if guessed > 0 {
                self.metrics.accepted_tokens.add(taken as u64);
                self.slots.cut(sequence.slot, first + taken);
            }
            if let Some(ended) = ended {
                let sequence = self.running.swap_remove(at);
                self.slots.give_back(sequence.slot);
                leave(sequence, ended, &mut self.leaving, &self.metrics);
            }
        }
        tokens
    }
}
