//! How a model's chat template treats messages, found by rendering some once.

use crate::error::{Error, Result};
use serde_json::{Value, json};

/// Words that no template has and none takes apart.
const MARKS: [&str; 2] = ["Quxify7", "Zorbla9"];

/// How a template treats messages.
#[derive(Clone, Debug, PartialEq)]
pub struct Habits {
    /// Whether the text of a system message is in the prompt.
    pub takes_system: bool,
    /// The text that a template puts between several text parts of a message. A template that takes only whole texts gets a line break, as
    /// in llama.cpp and vLLM.
    pub between_parts: String,
}

impl Habits {
    /// The habits without a template: the texts of messages are joined by line breaks.
    pub fn plain() -> Habits {
        Habits { takes_system: true, between_parts: "\n".into() }
    }

    /// The habits of the template that `render` renders, given the messages.
    ///
    /// # Errors
    /// [`Error::Memory`] if `render` has no memory or time for it; every other error is the template's.
    pub fn of(render: &dyn Fn(Vec<Value>) -> Result<String>) -> Result<Habits> {
        let rendered = |messages: Vec<Value>| match render(messages) {
            Err(Error::Memory(why)) => Err(Error::Memory(why)),
            text => Ok(text.ok()),
        };
        let [first, second] = MARKS;
        let user = |content: Value| json!({"role": "user", "content": content});
        let with_system = rendered(vec![json!({"role": "system", "content": first}), user(second.into())])?;
        let takes_system = match with_system {
            Some(text) => text.contains(first),
            // One that renders nothing at all is no matter of the system message.
            None => rendered(vec![user(second.into())])?.is_none(),
        };
        let parts = json!([{"type": "text", "text": first}, {"type": "text", "text": second}]);
        let between = rendered(vec![user(parts)])?.and_then(|text| {
            let behind = text.split_once(first)?.1;
            Some(behind.split_once(second)?.0.to_owned())
        });
        // A template that only takes texts writes the list itself, with its brackets.
        let between = between.filter(|between| between.chars().all(char::is_whitespace));
        Ok(Habits { takes_system, between_parts: between.unwrap_or_else(|| "\n".into()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::chat_template::{Input, render_in_process};
    use std::path::Path;

    fn habits(template: &str) -> Habits {
        let found = Habits::of(&|messages| {
            let input = Input { template: template.to_owned(), messages, ..Input::default() };
            render_in_process(&input, Path::new("t"))
        });
        found.unwrap()
    }

    #[test]
    fn a_templates_habits_are_seen_in_what_it_renders() {
        let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        assert_eq!(habits(plain), Habits::plain());
        let raises = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}";
        assert!(!habits(raises).takes_system);
        let drops = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
        assert!(!habits(drops).takes_system);
        let broken = "{{ nothing.here }}";
        assert_eq!(habits(broken), Habits::plain());
        for between in ["", " ", "\n\n"] {
            let parts = format!(
                "{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}\
                 {{{{ m.content|map(attribute='text')|join({between:?}) }}}}{{% endif %}}{{% endfor %}}"
            );
            assert_eq!(habits(&parts), Habits { takes_system: true, between_parts: between.into() });
        }
        // Its process could not be started: that is not the template's fault, and not remembered.
        assert!(matches!(Habits::of(&|_| Err(Error::Memory("none".into()))), Err(Error::Memory(_))));
    }
}
