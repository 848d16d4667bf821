//! The grammar of an answer with calls in a model's own format, as llguidance's dialect of Lark.

use super::arguments::{argument, fits_no_text, is_text, lengths, only_texts, resolve};
use super::call_format::{Body, CallFormat};
use super::reading::Callable;
use super::schema_parts::{Way, reroot};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Bytes of schemas of single values in one grammar, at most: each that has references has a copy of its function's schema.
const MAX_COPIED: usize = 512 << 10;
/// Values with a schema of their own in one grammar, at most: each takes some 20 us to compile, and a state of the lexer.
const MAX_KEPT: usize = 1024;
/// Characters that are counted in one grammar, at most, for the lengths of all texts: each takes some 8 states of the lexer, of which an
/// answer has 16,384.
const MAX_COUNTED: u64 = 1024;
/// JSON pointer of a call's arguments in its form.
const ARGUMENTS: &str = "/properties/arguments";
/// Words of a function's schema that decide which arguments there may be, and that the order of arguments does not hold.
const NOT_HELD: [&str; 9] =
    ["$ref", "allOf", "anyOf", "oneOf", "patternProperties", "enum", "const", "minProperties", "maxProperties"];
/// Those of them under which there may be arguments that `properties` does not name.
const MAY_NAME: [&str; 5] = ["$ref", "allOf", "anyOf", "oneOf", "patternProperties"];

/// Calls in a model's own format.
#[derive(Clone, Debug, Deserialize, Serialize)]
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

    /// The grammar, and the ways to parts of `schema` that it does not hold. `schema` is that of all forms, of which the first are the
    /// calls; `several`: it is a choice of them. Any other form may take the place of the calls. `begun`: the text before has
    /// [`NativeCalls::trigger`] already. `literal` writes a text of the format, in which control tokens are tokens; `style` is the JSON's.
    pub fn lark(
        &self,
        schema: &Value,
        forms: usize,
        begun: bool,
        literal: &dyn Fn(&str) -> String,
        style: &Value,
    ) -> (String, Vec<Way>) {
        let mut rules = Rules {
            schema,
            several: forms > 1,
            literal,
            style,
            text: String::new(),
            count: 0,
            root: Value::Null,
            root_bytes: 0,
            place: String::new(),
            kept: 0,
            copied: 0,
            counted: 0,
            any_value: None,
            not_held: Vec::new(),
        };
        let calls: Vec<String> = (0..self.callable.len()).map(|i| self.call(i, &mut rules)).collect();
        let CallFormat { open, join, close, .. } = &self.format;
        let open = if begun { open.strip_prefix(&self.trigger()).unwrap_or(open) } else { open };
        let [open, close] = [open, close].map(literal);
        let more = join.as_ref().filter(|_| self.parallel).map(|join| format!("({} call)*", literal(join)));
        let mut start = format!("{open} call {} {close}", more.unwrap_or_default());
        for form in self.callable.len()..forms {
            rules.enter(form);
            let other = rules.json("");
            let _ = write!(start, " | {other}");
        }
        (format!("start: {start}\ncall: {}\n{}", calls.join(" | "), rules.text), rules.not_held)
    }

    /// The rule of a call of function `i`.
    fn call(&self, i: usize, rules: &mut Rules<'_>) -> String {
        rules.enter(i);
        let Callable { name, arguments } = &self.callable[i];
        let literal = rules.literal;
        let body = match &self.format.body {
            Body::Object(keys) => {
                let head = format!("{{{}: {}, {}: ", json!(keys.name), json!(name), json!(keys.arguments));
                format!("{} {} {}", plain(&head), rules.json(ARGUMENTS), plain("}"))
            }
            Body::Named { between } => format!("{} {} {}", plain(name), literal(between), rules.json(ARGUMENTS)),
            Body::Parameters { between, before_key, before_value, after_value } => {
                let marks = Marks {
                    before_key: literal(before_key),
                    before_value: literal(before_value),
                    after_value: literal(after_value),
                    behind_key: before_value.chars().next(),
                };
                format!("{} {} {}", plain(name), literal(between), rules.parameters(arguments, &marks))
            }
            Body::List(marks) => {
                let place = format!("{}{ARGUMENTS}", rules.place);
                format!("{} {}", plain(name), rules.list(place, marks))
            }
        };
        rules.rule(&body)
    }
}

/// A text of the request: nothing in it is a control token.
pub(super) fn plain(text: &str) -> String {
    Value::from(text).to_string()
}

/// The marks around arguments, as a grammar has them.
struct Marks {
    before_key: String,
    before_value: String,
    after_value: String,
    /// The first character behind a name.
    behind_key: Option<char>,
}

