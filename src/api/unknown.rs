//! Fields that a request has and nothing here knows, and fields whose values are not looked at.

use super::error::{ApiError, malformed, unknown_field};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_ignored::Path;
use std::cell::RefCell;
use std::fmt;

/// Paths of ignored fields that are kept of a request, at most.
const MAX_IGNORED: usize = 16;

/// Whether unknown fields are refused; if not, the paths of those that were ignored.
#[derive(Debug, Default)]
pub struct Unknown {
    ignores: bool,
    ignored: RefCell<Vec<String>>,
}

impl Unknown {
    /// Unknown fields are ignored if `ignores`, and refused if not.
    pub fn new(ignores: bool) -> Unknown {
        Unknown { ignores, ignored: RefCell::default() }
    }

    /// Whether a field that cannot be kept to is ignored, as an unknown one is; then it is noted.
    pub fn ignores(&self, path: &str) -> bool {
        if self.ignores {
            self.note(path.to_owned());
        }
        self.ignores
    }

    fn note(&self, path: String) {
        let mut ignored = self.ignored.borrow_mut();
        if ignored.len() < MAX_IGNORED {
            ignored.push(path);
        }
    }

    /// The paths of fields that were ignored.
    pub fn into_ignored(self) -> Vec<String> {
        self.ignored.into_inner()
    }

    /// Reads a `T` from JSON; `fields` are the names it may have, for "did you mean", and `place` is its own path in the request.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn read<'de, T, D>(&self, place: &str, from: D, fields: &[&str]) -> Result<T, ApiError>
    where
        T: DeserializeOwned,
        D: Deserializer<'de, Error = serde_json::Error>,
    {
        let mut first = None;
        let mut found = |path: Path<'_>| match self.ignores {
            true => self.note(written(place, &path)),
            false => {
                first.get_or_insert_with(|| written(place, &path));
            }
        };
        let read = serde_path_to_error::deserialize(serde_ignored::Deserializer::new(from, &mut found));
        // A field that is missing may be there under a name that is not right.
        first.map_or_else(|| read.map_err(malformed), |path| Err(unknown_field(&path, fields)))
    }
}

/// A path as errors have it: `messages[1].mood`.
fn written(place: &str, path: &Path<'_>) -> String {
    match path {
        Path::Root => place.to_owned(),
        Path::Seq { parent, index } => format!("{}[{index}]", written(place, parent)),
        Path::Map { parent, key } => match written(place, parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            written(place, parent)
        }
    }
}

/// Whether a field says anything: its value is dropped. `false`, 0 and empty texts, lists and objects say nothing.
#[derive(Clone, Copy, Debug)]
pub struct Given(pub bool);

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Given, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = Given;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_unit<E: Error>(self) -> Result<Given, E> {
                Ok(Given(false))
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Given, E> {
                Ok(Given(value))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Given, E> {
                Ok(Given(number != 0))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Given, E> {
                Ok(Given(number != 0))
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Given, E> {
                Ok(Given(number != 0.0))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Given, E> {
                Ok(Given(!text.is_empty()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Given, A::Error> {
                let mut given = false;
                while items.next_element::<Given>()?.is_some() {
                    given = true;
                }
                Ok(Given(given))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Given, A::Error> {
                let mut given = false;
                while entries.next_entry::<Given, Given>()?.is_some() {
                    given = true;
                }
                Ok(Given(given))
            }
        }

        from.deserialize_any(Read)
    }
}

/// Declares an object of which only these fields are kept and any other is taken: what a request repeats of an answer.
macro_rules! open_object {
    ($(#[$of:meta])* $vis:vis $name:ident { $($(#[$meta:meta])* $field:ident as $key:literal: $type:ty,)* }) => {
        $(#[$of])*
        #[derive(Clone, Debug, Default)]
        $vis struct $name {
            $($(#[$meta])* $vis $field: Option<$type>,)*
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<$name, D::Error> {
                struct Read;

                impl<'de> serde::de::Visitor<'de> for Read {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<$name, A::Error> {
                        let mut read = <$name>::default();
                        while let Some(key) = entries.next_key::<String>()? {
                            match key.as_str() {
                                $($key => read.$field = entries.next_value()?,)*
                                _ => drop(entries.next_value::<super::unknown::Given>()?),
                            }
                        }
                        Ok(read)
                    }
                }

                from.deserialize_map(Read)
            }
        }
    };
}
pub(super) use open_object;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, serde::Deserialize)]
    struct Outer {
        #[serde(rename = "list")]
        _list: Option<Vec<Inner>>,
        #[serde(rename = "given")]
        _given: Option<Given>,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        #[serde(rename = "name")]
        _name: Option<String>,
    }

    #[test]
    fn an_unknown_field_is_refused_or_told_by_its_path_and_a_known_one_whose_value_is_dropped_is_neither() {
        let value =
            json!({"given": {"a": [1, {"b": null}]}, "list": [{"name": "x"}, {"mane": {"deep": 1}}], "more": 1});
        let refused = Unknown::new(false).read::<Outer, _>("", &value, &["list", "given", "many"]).unwrap_err();
        assert_eq!((refused.param.as_deref(), refused.code), (Some("list[1].mane"), Some("unknown_field")));
        // The request's own names are no names within another field.
        assert_eq!(refused.message, "unknown field 'mane'");
        let unknown = Unknown::new(true);
        unknown.read::<Outer, _>("", &value, &[]).unwrap();
        assert_eq!(unknown.into_ignored(), ["list[1].mane", "more"]);
    }

    #[test]
    fn what_says_nothing_is_not_given() {
        let given = |value: serde_json::Value| Given::deserialize(value).unwrap().0;
        for nothing in [json!(null), json!(false), json!(0), json!(""), json!([]), json!({})] {
            assert!(!given(nothing.clone()), "{nothing}");
        }
        for something in [json!(true), json!(-1), json!(0.5), json!("x"), json!([null]), json!({"a": null})] {
            assert!(given(something.clone()), "{something}");
        }
    }
}
