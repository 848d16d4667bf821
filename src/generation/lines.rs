//! Answers of code that end with a line.

use crate::clock::Duration;

/// When an answer ends at a line break.
#[derive(Clone, Copy, Debug, Default)]
pub struct LineLimits {
    /// It ends with the first line break after this time from its first token. `None`: it takes as long as it takes.
    pub time: Option<Duration>,
    /// It ends before the first line, behind its own first one, that begins with fewer spaces and tabs. Blank lines do not count.
    pub indent: usize,
}

/// The lines of an answer so far.
#[derive(Debug, Default)]
pub struct Lines {
    /// White space at the beginning of a line, which is told once the line goes on.
    held: String,
    /// Whether nothing but white space of the line has come.
    begins: bool,
    over: bool,
}

impl Lines {
    /// Takes the next text of an answer, `took` after its first token, and leaves what a reader gets of it. Returns whether the answer is over.
    pub fn take(&mut self, text: &mut String, limits: &LineLimits, took: Duration) -> bool {
        let mut told = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                _ if self.over => break,
                '\n' => {
                    told.push_str(&std::mem::take(&mut self.held));
                    told.push(c);
                    self.begins = limits.indent > 0;
                    self.over = limits.time.is_some_and(|most| took >= most);
                }
                ' ' | '\t' | '\r' if self.begins => self.held.push(c),
                _ => {
                    let indented = self.held.chars().filter(|&c| c != '\r').count();
                    self.over = self.begins && indented < limits.indent;
                    if !self.over {
                        self.begins = false;
                        told.push_str(&std::mem::take(&mut self.held));
                        told.push(c);
                    }
                }
            }
        }
        *text = told;
        self.over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a reader gets of these pieces, one a second, and whether it was all.
    fn told(pieces: &[&str], limits: LineLimits) -> (String, bool) {
        let mut lines = Lines::default();
        let mut all = String::new();
        for (second, piece) in pieces.iter().enumerate() {
            let mut text = (*piece).to_owned();
            let over = lines.take(&mut text, &limits, Duration::from_secs(second as u64));
            all += &text;
            if over {
                return (all, true);
            }
        }
        (all, false)
    }

    #[test]
    fn a_late_answer_ends_with_its_line() {
        let pieces = ["a\n", "b", "c", "d\n e", "f\n"];
        for (seconds, text, over) in [
            (0, "a\n", true),
            (1, "a\nbcd\n", true),
            (3, "a\nbcd\n", true),
            (4, "a\nbcd\n ef\n", true),
            (5, "a\nbcd\n ef\n", false),
        ] {
            let limits = LineLimits { time: Some(Duration::from_secs(seconds)), indent: 0 };
            assert_eq!(told(&pieces, limits), (text.to_owned(), over), "{seconds}");
        }
        assert_eq!(told(&["  a", " b"], LineLimits { time: Some(Duration::ZERO), indent: 0 }), ("  a b".into(), false));
    }

    #[test]
    fn an_answer_ends_before_a_line_that_begins_too_far_to_the_left() {
        let limits = LineLimits { time: None, indent: 4 };
        for (pieces, text, over) in [
            (&["if x:\n", "    y\n", "\r\n  \n", "\t\t  z\n  ", "}", "w"][..], "if x:\n    y\n\r\n  \n\t\t  z\n", true),
            (&["x", "\n    y\n}\n"], "x\n    y\n", true),
            (&["x\n", "  ", "  y"], "x\n    y", false),
        ] {
            assert_eq!(told(pieces, limits), (text.to_owned(), over), "{pieces:?}");
        }
    }
}
