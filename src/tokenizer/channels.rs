//! The channels of OpenAI's harmony format, in which gpt-oss answers: what of an answer a reader sees.
//!
//! An answer is a chain of messages, each with a head: `<|channel|>analysis<|message|>` what the model thinks `<|end|><|start|>assistant`
//! `<|channel|>final<|message|>` what it says. The last one's text is the answer; heads and the other channels are not, and `analysis` is
//! told apart. A call of a function is a message to it: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>` and its
//! arguments, or the same with ` to=functions.NAME` before the channel.

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

/// What comes before the name of a function that is called, as templates render it.
pub const CALL: &str = " to=functions.";
/// What comes between the name and the arguments.
pub const ARGUMENTS: &str = "<|channel|>commentary json<|message|>";

/// Where an answer is.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Channel {
    /// Before the first marker: a text that has none is shown.
    #[default]
    None,
    /// In a message's head, of which this has come so far; a byte of zero stands for the marker of a channel.
    Head(Vec<u8>),
    /// In a message's text.
    Text {
        /// Whether a reader sees it.
        shown: bool,
    },
    /// In what the model thinks.
    Thought,
    /// In a call, to the answer's end: its markers are part of it.
    Call,
}

/// What of a token a reader sees.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// Its bytes.
    Bytes,
    /// Nothing.
    Nothing,
    /// Nothing of the token; arguments for this function follow.
    Call(String),
}

/// Stands for the marker of a channel in a head.
const MARK: u8 = 0;

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
        matches!(self, Channel::None | Channel::Text { shown: true } | Channel::Call)
    }

    /// Takes the next token of an answer, which stands for `bytes`.
    pub fn take(&mut self, markers: Markers, token: u32, bytes: &[u8]) -> Seen {
        /// Bytes of a head that are looked at.
        const MAX_HEAD: usize = 256;
        match self {
            Channel::Call => return Seen::Bytes,
            _ if token == markers.start => *self = Channel::Head(Vec::new()),
            Channel::Head(head) if token == markers.channel => head.push(MARK),
            _ if token == markers.channel => *self = Channel::Head(Vec::new()),
            Channel::Head(head) if token == markers.message => {
                let called = callee(head);
                *self = Channel::named(head);
                return called.map_or(Seen::Nothing, Seen::Call);
            }
            _ if token == markers.end => *self = Channel::Text { shown: false },
            Channel::Head(head) => head.extend(bytes.iter().take(MAX_HEAD.saturating_sub(head.len()))),
            Channel::None | Channel::Text { shown: true } => return Seen::Bytes,
            Channel::Text { shown: false } | Channel::Thought => {}
        }
        Seen::Nothing
    }

    /// In the text of a message with this head.
    fn named(head: &[u8]) -> Channel {
        let name = head.rsplit(|byte| *byte == MARK).next().unwrap_or(head);
        match name.trim_ascii() {
            name if name.starts_with(b"analysis") => Channel::Thought,
            name => Channel::Text { shown: name.starts_with(b"final") },
        }
    }
}

/// The function to which a message with this head goes.
fn callee(head: &[u8]) -> Option<String> {
    let to = CALL.trim_start().as_bytes();
    let at = head.windows(to.len()).position(|window| window == to)?;
    let is_part = |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(**byte, b'_' | b'-');
    let name: String = head[at + to.len()..].iter().take_while(is_part).map(|byte| char::from(*byte)).collect();
    (!name.is_empty()).then_some(name)
}
