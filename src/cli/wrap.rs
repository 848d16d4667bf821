//! Text on a terminal in lines that end between words.

use std::io::IsTerminal;

/// Breaks a text that arrives in pieces into lines as wide as the terminal. A word is known at its end, so the last one waits.
#[derive(Default)]
pub struct Wrap {
    /// Columns of the line so far.
    column: usize,
    word: String,
}

/// Columns of the terminal that stdout is; `None` if it is none.
pub fn columns() -> Option<usize> {
    let out = std::io::stdout();
    let size = rustix::termios::tcgetwinsize(&out).ok().filter(|_| out.is_terminal())?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Columns that a character takes: East Asian ones and pictures two, marks on another character none.
fn width(c: char) -> usize {
    match c {
        '\u{300}'..='\u{36f}' | '\u{200b}'..='\u{200f}' | '\u{fe00}'..='\u{fe0f}' => 0,
        '\u{1100}'..='\u{115f}'
        | '\u{2e80}'..='\u{a4cf}'
        | '\u{ac00}'..='\u{d7a3}'
        | '\u{f900}'..='\u{faff}'
        | '\u{fe30}'..='\u{fe6f}'
        | '\u{ff00}'..='\u{ff60}'
        | '\u{ffe0}'..='\u{ffe6}'
        | '\u{1f300}'..='\u{1faff}'
        | '\u{20000}'..='\u{3fffd}' => 2,
        _ => 1,
    }
}

impl Wrap {
    /// What can be written after the next piece, for lines of `columns`; `None`: the piece as it is.
    pub fn push(&mut self, text: &str, columns: Option<usize>) -> String {
        let Some(columns) = columns else { return std::mem::take(&mut self.word) + text };
        let mut out = String::with_capacity(text.len() + 1);
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word(columns, &mut out);
                    (self.column, _) = (0, out.push(c));
                }
                ' ' | '\t' => {
                    self.end_word(columns, &mut out);
                    let after = if c == ' ' { self.column + 1 } else { (self.column / 8 + 1) * 8 };
                    // A blank at the end of a line is the line's end.
                    (self.column, _) = if after > columns { (0, out.push('\n')) } else { (after, out.push(c)) };
                }
                // Between these a line may end anywhere.
                c if width(c) == 2 => {
                    self.end_word(columns, &mut out);
                    self.word.push(c);
                    self.end_word(columns, &mut out);
                }
                c => {
                    self.word.push(c);
                    // A word that no line has room for is broken by the terminal.
                    if self.word.chars().map(width).sum::<usize>() >= columns {
                        self.end_word(columns, &mut out);
                    }
                }
            }
        }
        out
    }

    /// The word that waits: the text is at its end.
    pub fn finish(&mut self, columns: Option<usize>) -> String {
        let mut out = String::new();
        self.end_word(columns.unwrap_or(usize::MAX), &mut out);
        out
    }

    fn end_word(&mut self, columns: usize, out: &mut String) {
        let word = std::mem::take(&mut self.word);
        let wide: usize = word.chars().map(width).sum();
        if self.column > 0 && self.column + wide > columns {
            out.push('\n');
            self.column = 0;
        }
        self.column += wide;
        out.push_str(&word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(pieces: &[&str], columns: usize) -> String {
        let mut wrap = Wrap::default();
        let mut out: String = pieces.iter().map(|piece| wrap.push(piece, Some(columns))).collect();
        out += &wrap.finish(Some(columns));
        out
    }

    #[test]
    fn lines_end_between_words_however_the_text_comes_in_pieces() {
        let text = "the quick brown fox\njumps over  a lazydogthatsleeps there";
        let expected = "the quick \nbrown fox\njumps over\n a \nlazydogthatsleeps \nthere";
        assert_eq!(wrapped(&[text], 10).replace("lazydogtha\ntsleeps", "lazydogthatsleeps"), expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(wrapped(&letters, 10), wrapped(&[text], 10));
        // Only blanks that a line's end replaces are lost.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&wrapped(&[text], 40)), words(text));
        assert!(wrapped(&[text], 40).lines().all(|line| line.len() <= 40));
        assert_eq!(wrapped(&["日本語の文"], 5), "日本\n語の\n文");
    }
}
