//! The grammar of an answer with calls in a model's own format, as llguidance's dialect of Lark.

use super::call_format::{Body, CallFormat};
use super::reader::Callable;
use super::schema_parts::reroot;
use serde_json::{Value, json};
use std::fmt::Write;

/// Arguments of a function whose values are kept to their schemas; each has a copy of the function's schema. Beyond them names alone are.
const MAX_KEPT: usize = 32;

/// Calls in a model's own format.
#[derive(Clone, Debug)]
pub struct NativeCalls {
    /// The format.
    pub format: CallFormat,
    /// The functions, in the order of their forms.
    pub callable: Vec<Callable>,
    /// Whether an answer may have several.
    pub parallel: bool,
}

impl NativeCalls {
    /// What begins a call in a text: its mark, or all that comes before a call where that begins with an ordinary word. Empty if nothing
    /// does.
    pub fn trigger(&self) -> String {
        let first = self.format.opening().into_iter().next().filter(|_| !self.format.is_bare()).unwrap_or_default();
        if first.starts_with(['<', '[']) || first.is_empty() { first } else { self.format.open.clone() }
    }

    /// The grammar. `schema` is that of all forms, of which the first are the calls; `several`: it is a choice of them. Any other form may
    /// take the place of the calls. `begun`: the text before has [`NativeCalls::trigger`] already. `literal` writes a text, in which
    /// control tokens are tokens; `style` is the JSON's.
    pub fn lark(
        &self,
        schema: &Value,
        forms: usize,
        begun: bool,
        literal: &dyn Fn(&str) -> String,
        style: &Value,
    ) -> String {
        let mut rules = Rules { schema, several: forms > 1, literal, style, text: String::new(), count: 0 };
        let calls: Vec<String> = (0..self.callable.len()).map(|i| self.call(i, &mut rules)).collect();
        let CallFormat { open, join, close, .. } = &self.format;
        let open = if begun { open.strip_prefix(&self.trigger()).unwrap_or(open) } else { open };
        let [open, close] = [open, close].map(literal);
        let more = join.as_ref().filter(|_| self.parallel).map(|join| format!("({} call)*", literal(join)));
        let mut start = format!("{open} call {} {close}", more.unwrap_or_default());
        for form in self.callable.len()..forms {
            let other = rules.json(form, "");
            let _ = write!(start, " | {other}");
        }
        format!("start: {start}\ncall: {}\n{}", calls.join(" | "), rules.text)
    }

    /// The rule of a call of function `i`.
    fn call(&self, i: usize, rules: &mut Rules<'_>) -> String {
        const ARGUMENTS: &str = "/properties/arguments";
        let Callable { name, arguments } = &self.callable[i];
        let body = match &self.format.body {
            Body::Object(keys) => {
                let head = format!("{{{}: {}, {}: ", json!(keys.name), json!(name), json!(keys.arguments));
                format!("{} {} {}", (rules.literal)(&head), rules.json(i, ARGUMENTS), (rules.literal)("}"))
            }
            Body::Named { between } => {
                format!("{} {}", (rules.literal)(&format!("{name}{between}")), rules.json(i, ARGUMENTS))
            }
            Body::Parameters { between, before_key, before_value, after_value } => {
                let head = (rules.literal)(&format!("{name}{between}"));
                let properties = arguments["properties"].as_object();
                let mut values = Vec::new();
                for (key, schema) in properties.into_iter().flatten() {
                    let before = (rules.literal)(&format!("{before_key}{key}{before_value}"));
                    let kept = properties.is_some_and(|all| all.len() <= MAX_KEPT);
                    let value = match schema["type"] == "string" || !kept {
                        true => rules.text(schema, after_value),
                        false => {
                            let pointer =
                                format!("{ARGUMENTS}/properties/{}", key.replace('~', "~0").replace('/', "~1"));
                            format!("{} {}", rules.json(i, &pointer), (rules.literal)(after_value))
                        }
                    };
                    values.push(format!("{before} {value}"));
                }
                let values = values.iter().map(|value| rules.rule(value)).collect::<Vec<_>>();
                if values.is_empty() { head } else { format!("{head} ({})*", values.join(" | ")) }
            }
        };
        rules.rule(&body)
    }
}

/// The rules of a grammar, as far as they are written.
struct Rules<'a> {
    schema: &'a Value,
    several: bool,
    literal: &'a dyn Fn(&str) -> String,
    style: &'a Value,
    text: String,
    count: usize,
}

impl Rules<'_> {
    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.named("", body)
    }

    fn named(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        let _ = writeln!(self.text, "{name}{attributes}: {body}");
        name
    }

    /// The rule of JSON by the part of form `i` at a pointer.
    fn json(&mut self, i: usize, pointer: &str) -> String {
        // References begin at the root of all forms, of which the others are not needed.
        let (mut all, form) = match self.several {
            true => (json!({"anyOf": vec![json!({}); i + 1]}), format!("/anyOf/{i}")),
            false => (self.schema.clone(), String::new()),
        };
        if self.several {
            all["anyOf"][i] = self.schema["anyOf"][i].clone();
        }
        reroot(&mut all, "#/$defs/all");
        let schema =
            json!({"$ref": format!("#/$defs/all{form}{pointer}"), "$defs": {"all": all}, "x-guidance": self.style});
        self.rule(&format!("%json {schema}"))
    }

    /// The rule of a text as it is, with the mark behind it.
    fn text(&mut self, schema: &Value, after: &str) -> String {
        let behind = (self.literal)(after);
        if let Some(values) = schema["enum"].as_array().filter(|values| values.iter().all(Value::is_string)) {
            let values: Vec<String> =
                values.iter().filter_map(Value::as_str).map(|text| (self.literal)(text)).collect();
            return format!("({}) {behind}", values.join(" | "));
        }
        match behind.contains("<[") {
            // A control token is no letter of a text.
            true => format!("{} {behind}", self.rule("/(?s:.*)/")),
            false => self.named(&format!("[suffix={behind}]"), "/(?s:.*)/"),
        }
    }
}
