//! Parts of a schema that no grammar holds: which they are, by what the library says, and where they stand. A schema without them allows
//! more, never less.

use crate::generation::Grammars;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The steps from a schema's root to one of its parts.
pub type Way = Vec<String>;

/// Words whose values are schemas by name.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Words whose values are data and not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "required"];

/// Calls `see` with every schema within `value` and the steps to it, outermost first. `names`: the value is no schema but has some by name.
fn each(value: &Value, names: bool, way: &mut Way, see: &mut dyn FnMut(&Way, &Map<String, Value>)) {
    match value {
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                way.push(i.to_string());
                each(item, false, way, see);
                way.pop();
            }
        }
        Value::Object(map) => {
            if !names {
                see(way, map);
            }
            for (word, inner) in map.iter().filter(|(word, _)| names || !DATA.contains(&word.as_str())) {
                way.push(word.clone());
                each(inner, !names && MAPS.contains(&word.as_str()), way, see);
                way.pop();
            }
        }
        _ => {}
    }
}

/// The words of all schemas within `schema` that `is` chooses, given the word, its value and the schema that it is in.
fn words(schema: &Value, mut is: impl FnMut(&str, &Value, &Map<String, Value>) -> bool) -> Vec<Way> {
    let mut found = Vec::new();
    each(schema, false, &mut Way::new(), &mut |way, map| {
        let here = map.iter().filter(|(word, value)| is(word, value, map));
        found.extend(here.map(|(word, _)| way.iter().chain([word]).cloned().collect::<Way>()));
    });
    found
}

/// The places of the words that the library has left out, by its warnings.
pub fn ignored(schema: &Value, warnings: &[String]) -> Vec<Way> {
    // It adds how often it said it.
    let once = |said: &str| match said.rsplit_once(" (") {
        Some((said, times)) if times.ends_with(" times)") => said.to_owned(),
        _ => said.to_owned(),
    };
    let (mut keys, mut formats, mut one_of, mut counts) = (Vec::<String>::new(), Vec::new(), false, false);
    for said in warnings.iter().map(|said| once(said)) {
        if let Some(list) = said.strip_prefix("Unimplemented keys: ") {
            keys.extend(serde_json::from_str::<Vec<String>>(list).unwrap_or_default());
        } else if let Some(format) = said.strip_prefix("Unknown format: ") {
            formats.push(format.to_owned());
        } else {
            one_of |= said.starts_with("oneOf ");
            counts |= said.starts_with("min/maxProperties ");
        }
    }
    words(schema, |word, value, _| match word {
        "format" => value.as_str().is_some_and(|format| formats.iter().any(|unknown| unknown == format)),
        "oneOf" => one_of,
        "minProperties" | "maxProperties" => counts,
        word => keys.iter().any(|key| key == word),
    })
}

/// The parts at fault for the library's complaint `why`, which it does not leave out by itself; empty if there are none that could be left
/// out.
pub fn culprits(grammars: &Grammars, schema: &Value, why: &str) -> Vec<Way> {
    if why.contains("regex parse error") {
        return patterns(grammars, schema);
    }
    if why.contains("patternProperty regexes") {
        // Names that fit two patterns: the library does not join their schemas.
        let overlap = |map: &Map<String, Value>| map.contains_key("patternProperties");
        return words(schema, |word, _, map| {
            word == "patternProperties" || word == "additionalProperties" && overlap(map)
        });
    }
    if why.contains("Only absolute $ref's") {
        let local = |to: &Value| to.as_str().is_none_or(|to| to == "#" || to.starts_with("#/"));
        return words(schema, |word, value, _| word == "$ref" && !local(value));
    }
    if let Some((_, circle)) = why.split_once("circular references with sibling keys are not supported: ") {
        let beside = |map: &Map<String, Value>| map.len() > 1;
        return words(schema, |word, value, map| word == "$ref" && value.as_str() == Some(circle) && beside(map));
    }
    if why.contains("'multipleOf' has too many digits") {
        let text = |value: &Value| value.as_f64().map(|number| number.abs().to_string());
        return words(schema, |word, value, _| {
            word == "multipleOf" && text(value).is_some_and(|text| why.contains(&text))
        });
    }
    Vec::new()
}

