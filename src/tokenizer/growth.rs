//! How much longer the steps of a `tokenizer.json` can make a text, computed from the file before any of them runs. Forty steps that each
//! double a letter cannot be tried to the end, and the tokenizers library runs the steps on added tokens while it reads the file.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Bytes that a normaliser may make of one, at most. Compatibility forms (NFKC) make 11 of one, `▁` for a space 3. What a text really
/// becomes is limited text by text ([`super::hf::Encoder`]), so this only has to keep that check affordable.
pub const OF_NORMALIZER: f64 = 1024.0;
/// The same for a pre-tokeniser: Metaspace and ByteLevel make 4 each, with a space before every piece.
pub const OF_PRE_TOKENIZER: f64 = 16.0;
/// Steps of one part, at most; each goes over the whole text. The most in use are some ten.
const MAX_STEPS: usize = 256;
/// Bytes of the text that a step replaces or inserts, at most: usually a letter or a word.
const MAX_WORD: usize = 1024;
/// Bytes of a regex, at most; the longest in use have some thousands and list writing systems letter by letter.
const MAX_REGEX: usize = 64 << 10;

/// An upper bound of what the steps of a part make of n bytes: `factor * n + added`.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Bytes made of each byte.
    pub factor: f64,
    /// Bytes added whatever the length.
    pub added: f64,
    steps: usize,
}

impl Growth {
    /// The growth of a `normalizer` or `pre_tokenizer`; `most` is the largest factor that is accepted.
    ///
    /// # Errors
    /// What is wrong with it: an empty pattern, a word that is too long, or more steps or growth than are supported.
    pub fn of(part: Option<&Value>, most: f64) -> Result<Growth, String> {
        let mut growth = Growth { factor: 1.0, added: 0.0, steps: 0 };
        part.map_or(Ok(()), |part| growth.walk(part))?;
        if growth.steps > MAX_STEPS {
            return Err(format!("it has {} steps; at most {MAX_STEPS} are supported", growth.steps));
        }
        if growth.factor > most || growth.added > most {
            let most_of_one = growth.factor.max(growth.added);
            return Err(format!("its steps can make {most_of_one:.0} bytes of one; at most {most} are supported"));
        }
        Ok(growth)
    }

    /// Recognises steps by their keys, and by their type if they have no other keys, because the library also accepts steps without a type.
    fn walk(&mut self, part: &Value) -> Result<(), String> {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        if matches!(kind, "Sequence" | "") {
            let lists = ["normalizers", "pretokenizers"].into_iter().filter_map(|key| part.get(key)?.as_array());
            lists.flatten().try_for_each(|part| self.walk(part))?;
        }
        if kind == "Sequence" {
            return Ok(());
        }
        if part.get("precompiled_charsmap").is_some() {
            return Err("Precompiled is not supported".into());
        }
        let word = |key: &str| part.get(key).and_then(Value::as_str).map(|word| checked(key, word)).transpose();
        let mut factor = match kind {
            "NFC" | "NFD" => 3.0,
            "NFKC" | "NFKD" => 11.0,
            "Lowercase" => 1.5,
            _ => 1.0,
        };
        let mut added = word("prepend")?.unwrap_or(0) as f64;
        if let Some(pattern) = part.get("pattern") {
            let (each, at_end) = replaced(pattern, word("content")?.unwrap_or(0) as f64)?;
            (factor, added) = (factor * each, added + at_end);
        }
        if kind == "ByteLevel" || part.get("trim_offsets").is_some() {
            // A space before each piece, and each byte a letter of two.
            factor *= 4.0;
        }
        if let Some(replacement) = word("replacement")? {
            // For each space, and before each piece.
            factor *= 1.0 + replacement as f64;
        }
        if part.get("handle_chinese_chars").is_some() {
            // Spaces around a letter of three bytes; NFD; lower case.
            factor *= 5.0 / 3.0 * 4.5;
        }
        self.steps += 1;
        self.factor *= factor;
        self.added = self.added * factor + added;
        Ok(())
    }
}

