//! What the engine is asked for besides the next tokens of answers, and whose turn it is.
//!
//! Between two tokens of an answer one step of all this is done at most: a question is answered, or some tokens of a text or of a prompt
//! run. So whatever clients ask, and however many they are, an answer goes on. The kinds take turns, and within a kind the clients do.

/// A kind of work besides the next tokens of answers; one step of it is done at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A question about the engine, or a change to it.
    Question,
    /// Some tokens of a text whose embedding is wanted.
    Text,
    /// Some tokens of a prompt.
    Prompt,
}

/// All kinds, in the order of their turns.
const ORDER: [Work; 3] = [Work::Question, Work::Text, Work::Prompt];

/// Remembers whose turn it was last.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    last: Work,
}

impl Default for Turns {
    fn default() -> Turns {
        Turns { last: Work::Prompt }
    }
}

impl Turns {
    /// The kind whose turn it is, of those that wait; `None` if none does.
    pub fn next(&self, waits: impl Fn(Work) -> bool) -> Option<Work> {
        let last = ORDER.iter().position(|&work| work == self.last)?;
        (1..=ORDER.len()).map(|i| ORDER[(last + i) % ORDER.len()]).find(|&work| waits(work))
    }

    /// Notes that a step of this kind was done.
    pub fn done(&mut self, work: Work) {
        self.last = work;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_that_waits_has_its_turn_before_another_has_its_second() {
        for waiting in 0..8u8 {
            let waits = |work: Work| waiting >> (work as u8) & 1 == 1;
            let kinds = ORDER.into_iter().filter(|&work| waits(work)).count();
            let mut turns = Turns::default();
            let mut seen = Vec::new();
            while let Some(work) = turns.next(waits).filter(|_| seen.len() < 12) {
                turns.done(work);
                seen.push(work);
            }
            assert_eq!(seen.is_empty(), kinds == 0);
            for round in seen.chunks_exact(kinds.max(1)) {
                assert!(round.iter().enumerate().all(|(i, work)| !round[..i].contains(work)), "{seen:?}");
            }
        }
    }
}