/// What an object may have, as its schema says.
pub(super) struct Members<'s> {
    /// Those of `properties` in order, then others that are required.
    pub keys: Vec<&'s str>,
    /// The schema of all others; `None`: any value. Names that only a pattern allows have any.
    pub further: Option<&'s Value>,
    /// Whether there may be others.
    pub may_have_further: bool,
    named: Option<&'s Map<String, Value>>,
    required: Vec<&'s str>,
}

impl<'s> Members<'s> {
    pub(super) fn of(schema: &'s Value) -> Members<'s> {
        let has = |word: &&str| schema.get(*word).is_some();
        let further = schema.get("additionalProperties");
        let may_have_further = match further {
            Some(further) => *further != false || has(&"patternProperties"),
            None => !schema["properties"].is_object() || MAY_NAME.iter().any(has),
        };
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let named = schema["properties"].as_object();
        let unnamed = required.iter().filter(|key| named.is_none_or(|named| !named.contains_key(**key)));
        let keys = named.into_iter().flat_map(|named| named.keys().map(String::as_str)).chain(unnamed.copied());
        let (keys, further) = (keys.collect(), further.filter(|further| **further != false));
        Members { keys, further, may_have_further, named, required }
    }

    /// The schema of one, where `properties` has it.
    pub(super) fn own(&self, key: &str) -> Option<&'s Value> {
        self.named?.get(key)
    }

    pub(super) fn must(&self, key: &str) -> bool {
        self.required.contains(&key)
    }

    /// Whether no value fits one that may be missing; `whole` is its schema behind references.
    pub(super) fn is_never_there(&self, key: &str, whole: Option<&Value>) -> bool {
        let is_none = |own: &Value| *own == false || own["enum"] == json!([]);
        !self.must(key) && (self.own(key).is_some_and(is_none) || whole.is_some_and(fits_no_text))
    }

    /// What a rule of other names ends with.
    pub(super) fn but_known(&self) -> String {
        let known: Vec<String> = self.keys.iter().map(|key| plain(key)).collect();
        if known.is_empty() { String::new() } else { format!(" & ~({})", known.join(" | ")) }
    }
}

/// The rules of a grammar, as far as they are written.
pub(super) struct Rules<'a> {
    pub schema: &'a Value,
    several: bool,
    pub literal: &'a dyn Fn(&str) -> String,
    style: &'a Value,
    pub text: String,
    pub count: usize,
    /// The root to which references of the form begin, without the other forms.
    root: Value,
    /// Its bytes as JSON.
    root_bytes: usize,
    /// JSON pointer of the form.
    place: String,
    /// Values with a schema of their own so far.
    kept: usize,
    /// Bytes of their schemas.
    copied: usize,
    /// Characters that are counted.
    counted: u64,
    /// The rule of any value in a list of arguments, once it is written.
    pub any_value: Option<String>,
    pub not_held: Vec<Way>,
}

