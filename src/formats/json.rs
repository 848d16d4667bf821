//! JSON as Python writes it.

use serde_json::Value;

/// The value of a JSON text, in which `Infinity`, `-Infinity` and `NaN`, which Python writes and JSON does not have, are `null`.
///
/// # Errors
/// What is wrong with it, and where.
pub fn parse(text: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(text)
        .or_else(|e| without_infinity(text).map_or(Err(e), |text| serde_json::from_slice(&text)))
}

/// The text with `null` in the place of these words outside its strings; `None` where there are none.
fn without_infinity(text: &[u8]) -> Option<Vec<u8>> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut out, mut at, mut in_string, mut found) = (Vec::with_capacity(text.len()), 0, false, false);
    while at < text.len() {
        let rest = &text[at..];
        let (kept, taken): (&[u8], usize) = match WORDS.into_iter().find(|word| !in_string && rest.starts_with(word)) {
            Some(word) => (b"null", word.len()),
            None if in_string && rest[0] == b'\\' => (&rest[..rest.len().min(2)], rest.len().min(2)),
            None => (&rest[..1], 1),
        };
        found |= kept == b"null";
        in_string ^= kept == b"\"";
        out.extend_from_slice(kept);
        at += taken;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_of_python_are_null_outside_strings() {
        let text = br#"{"a": [0.0, Infinity, -Infinity], "NaN": NaN, "b": "\"Infinity\\", "c": "NaN"}"#;
        let want = json!({"a": [0.0, null, null], "NaN": null, "b": "\"Infinity\\", "c": "NaN"});
        assert_eq!(parse(text).unwrap(), want);
        for wrong in [&b"{"[..], b"", b"[Infinity", b"\"\\", b"Infinit"] {
            assert!(parse(wrong).is_err());
        }
    }
}
