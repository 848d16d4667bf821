//! The grammar of arguments in a list, as programming languages write them ([`ListMarks`]).

use super::arguments::resolve;
use super::call_format::ListMarks;
use super::call_grammar::{Members, Rules, plain, way};
use super::literals::Quotes;
use super::schema_parts::Way;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Levels of a schema that a grammar holds, at most: it may refer to itself.
const MAX_LEVELS: usize = 12;
/// The types of JSON, each of which a schema may name.
const KINDS: [&str; 7] = ["string", "integer", "number", "boolean", "null", "array", "object"];
/// Words of a schema that constrain nothing.
const NOTES: [&str; 13] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$anchor",
    "$defs",
    "definitions",
];

/// The marks of a list, as a grammar has them.
struct Dialect {
    is: String,
    join: String,
    /// Around a text that stands as it is; `None`: values are JSON.
    mark: Option<String>,
}

impl Rules<'_> {
    /// The arguments of a function: by its schema at the JSON pointer `place`.
    pub(super) fn list(&mut self, place: String, marks: &ListMarks) -> String {
        let literal = self.literal;
        let mark = Quotes::new(&marks.quote).mark().map(literal);
        let dialect = Dialect { is: literal(&marks.is), join: literal(&marks.join), mark };
        let all = self.schema;
        let schema = all.pointer(&place).unwrap_or(&Value::Null);
        let members = self.members(schema, place, &dialect, 0);
        format!("{} {members} {}", literal(&marks.begin), literal(&marks.end))
    }

    /// Names and values, in the order of a schema of an object.
    fn members(&mut self, schema: &Value, place: String, dialect: &Dialect, level: usize) -> String {
        let (schema, place) = resolve(self.schema, schema, place);
        self.leave_out(schema, &place, &["type", "properties", "required", "additionalProperties"]);
        let members = Members::of(schema);
        let Dialect { is, join, .. } = dialect;
        // From the last to the first: what may follow where nothing is before it, and where something is.
        let (mut first, mut more) = (plain(""), plain(""));
        if members.may_have_further {
            let name = self.named("K", "", &format!("/[A-Za-z_][A-Za-z0-9_.-]*/{}", members.but_known()));
            let value = match members.further.filter(|further| further.is_object()) {
                Some(schema) => self.member(schema, format!("{place}/additionalProperties"), dialect, level),
                None => self.anything(dialect, way(&place, &["additionalProperties"])),
            };
            let other = self.rule(&format!("{name} {is} {value}"));
            first = self.rule(&format!("\"\" | {other} ({join} {other})*"));
            more = self.rule(&format!("({join} {other})*"));
        }
        for key in members.keys.iter().rev() {
            let own = members.own(key);
            let whole = own.map(|own| resolve(self.schema, own, String::new()).0);
            if members.is_never_there(key, whole) {
                continue;
            }
            let at = match own {
                Some(_) => format!("{place}/properties/{}", escaped(key)),
                None => format!("{place}/additionalProperties"),
            };
            let value = match own.or(members.further) {
                Some(own) => self.member(own, at, dialect, level),
                None => self.anything(dialect, way(&at, &[])),
            };
            let item = self.rule(&format!("{} {is} {value}", plain(key)));
            let must = members.must(key);
            let begin = format!("{item} {more}");
            first = self.rule(&if must { begin } else { format!("{begin} | {first}") });
            let next = format!("{join} {item} {more}");
            more = self.rule(&if must { next } else { format!("{next} | {more}") });
        }
        first
    }

    /// A value.
    fn member(&mut self, schema: &Value, place: String, dialect: &Dialect, level: usize) -> String {
        let Some(mark) = &dialect.mark else {
            return if self.keeps(schema) { self.json_of(schema) } else { self.anything(dialect, way(&place, &[])) };
        };
        let (schema, place) = resolve(self.schema, schema, place);
        if level > MAX_LEVELS || !self.keeps(schema) {
            return self.anything(dialect, way(&place, &[]));
        }
        if let Some(choices) = self.choices(schema, &place, dialect, level) {
            return self.rule(&choices.join(" | "));
        }
        match schema["type"].as_str() {
            Some("string") => {
                self.leave_out(schema, &place, &["type"]);
                self.marked(mark)
            }
            Some("integer" | "number" | "boolean" | "null") => self.json_of(schema),
            Some("array") => {
                self.leave_out(schema, &place, &["type", "items"]);
                let value = match schema.get("items").filter(|items| items.is_object()) {
                    Some(items) => self.member(items, format!("{place}/items"), dialect, level + 1),
                    None => self.anything(dialect, way(&place, &["items"])),
                };
                self.rule(&format!("\"[\" ({value} ({} {value})*)? \"]\"", dialect.join))
            }
            Some("object") => {
                let members = self.members(schema, place, dialect, level + 1);
                self.rule(&format!("\"{{\" {members} \"}}\""))
            }
            _ => self.anything(dialect, way(&place, &[])),
        }
    }

    /// What a value may be, of a schema that names several: values, types, or schemas.
    fn choices(&mut self, schema: &Value, place: &str, dialect: &Dialect, level: usize) -> Option<Vec<String>> {
        let mark = dialect.mark.as_deref()?;
        for (word, values) in
            [("const", schema.get("const").map(std::slice::from_ref)), ("enum", listed(schema, "enum"))]
        {
            let values: Option<Vec<String>> =
                values.and_then(|values| values.iter().map(|one| scalar(one, mark)).collect());
            if let Some(values) = values {
                self.leave_out(schema, place, &["type", word]);
                return Some(values);
            }
        }
        for word in ["anyOf", "oneOf"] {
            if let Some(choices) = listed(schema, word) {
                self.leave_out(schema, place, &[word]);
                let of = |(i, choice)| self.member(choice, format!("{place}/{word}/{i}"), dialect, level + 1);
                return Some(choices.iter().enumerate().map(of).collect());
            }
        }
        let named = listed(schema, "type")?;
        let of = |kind: &&str| {
            let mut one = schema.clone();
            one["type"] = (**kind).into();
            self.member(&one, place.to_owned(), dialect, level + 1)
        };
        let kinds = KINDS.iter().filter(|kind| named.iter().any(|one| one == **kind));
        Some(kinds.map(of).collect())
    }

    /// Any value, where the part of the schema at `at` is not held.
    fn anything(&mut self, dialect: &Dialect, at: Way) -> String {
        let all = self.schema;
        let at_all = at.iter().try_fold(all, |value, step| match value {
            Value::Array(items) => items.get(step.parse::<usize>().ok()?),
            value => value.get(step),
        });
        if at_all.is_some_and(|schema| *schema != json!({}) && *schema != true) {
            self.not_held.push(at);
        }
        if let Some(known) = &self.any_value {
            return known.clone();
        }
        let Some(mark) = &dialect.mark else {
            let name = self.json_of(&json!({}));
            self.any_value = Some(name.clone());
            return name;
        };
        let name = format!("r{}", self.count);
        self.any_value = Some(name.clone());
        self.count += 1;
        let text = self.marked(mark);
        let Dialect { is, join, .. } = dialect;
        let member = self.rule(&format!("(/[A-Za-z0-9_.$-]+/ | {text}) {is} {name}"));
        let word = r#"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/ | "true" | "false" | "null""#;
        let list = format!(r#""[" ({name} ({join} {name})*)? "]""#);
        let object = format!(r#""{{" ({member} ({join} {member})*)? "}}""#);
        let _ = writeln!(self.text, "{name}: {text} | {word} | {list} | {object}");
        name
    }

    /// A text between marks.
    fn marked(&mut self, mark: &str) -> String {
        let text = self.text(0, None, mark);
        self.rule(&format!("{mark} {text}"))
    }

    /// Notes the words of a schema that constrain it, but for those that are held.
    fn leave_out(&mut self, schema: &Value, place: &str, held: &[&str]) {
        let words = schema.as_object().into_iter().flat_map(Map::keys).map(String::as_str);
        let not_held = words.filter(|word| !held.contains(word) && !NOTES.contains(word) && !word.starts_with("x-"));
        self.not_held.extend(not_held.map(|word| way(place, &[word])));
    }
}

/// A list of a schema that is not empty.
fn listed<'s>(schema: &'s Value, word: &str) -> Option<&'s [Value]> {
    schema[word].as_array().map(Vec::as_slice).filter(|list| !list.is_empty())
}

/// A name as a step of a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// A value without parts between marks if it is a text, otherwise as JSON; `None` for a list or an object.
fn scalar(value: &Value, mark: &str) -> Option<String> {
    match value {
        Value::String(text) => Some(format!("{mark} {} {mark}", plain(text))),
        Value::Array(_) | Value::Object(_) => None,
        value => Some(plain(&value.to_string())),
    }
}