/// Of a step with a pattern: what takes the place of each match, or nothing where it only splits.
fn replaced(pattern: &Value, content: f64) -> Result<(f64, f64), String> {
    let text = |kind: &str| pattern.get(kind).and_then(Value::as_str);
    match (text("String"), text("Regex")) {
        (Some(""), _) | (_, Some("")) => Err("the pattern of a step is empty, and that is everywhere".into()),
        (Some(text), _) => Ok(((content / checked("pattern", text)? as f64).max(1.0), 0.0)),
        (None, Some(regex)) if regex.len() > MAX_REGEX => {
            let n = regex.len();
            Err(format!("the regular expression of a step has {n} bytes; at most {MAX_REGEX} are supported"))
        }
        // It may match between any two letters, and at the end.
        (None, _) => Ok((1.0 + content, content)),
    }
}

fn checked(key: &str, word: &str) -> Result<usize, String> {
    match word.len() {
        n if n > MAX_WORD => Err(format!("the {key} of a step has {n} bytes; at most {MAX_WORD} are supported")),
        n => Ok(n),
    }
}

/// How many values a part of the file has, told without keeping any: as a tree they take a hundred times the bytes of their text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weight(pub usize);

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Weight, D::Error> {
        struct Count;

        impl<'de> Visitor<'de> for Count {
            type Value = Weight;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_i64<E: Error>(self, _: i64) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_u64<E: Error>(self, _: u64) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_f64<E: Error>(self, _: f64) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_str<E: Error>(self, _: &str) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_unit<E: Error>(self) -> Result<Weight, E> {
                Ok(Weight(1))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Weight, A::Error> {
                let mut all = 1;
                while let Some(Weight(item)) = items.next_element()? {
                    all += item;
                }
                Ok(Weight(all))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Weight, A::Error> {
                let mut all = 1;
                while let Some((Weight(key), Weight(value))) = entries.next_entry()? {
                    all += key + value;
                }
                Ok(Weight(all))
            }
        }

        from.deserialize_any(Count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

    #[test]
    fn no_letter_grows_more_than_its_step_is_said_to() {
        for step in [
            json!({"type": "NFC"}),
            json!({"type": "NFD"}),
            json!({"type": "NFKC"}),
            json!({"type": "NFKD"}),
            json!({"type": "Lowercase"}),
            json!({"type": "ByteLevel"}),
            json!({"type": "Bert", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "bcd"}),
            json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yz"}),
            json!({"type": "Prepend", "prepend": "abc"}),
        ] {
            let growth = Growth::of(Some(&step), OF_NORMALIZER).unwrap();
            let normalizer: NormalizerWrapper = serde_json::from_value(step.clone()).unwrap();
            // What Unicode has not given a meaning does not change.
            for letter in '\0'..'\u{323b0}' {
                let mut text = NormalizedString::from(letter.to_string());
                normalizer.normalize(&mut text).unwrap();
                let said = growth.factor * letter.len_utf8() as f64 + growth.added;
                assert!(text.get().len() as f64 <= said, "{step} makes {} bytes of {letter:?}", text.get().len());
            }
        }
    }

    #[test]
    fn steps_multiply_and_what_is_put_before_grows_with_them() {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let steps = |n: usize| json!({"type": "Sequence", "normalizers": vec![double.clone(); n]});
        assert_eq!(Growth::of(Some(&steps(10)), OF_NORMALIZER).unwrap().factor, 1024.0);
        // Also where the types are left out, which the library takes.
        let untyped = json!({"normalizers": vec![json!({"pattern": {"String": "a"}, "content": "aa"}); 11]});
        for bad in [steps(40), untyped, json!({"normalizers": [steps(6), steps(6)]})] {
            assert!(Growth::of(Some(&bad), OF_NORMALIZER).unwrap_err().contains("bytes of one; at most 1024"));
        }
        let llama = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        let growth = Growth::of(Some(&llama), OF_NORMALIZER).unwrap();
        assert_eq!((growth.factor, growth.added), (3.0, 9.0));
    }
}
