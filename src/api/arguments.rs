//! The arguments of a function one by one, as its JSON schema has them.

use serde_json::Value;

/// References that are followed one after the other, at most: they may go in a circle.
const MAX_REFERENCES: usize = 8;
/// Words beside a reference that change nothing of what it refers to.
const BESIDE: [&str; 10] =
    ["$ref", "$defs", "definitions", "$schema", "$id", "type", "title", "description", "default", "examples"];
/// Words that a text which is written as it is, without quotes, cannot be kept to.
const NEED_QUOTES: [&str; 8] = ["pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "$ref"];

/// The part of the schema `root` that the part `at` refers to, and its JSON pointer; `at` itself, whose pointer is `place`, if it refers to
/// none or has more than a reference.
pub fn resolve<'a>(root: &'a Value, mut at: &'a Value, mut place: String) -> (&'a Value, String) {
    for _ in 0..MAX_REFERENCES {
        let alone = at.as_object().is_some_and(|words| words.keys().all(|word| BESIDE.contains(&word.as_str())));
        let to = at["$ref"].as_str().filter(|_| alone).and_then(|to| to.strip_prefix('#'));
        let Some((to, part)) = to.and_then(|to| Some((to, root.pointer(to)?))) else { break };
        (at, place) = (part, to.to_owned());
    }
    (at, place)
}

/// The schema of one argument; `None`: any value.
pub fn argument<'a>(arguments: &'a Value, key: &str) -> Option<&'a Value> {
    let (all, _) = resolve(arguments, arguments, String::new());
    let own = all["properties"].get(key).or_else(|| all.get("additionalProperties"))?;
    Some(resolve(arguments, own, String::new()).0)
}

/// Characters that a text with this schema has at least and at most.
pub fn lengths(schema: &Value) -> (u64, Option<u64>) {
    (schema["minLength"].as_u64().unwrap_or(0), schema["maxLength"].as_u64())
}

/// The texts that an argument with this schema of a text may be, where it names them.
pub fn only_texts(schema: &Value) -> Option<Vec<&str>> {
    let (least, most) = lengths(schema);
    let listed = schema["enum"].as_array();
    let only = schema.get("const").map(std::slice::from_ref);
    let fits = |text: &&str| {
        let length = text.chars().count() as u64;
        length >= least && most.is_none_or(|most| length <= most)
    };
    let both = |text: &&str| only.is_none() || listed.is_none_or(|listed| listed.iter().any(|one| one == text));
    let texts = only.or(listed.map(Vec::as_slice))?.iter().filter_map(Value::as_str);
    Some(texts.filter(fits).filter(both).collect())
}

/// Whether an argument with this schema can be no text, though it has to be one.
pub fn fits_no_text(schema: &Value) -> bool {
    let (least, most) = lengths(schema);
    schema["type"] == "string"
        && (most.is_some_and(|most| most < least) || only_texts(schema).is_some_and(|texts| texts.is_empty()))
}

/// Whether an argument with this schema is a text that a call has as it is; any other value is JSON.
pub fn is_text(schema: &Value) -> bool {
    let texts = |values: &Value| {
        values.as_array().is_none_or(|values| !values.is_empty() && values.iter().all(Value::is_string))
    };
    let length = |word: &str| schema.get(word).is_none_or(Value::is_u64);
    schema["type"] == "string"
        && NEED_QUOTES.iter().all(|word| schema.get(word).is_none())
        && texts(&schema["enum"])
        && schema.get("const").is_none_or(Value::is_string)
        && length("minLength")
        && length("maxLength")
        && !fits_no_text(schema)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_argument_is_found_behind_references_and_by_the_schema_of_further_names() {
        let schema = json!({
            "$ref": "#/$defs/a~1b", "description": "x",
            "$defs": {
                "a/b": {"properties": {"unit": {"$ref": "#/$defs/unit"}, "more": {"$ref": "#/$defs/unit", "pattern": "x"}},
                        "additionalProperties": {"type": "integer"}},
                "unit": {"type": "string", "enum": ["C"]},
            },
        });
        let is = |key: &str| argument(&schema, key).map(is_text);
        assert_eq!([is("unit"), is("more"), is("other")], [Some(true), Some(false), Some(false)]);
        assert_eq!(argument(&json!({"$ref": "#"}), "x"), None);
        assert_eq!(argument(&json!({"type": "object"}), "x"), None);
        for json in [
            json!({"type": "string", "format": "date"}),
            json!({"type": "string", "enum": ["a", null]}),
            json!({"type": "string", "enum": []}),
            json!({}),
        ] {
            assert!(!is_text(&json), "{json}");
        }
        assert!(is_text(&json!({"type": "string", "minLength": 1, "const": "x"})));
    }
}