/// The patterns that the library does not take.
fn patterns(grammars: &Grammars, schema: &Value) -> Vec<Way> {
    let mut known = BTreeMap::new();
    let mut bad = |pattern: &str| {
        let tried = || grammars.json_schema(&json!({"type": "string", "pattern": pattern}), true).is_err();
        *known.entry(pattern.to_owned()).or_insert_with(tried)
    };
    let mut found = Vec::new();
    each(schema, false, &mut Way::new(), &mut |way, map| {
        let place = |words: &[&str]| way.iter().cloned().chain(words.iter().map(|w| (*w).to_owned())).collect::<Way>();
        if map.get("pattern").and_then(Value::as_str).is_some_and(&mut bad) {
            found.push(place(&["pattern"]));
        }
        let names = map.get("patternProperties").and_then(Value::as_object);
        let before = found.len();
        let names = names.into_iter().flatten().filter(|(name, _)| bad(name));
        found.extend(names.map(|(name, _)| place(&["patternProperties", name])));
        // What a pattern allowed that is gone, this would forbid.
        if found.len() > before && map.contains_key("additionalProperties") {
            found.push(place(&["additionalProperties"]));
        }
    });
    found
}

/// Removes a part from a schema, if present.
pub fn remove(schema: &mut Value, way: &[String]) {
    let Some((last, before)) = way.split_last() else { return };
    let mut at = schema;
    for step in before {
        let inner = match at {
            Value::Array(items) => step.parse::<usize>().ok().and_then(|i| items.get_mut(i)),
            at => at.get_mut(step),
        };
        let Some(inner) = inner else { return };
        at = inner;
    }
    if let Some(map) = at.as_object_mut() {
        map.shift_remove(last);
    }
}

/// Has references within a schema point to where they did, now that the schema is part of another at the reference `root`.
pub fn reroot(schema: &mut Value, root: &str) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| reroot(item, root)),
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(to) if key == "$ref" && (to == "#" || to == "#/") => *to = root.to_owned(),
                    Value::String(to) if key == "$ref" && to.starts_with("#/") => *to = format!("{root}{}", &to[1..]),
                    inner => reroot(inner, root),
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointers(ways: Vec<Way>) -> Vec<String> {
        ways.iter().map(|way| way.join("/")).collect()
    }

    #[test]
    fn words_are_found_where_schemas_are_and_not_in_names_or_data() {
        let schema = json!({
            "properties": {"not": {"not": {}}, "x": {"const": {"not": 1}, "items": [{"not": {}}]}},
            "$defs": {"oneOf": {"anyOf": [{"format": "odd"}, {"format": "date"}]}},
        });
        let warnings = ["Unimplemented keys: [\"not\"] (3 times)".to_owned(), "Unknown format: odd".to_owned()];
        let places = ["properties/not/not", "properties/x/items/0/not", "$defs/oneOf/anyOf/0/format"];
        assert_eq!(pointers(ignored(&schema, &warnings)), places);
    }

    #[test]
    fn what_is_taken_out_makes_a_schema_that_the_library_takes() {
        let grammars = Grammars::small().unwrap();
        for (mut schema, places) in [
            (
                json!({"properties": {"pattern": {"pattern": "^(?!x)"}, "b": {"pattern": "a"}}}),
                &["properties/pattern/pattern"][..],
            ),
            (
                json!({"patternProperties": {"^(?=a)": {}, "^b": {}}, "additionalProperties": false}),
                &["patternProperties/^(?=a)", "additionalProperties"],
            ),
            (
                json!({"items": {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}}}}),
                &["items/patternProperties"],
            ),
            (json!({"anyOf": [{"$ref": "https://example.org/x"}, {"$ref": "#x"}]}), &["anyOf/0/$ref", "anyOf/1/$ref"]),
        ] {
            let why = grammars.json_schema(&schema, false).map(drop).unwrap_err();
            let found = culprits(&grammars, &schema, &why);
            found.iter().for_each(|way| remove(&mut schema, way));
            assert_eq!(pointers(found), places, "{why}");
            assert!(grammars.json_schema(&schema, false).is_ok(), "{schema}");
        }
        let schema = json!({"type": "strnig"});
        let why = grammars.json_schema(&schema, false).map(drop).unwrap_err();
        assert_eq!(culprits(&grammars, &schema, &why), Vec::<Way>::new());
    }
}
