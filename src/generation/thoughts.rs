//! Ends a model's thoughts after so many tokens.

/// How many tokens an answer may think, and how its thoughts end then.
#[derive(Clone, Debug)]
pub struct ThoughtBudget {
    left: usize,
    open: Box<[u8]>,
    close: Box<[u8]>,
    ending: Vec<u32>,
    phase: Phase,
    /// What was generated last, as far as a mark may begin in it.
    seen: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The answer has no text yet.
    Before,
    Thinking,
    /// So many tokens of `ending` are there.
    Ending(usize),
    /// There are no thoughts, or none any more.
    Over,
}

impl ThoughtBudget {
    /// Of `tokens` tokens, for thoughts between the texts `open` and `close`; `thinking`: the prompt ends within them. They are ended by the
    /// tokens `ending`, which have `close` in their text.
    pub fn new(tokens: usize, (open, close): (&str, &str), thinking: bool, ending: Vec<u32>) -> ThoughtBudget {
        let phase = match (thinking, tokens) {
            (true, 0) => Phase::Ending(0),
            (true, _) => Phase::Thinking,
            (false, _) => Phase::Before,
        };
        let [open, close] = [open, close].map(|mark| mark.as_bytes().into());
        ThoughtBudget { left: tokens, open, close, ending, phase, seen: Vec::new() }
    }

    /// The token that must come next; `None`: any may.
    pub fn forced(&self) -> Option<u32> {
        match self.phase {
            Phase::Ending(at) => self.ending.get(at).copied(),
            _ => None,
        }
    }

    /// Takes the bytes of the answer's next token.
    pub fn accept(&mut self, bytes: &[u8]) {
        match self.phase {
            Phase::Before => {
                self.seen.extend_from_slice(bytes);
                let seen = self.seen.trim_ascii_start();
                if seen.starts_with(&self.open) {
                    self.seen.clear();
                    self.phase = if self.left == 0 { Phase::Ending(0) } else { Phase::Thinking };
                } else if !self.open.starts_with(seen) {
                    self.phase = Phase::Over;
                }
            }
            Phase::Thinking => {
                self.left -= 1;
                self.seen.extend_from_slice(bytes);
                if self.seen.windows(self.close.len().max(1)).any(|window| *window == *self.close) {
                    self.phase = Phase::Over;
                } else if self.left == 0 {
                    self.phase = Phase::Ending(0);
                }
                let old = self.seen.len().saturating_sub(self.close.len().saturating_sub(1));
                self.seen.drain(..old);
            }
            Phase::Ending(at) if at + 1 < self.ending.len() => self.phase = Phase::Ending(at + 1),
            Phase::Ending(_) | Phase::Over => self.phase = Phase::Over,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDING: [u32; 2] = [7, 8];

    /// What is forced while these tokens come, and after the last.
    fn forced(tokens: usize, thinking: bool, pieces: &[&str]) -> Vec<Option<u32>> {
        let mut budget = ThoughtBudget::new(tokens, ("<think>", "</think>"), thinking, ENDING.to_vec());
        let mut found = vec![budget.forced()];
        for piece in pieces {
            budget.accept(piece.as_bytes());
            found.push(budget.forced());
        }
        found
    }

    #[test]
    fn thoughts_end_after_their_tokens_and_not_before() {
        let none = None;
        assert_eq!(forced(2, true, &["a", "b", "</think>", "x", "y"]), [none, none, Some(7), Some(8), none, none]);
        assert_eq!(
            forced(1, false, &["\n", "<thi", "nk>", "a", "\n", "x"]),
            [none, none, none, none, Some(7), Some(8), none]
        );
        assert_eq!(forced(0, true, &["\n", "x", "y"]), [Some(7), Some(8), none, none]);
    }

    #[test]
    fn an_answer_that_ends_its_thoughts_or_has_none_is_left_alone() {
        assert!(forced(3, true, &["a", "</th", "ink>b", "c", "d", "e"]).iter().all(Option::is_none));
        assert!(forced(1, false, &["<b>", "<think>", "c", "d"]).iter().all(Option::is_none));
        assert!(forced(1, false, &["Well", "<think>", "c", "d"]).iter().all(Option::is_none));
    }
}
