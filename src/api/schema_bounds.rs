//! Checks of a schema that need no understanding of it: how large it is, and which places in it make it heavy.

use crate::error::excerpt;
use serde_json::Value;

/// Bytes of JSON, at most: a schema is part of a request, and the largest in use have some 100 KB.
pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// Lists and objects nested within each other, at most; a level of the schema itself takes two ("properties", the name).
pub const DEEPEST: usize = 64;
/// Values (lists, objects, numbers, texts) in the whole schema, at most.
pub const MAX_VALUES: usize = 16_384;
/// Entries of one list or object, at most: the library recurses once for each name of an object, and merges the objects of an `allOf` into
/// one.
const MAX_ENTRIES: usize = 4_096;
/// Heavy places that a message names.
const NAMED: usize = 3;

/// The JSON pointer of a place in the schema; `way` has the steps to it, the innermost last.
pub fn pointer(way: &[String]) -> String {
    if way.is_empty() {
        return "the root".into();
    }
    let step = |step: &String| format!("/{}", step.replace('~', "~0").replace('/', "~1"));
    excerpt(way.iter().map(step).collect::<String>())
}

/// Checks that a schema is small enough to be processed.
///
/// # Errors
/// What is too large, and where.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut values = 0;
    visit(schema, &mut Vec::new(), &mut |way, value| {
        values += 1;
        let entries = value.as_array().map(Vec::len).or_else(|| value.as_object().map(|o| o.len())).unwrap_or(0);
        if way.len() > DEEPEST {
            return Err(format!("{}: this is level {}; the limit is {DEEPEST}", pointer(way), way.len()));
        }
        if entries > MAX_ENTRIES {
            return Err(format!("{} has {entries} entries; the limit is {MAX_ENTRIES}", pointer(way)));
        }
        if values > MAX_VALUES {
            return Err(format!("at {} it exceeds the limit of {MAX_VALUES} values", pointer(way)));
        }
        Ok(())
    })?;
    let bytes = schema.to_string().len();
    if bytes > MAX_SCHEMA_BYTES {
        return Err(format!("it has {bytes} bytes; the limit is {MAX_SCHEMA_BYTES}"));
    }
    Ok(())
}

/// Calls `see` with every value and the steps to it, outermost first, down to one level below [`DEEPEST`].
fn visit<E, F: FnMut(&[String], &Value) -> Result<(), E>>(
    value: &Value,
    way: &mut Vec<String>,
    see: &mut F,
) -> Result<(), E> {
    see(way, value)?;
    if way.len() > DEEPEST {
        return Ok(());
    }
    let mut enter = |step: String, inner: &Value| {
        way.push(step);
        let seen = visit(inner, way, see);
        way.pop();
        seen
    };
    match value {
        Value::Array(items) => items.iter().enumerate().try_for_each(|(i, item)| enter(i.to_string(), item)),
        Value::Object(map) => map.iter().try_for_each(|(key, inner)| enter(key.clone(), inner)),
        _ => Ok(()),
    }
}

/// JSON pointers of places that can make a schema heavy: large counts, patterns, long lists. Empty if there are none.
pub fn heavy_places(schema: &Value) -> Vec<String> {
    let mut places = Vec::new();
    let _ = visit(schema, &mut Vec::new(), &mut |way, value| {
        let heavy = match (way.last().map(String::as_str), value) {
            (Some("multipleOf"), _) | (Some("pattern"), _) => true,
            (Some("patternProperties"), Value::Object(_)) => true,
            (Some(key), Value::Number(n)) if key.starts_with("min") || key.starts_with("max") => {
                n.as_f64().is_some_and(|n| n >= 500.0)
            }
            (_, Value::Array(items)) => items.len() >= 500,
            (_, Value::Object(map)) => map.len() >= 500,
            _ => false,
        };
        if heavy {
            places.push(pointer(way));
        }
        if places.len() < NAMED { Ok(()) } else { Err(()) }
    });
    places
}

/// JSON pointer of the place that the library complains of, if its words occur in one place only.
pub fn place_of(schema: &Value, complaint: &str) -> Option<String> {
    let mut places = Vec::new();
    let _ = visit(schema, &mut Vec::new(), &mut |way, value| {
        let key = way.last().map(String::as_str).unwrap_or_default();
        let (quoted, typed) = (format!("[\"{key}\"]"), value.as_str().map(|text| format!("Invalid type: {text}")));
        if complaint.contains(&quoted) || typed.is_some_and(|typed| complaint == typed) {
            places.push(pointer(way));
        }
        if places.len() < 2 { Ok(()) } else { Err(()) }
    });
    (places.len() == 1).then(|| places.remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_too_large_is_named_by_its_place() {
        let many: Vec<String> = (0..=MAX_ENTRIES).map(|i| i.to_string()).collect();
        let wide = check(&json!({"properties": {"a/b": {"required": many}}})).unwrap_err();
        assert!(wide.starts_with("/properties/a~1b/required has 4097 entries"), "{wide}");
        let deep = (0..100).fold(json!({}), |inner, _| json!({"not": inner}));
        assert!(check(&deep).unwrap_err().contains("this is level 65"));
        let block: Vec<u32> = (0..MAX_ENTRIES as u32).collect();
        let blocks = json!({"a": block, "b": block, "c": block, "d": block});
        assert!(check(&blocks).unwrap_err().contains("exceeds the limit of 16384 values"));
        assert!(check(&json!({"const": "x".repeat(MAX_SCHEMA_BYTES)})).unwrap_err().contains("bytes"));
        assert_eq!(check(&json!({"type": "object", "properties": {"a": {"enum": block}}})), Ok(()));
    }

    #[test]
    fn heavy_places_and_complaints_have_a_pointer() {
        let schema =
            json!({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "properties": {"x": {"type": "strnig"}}});
        assert_eq!(heavy_places(&schema), ["/allOf/0/multipleOf", "/allOf/1/multipleOf"]);
        assert_eq!(place_of(&schema, "Invalid type: strnig").as_deref(), Some("/properties/x/type"));
        assert_eq!(place_of(&json!({"not": {}}), "Unimplemented keys: [\"not\"]").as_deref(), Some("/not"));
        assert_eq!(place_of(&schema, "something else"), None);
        assert_eq!(heavy_places(&json!({"maxLength": 12})), Vec::<String>::new());
    }
}
