//! Types of request fields that keep no more of the request than is used. A parsed JSON tree takes up to a hundred times the bytes of its
//! text, and so does the buffer that serde keeps while it tries the variants of an untagged enum.

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// A JSON string, or a list of `T`.
#[derive(Clone, Debug)]
pub enum TextOr<T> {
    /// A string.
    Text(String),
    /// A list, possibly empty.
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<TextOr<T>, D::Error> {
        struct Read<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<TextOr<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    list.push(item);
                }
                Ok(TextOr::List(list))
            }
        }

        from.deserialize_any(Read(PhantomData))
    }
}

/// A JSON object of numbers with at most `MAX` entries; of a repeated name the last value counts.
#[derive(Clone, Debug, Default)]
pub struct Numbers<const MAX: usize>(pub BTreeMap<String, f64>);

impl<'de, const MAX: usize> Deserialize<'de> for Numbers<MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Numbers<MAX>, D::Error> {
        struct Read<const MAX: usize>;

        impl<'de, const MAX: usize> Visitor<'de> for Read<MAX> {
            type Value = Numbers<MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Numbers<MAX>, A::Error> {
                let mut numbers = BTreeMap::new();
                while let Some((name, number)) = entries.next_entry()? {
                    numbers.insert(name, number);
                    if numbers.len() > MAX {
                        return Err(A::Error::custom(format!("there are more than {MAX} entries")));
                    }
                }
                Ok(Numbers(numbers))
            }
        }

        from.deserialize_map(Read)
    }
}

/// Any JSON value; only strings, token ids and lists of one kind of them are kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// A string.
    Text(String),
    /// A whole number from 0 to 2^32 - 1.
    Token(u32),
    /// A list of strings, at least one.
    Texts(Vec<String>),
    /// A list of token ids; also the empty list.
    Tokens(Vec<u32>),
    /// A list of lists of token ids, at least one.
    Lists(Vec<Vec<u32>>),
    /// Anything else: its value is dropped.
    Other,
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Item, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Item, E> {
                Ok(u32::try_from(number).map_or(Item::Other, Item::Token))
            }

            fn visit_i64<E: Error>(self, _: i64) -> Result<Item, E> {
                Ok(Item::Other)
            }

            fn visit_f64<E: Error>(self, _: f64) -> Result<Item, E> {
                Ok(Item::Other)
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Item, E> {
                Ok(Item::Other)
            }

            fn visit_unit<E: Error>(self) -> Result<Item, E> {
                Ok(Item::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Item, A::Error> {
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Item::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
                let (mut texts, mut ids, mut lists, mut others) = (Vec::new(), Vec::new(), Vec::new(), false);
                while let Some(item) = items.next_element()? {
                    match item {
                        Item::Text(text) => texts.push(text),
                        Item::Token(id) => ids.push(id),
                        Item::Tokens(ids) => lists.push(ids),
                        _ => others = true,
                    }
                }
                Ok(match (texts.is_empty(), ids.is_empty(), lists.is_empty(), others) {
                    (true, _, true, false) => Item::Tokens(ids),
                    (false, true, true, false) => Item::Texts(texts),
                    (true, true, false, false) => Item::Lists(lists),
                    _ => Item::Other,
                })
            }
        }

        from.deserialize_any(Read)
    }
}

/// Values in a tree that is kept: more than any schema that is accepted has.
const MAX_VALUES: usize = 128 << 10;

/// Reads a JSON tree of at most `MAX_VALUES` values, for `deserialize_with`; `None` for null.
///
/// # Errors
/// Invalid JSON, or too many values.
pub fn tree<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    let tree = Tree(&Cell::new(0)).deserialize(from)?;
    Ok(Some(tree).filter(|tree| !tree.is_null()))
}

/// Reads a tree and counts its values in the cell.
struct Tree<'a>(&'a Cell<usize>);

impl Tree<'_> {
    fn one<E: Error>(&self, value: impl Into<Value>) -> Result<Value, E> {
        self.0.set(self.0.get() + 1);
        match self.0.get() > MAX_VALUES {
            true => Err(E::custom(format!("there are more than {MAX_VALUES} values"))),
            false => Ok(value.into()),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.one(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Tree(self.0))? {
            list.push(item);
        }
        self.one(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            map.insert(key, entries.next_value_seed(Tree(self.0))?);
        }
        self.one(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_tree_is_what_serde_json_reads_and_one_of_too_many_values_is_refused() {
        let read = |text: &str| tree(&mut serde_json::Deserializer::from_str(text));
        let value = json!({"a": [1, -2, 2.5, "x", null, true, {"b": {}, "c": []}], "d": 18_446_744_073_709_551_615u64});
        assert_eq!(read(&value.to_string()).unwrap(), Some(value));
        assert_eq!(read("null").unwrap(), None);
        let many = |n: usize| format!("[0{}]", ",0".repeat(n - 2));
        assert!(read(&many(MAX_VALUES)).is_ok());
        let error = read(&many(MAX_VALUES + 1)).unwrap_err();
        assert!(error.to_string().contains("more than 131072 values"), "{error}");
    }

    #[test]
    fn an_item_keeps_what_a_prompt_can_be() {
        let read = |text: &str| serde_json::from_str::<Item>(text).unwrap();
        assert_eq!(read("\"x\""), Item::Text("x".into()));
        assert_eq!(read("[1, 2]"), Item::Tokens(vec![1, 2]));
        assert_eq!(read("[]"), Item::Tokens(vec![]));
        assert_eq!(read("[[1], []]"), Item::Lists(vec![vec![1], vec![]]));
        assert_eq!(read("[\"x\", \"y\"]"), Item::Texts(vec!["x".into(), "y".into()]));
        for other in ["[1, \"x\"]", "[-1]", "[4294967296]", "[[\"x\"]]", "[[[1]]]", "{}", "true", "[null]", "0.5"] {
            assert_eq!(read(other), Item::Other, "{other}");
        }
    }
}