impl Rules<'_> {
    /// The rules that follow are those of form `i`.
    fn enter(&mut self, i: usize) {
        if self.several {
            self.root = json!({"anyOf": vec![json!({}); i + 1]});
            self.root["anyOf"][i] = self.schema["anyOf"][i].clone();
            self.place = format!("/anyOf/{i}");
        } else {
            self.root = self.schema.clone();
        }
        reroot(&mut self.root, "#/$defs/all");
        self.root_bytes = self.root.to_string().len();
    }

    /// Adds a rule and returns its name.
    pub(super) fn rule(&mut self, body: &str) -> String {
        self.named("r", "", body)
    }

    /// Adds a rule, or a word of the lexer if `kind` is a capital letter, and returns its name.
    pub(super) fn named(&mut self, kind: &str, attributes: &str, body: &str) -> String {
        let name = format!("{kind}{}", self.count);
        self.count += 1;
        let _ = writeln!(self.text, "{name}{attributes}: {body}");
        name
    }

    /// The arguments of a function between marks, in the order of its schema, then further ones where there may be any.
    fn parameters(&mut self, arguments: &Value, marks: &Marks) -> String {
        let all = self.schema;
        let place = format!("{}{ARGUMENTS}", self.place);
        let (schema, place) = resolve(all, all.pointer(&place).unwrap_or(&Value::Null), place);
        let has = |word: &&str| schema.get(*word).is_some();
        self.not_held.extend(NOT_HELD.iter().filter(|word| has(word)).map(|word| way(&place, &[word])));
        let members = Members::of(schema);
        let Marks { before_key, before_value, .. } = marks;
        let mut written = String::new();
        for key in &members.keys {
            let (own, must, whole) = (members.own(key), members.must(key), argument(arguments, key));
            if members.is_never_there(key, whole) {
                continue;
            }
            let steps = if own.is_some() { &["properties", key][..] } else { &["additionalProperties"] };
            let value = self.value(own.or(members.further), whole, way(&place, steps), marks);
            let rule = self.rule(&format!("{before_key} {} {before_value} {value}", plain(key)));
            let _ = write!(written, " {rule}{}", if must { "" } else { "?" });
        }
        if members.may_have_further {
            let behind = marks.behind_key.map_or(String::new(), |c| format!("\\x{{{:x}}}", u32::from(c)));
            let name = self.named("K", "", &format!("/[^<>\\s{behind}]+/{}", members.but_known()));
            let further = members.further;
            let value = self.value(further, further, way(&place, &["additionalProperties"]), marks);
            let rule = self.rule(&format!("{before_key} {name} {before_value} {value}"));
            let _ = write!(written, " {rule}*");
        }
        written
    }

    /// A value with the mark behind it: `schema` is what it is kept to; `whole`, by which it is read, has the parts that no grammar holds, too.
    fn value(&mut self, schema: Option<&Value>, whole: Option<&Value>, at: Way, marks: &Marks) -> String {
        let after = &marks.after_value;
        if let Some(texts) = whole.filter(|whole| is_text(whole)).and_then(only_texts) {
            let texts: Vec<String> = texts.into_iter().map(plain).collect();
            return format!("({}) {after}", texts.join(" | "));
        }
        if let Some(text) = whole.filter(|whole| is_text(whole)) {
            let (least, most) = lengths(text);
            let counted = self.counted.saturating_add(least.max(most.unwrap_or(0)));
            if counted > MAX_COUNTED {
                self.not_held.push(at);
                return self.text(0, None, after);
            }
            self.counted = counted;
            return self.text(least, most, after);
        }
        let Some(schema) = schema.filter(|schema| **schema != true) else {
            return self.text(0, None, after);
        };
        if !self.keeps(schema) {
            self.not_held.push(at);
            return self.text(0, None, after);
        }
        format!("{} {after}", self.json_of(schema))
    }

    /// Whether a value can have a schema of its own; it counts as one then.
    pub(super) fn keeps(&mut self, schema: &Value) -> bool {
        let bytes = schema.to_string().len() + if has_references(schema) { self.root_bytes } else { 0 };
        let keeps = self.kept < MAX_KEPT && self.copied + bytes <= MAX_COPIED;
        if keeps {
            (self.kept, self.copied) = (self.kept + 1, self.copied + bytes);
        }
        keeps
    }

    /// The rule of JSON by the part of the form at a pointer.
    fn json(&mut self, pointer: &str) -> String {
        let all = self.schema;
        self.json_of(all.pointer(&format!("{}{pointer}", self.place)).unwrap_or(&Value::Null))
    }

    /// The rule of JSON by a part of the form, which has the same name wherever it is: the library does not decode pointers.
    pub(super) fn json_of(&mut self, part: &Value) -> String {
        let mut parts = json!({"value": part});
        if has_references(part) {
            reroot(&mut parts, "#/$defs/all");
            parts["all"] = self.root.clone();
        }
        let schema = json!({"$ref": "#/$defs/value", "$defs": parts, "x-guidance": self.style});
        self.rule(&format!("%json {schema}"))
    }

    /// A text as it is, of at least and at most so many characters, with the mark behind it.
    pub(super) fn text(&mut self, least: u64, most: Option<u64>, after: &str) -> String {
        let text = match (least, most) {
            (0, None) => "/(?s:.*)/".to_owned(),
            (least, most) => format!("/(?s:.{{{least},{}}})/", most.map_or(String::new(), |most| most.to_string())),
        };
        let Ok(mark) = serde_json::from_str::<String>(after) else {
            // A control token is no letter of a text, which may end with the white space before it.
            let token = after.find("<[").unwrap_or(0);
            return format!("{} {}", self.named("T", "", &text), &after[token..]);
        };
        // It ends with the first mark, which is none of the characters that it has to have, nor is any part of it.
        let parts = (1..mark.len()).filter(|n| mark.is_char_boundary(*n) && mark.ends_with(&mark[..*n]));
        let parts: String = parts.map(|n| format!(" | /(?s:.*)/ {}", plain(&mark[..mark.len() - n]))).collect();
        let text = if least == 0 { text } else { format!("{text} & ~(/(?s:.*)/ {after} /(?s:.*)/{parts})") };
        self.named("r", &format!("[suffix={after}]"), &text)
    }
}

/// Whether a schema refers to other parts of its root.
fn has_references(schema: &Value) -> bool {
    schema.to_string().contains("\"$ref\"")
}

/// The way to a part behind a JSON pointer.
pub(super) fn way(place: &str, more: &[&str]) -> Way {
    let steps = place.split('/').skip(1).map(|step| step.replace("~1", "/").replace("~0", "~"));
    steps.chain(more.iter().map(|step| (*step).to_owned())).collect()
}
