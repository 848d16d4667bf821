//! The channels of OpenAI's harmony format, in which gpt-oss answers: what of an answer a reader sees.
//!
//! An answer is a chain of messages, each with a head: `<|channel|>analysis<|message|>` what the model thinks `<|end|><|start|>assistant`
//! `<|channel|>final<|message|>` what it says. The last one's text is the answer; heads and the other channels are not, and `analysis` is
//! told apart.

/// The tokens that mark messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Markers {
    /// Begins a message; its author follows.
    pub start: u32,
    /// The channel's name follows.
    pub channel: u32,
    /// The text follows.
    pub message: u32,
    /// The text is over.
    pub end: u32,
}

impl Markers {
    /// Those of a vocabulary, by the ids of its special tokens' texts; `None` for one that lacks any of them.
    pub fn find(id_of: impl Fn(&str) -> Option<u32>) -> Option<Markers> {
        Some(Markers {
            start: id_of("<|start|>")?,
            channel: id_of("<|channel|>")?,
            message: id_of("<|message|>")?,
            end: id_of("<|end|>")?,
        })
    }
}

/// Where an answer is.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Channel {
    /// Before the first marker: a text that has none is shown.
    #[default]
    None,
    /// In a message's head, behind the name that has come so far; without one where no channel has been named.
    Head(Vec<u8>),
    /// In a message's text.
    Text {
        /// Whether a reader sees it.
        shown: bool,
    },
    /// In what the model thinks.
    Thought,
}

impl Channel {
    /// Where an answer to these tokens begins, which stand for `bytes_of(token)`: a prompt may end inside a message or its head.
    pub fn after<'a>(markers: Markers, prompt: &[u32], bytes_of: impl Fn(u32) -> &'a [u8]) -> Channel {
        let Markers { start, channel, message, end } = markers;
        let marker = |tokens: &[u32]| tokens.iter().rposition(|token| [start, channel, message, end].contains(token));
        let name = |tokens: &[u32]| tokens.iter().flat_map(|&token| bytes_of(token)).copied().collect::<Vec<u8>>();
        match marker(prompt).map(|at| (at, prompt[at])) {
            Some((at, token)) if token == channel => Channel::Head(name(&prompt[at + 1..])),
            Some((at, token)) if token == message => {
                let head = marker(&prompt[..at]).filter(|&before| prompt[before] == channel);
                // Without a channel it is a message of the prompt.
                head.map_or(Channel::Text { shown: true }, |before| Channel::named(&name(&prompt[before + 1..at])))
            }
            _ => Channel::None,
        }
    }

    /// Whether the next token belongs to the text that a reader sees, unless it is a marker.
    pub fn is_read(&self) -> bool {
        matches!(self, Channel::None | Channel::Text { shown: true })
    }

    /// Takes the next token of an answer, which stands for `bytes`; says whether a reader sees them.
    pub fn shows(&mut self, markers: Markers, token: u32, bytes: &[u8]) -> bool {
        /// Bytes of a name that are looked at.
        const MAX_NAME: usize = 64;
        match self {
            _ if token == markers.start || token == markers.channel => *self = Channel::Head(Vec::new()),
            Channel::Head(name) if token == markers.message => {
                *self = Channel::named(name);
            }
            _ if token == markers.end => *self = Channel::Text { shown: false },
            Channel::Head(name) => name.extend(bytes.iter().take(MAX_NAME.saturating_sub(name.len()))),
            Channel::None => return true,
            Channel::Text { shown } => return *shown,
            Channel::Thought => {}
        }
        false
    }

    /// In the text of a channel of this name.
    fn named(name: &[u8]) -> Channel {
        match name.trim_ascii() {
            name if name.starts_with(b"analysis") => Channel::Thought,
            name => Channel::Text { shown: name.starts_with(b"final") },
        }
    }
}
