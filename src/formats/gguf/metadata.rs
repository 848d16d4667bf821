//! The keys of a GGUF file and their values.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // The variants are the format's own names.
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one type; arrays of arrays are in no model and refused.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // As for `Value`.
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The keys of a file. A getter answers `None` for a key that is not there and fails for one of another type.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    /// For messages.
    path: PathBuf,
    entries: Vec<Entry>,
    /// Indices of `entries`, by key.
    by_key: Vec<u32>,
}

/// A key with its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// The key's name.
    pub key: String,
    /// Where the key begins in the file.
    pub offset: u64,
    /// The key's value.
    pub value: Value,
}

impl Metadata {
    /// # Errors
    /// A key that is there twice.
    pub(super) fn new(entries: Vec<Entry>, path: &Path) -> Result<Metadata> {
        // The header's limit holds the count far below 2^32.
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        // Stable: of two equal keys, the second in the file comes second.
        by_key.sort_by(|&a, &b| entries[a as usize].key.cmp(&entries[b as usize].key));
        for pair in by_key.windows(2) {
            let [first, second] = [&entries[pair[0] as usize], &entries[pair[1] as usize]];
            if first.key == second.key {
                let reason = format!("the key is there twice, first at byte {}: the file is corrupt", first.offset);
                return Err(Error::bad_at(path, &second.key, second.offset, reason));
            }
        }
        Ok(Metadata { path: path.to_owned(), entries, by_key })
    }

    /// The value of a key; `None` if it is not there.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entry(key).map(|e| &e.value)
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|e| (e.key.as_str(), &e.value))
    }

    /// Where a key begins in the file, for messages about what its value means.
    pub fn offset(&self, key: &str) -> Option<u64> {
        self.entry(key).map(|e| e.offset)
    }

    /// The value of a key that holds a string.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |v| match v {
            Value::Str(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// The value of a key that holds an integer of any type, if it fits in a u32.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a whole number from 0 to 4294967295", |v| match *v {
            Value::U8(n) => Some(n.into()),
            Value::I8(n) => n.try_into().ok(),
            Value::U16(n) => Some(n.into()),
            Value::I16(n) => n.try_into().ok(),
            Value::U32(n) => Some(n),
            Value::I32(n) => n.try_into().ok(),
            Value::U64(n) => n.try_into().ok(),
            Value::I64(n) => n.try_into().ok(),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::Str(_) | Value::Array(_) => None,
        })
    }

    /// The value of a key that holds an f32 or f64. It may be NaN or infinite: the caller must check.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a floating point number", |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    /// The value of a key that holds a bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |v| match *v {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    /// The value of a key that holds an array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::Str(s)) => Some(s.as_slice()),
            _ => None,
        })
    }

    /// The value of a key that holds an array of f32.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "an array of f32", |v| match v {
            Value::Array(Array::F32(x)) => Some(x.as_slice()),
            _ => None,
        })
    }

    /// The value of a key that holds an array of i32, or of u32 below 2^31: token types are written as either.
    pub fn i32s(&self, key: &str) -> Result<Option<&[i32]>> {
        self.typed(key, "an array of i32", |v| match v {
            Value::Array(Array::I32(x)) => Some(x.as_slice()),
            Value::Array(Array::U32(x)) if x.iter().all(|&n| n <= i32::MAX as u32) => Some(bytemuck::cast_slice(x)),
            _ => None,
        })
    }

    /// The value of a key that holds an array of bools.
    pub fn bools(&self, key: &str) -> Result<Option<&[bool]>> {
        self.typed(key, "an array of bools", |v| match v {
            Value::Array(Array::Bool(x)) => Some(x.as_slice()),
            _ => None,
        })
    }

    pub(super) fn entry(&self, key: &str) -> Option<&Entry> {
        let found = self.by_key.binary_search_by(|&i| self.entries[i as usize].key.as_str().cmp(key));
        found.ok().map(|i| &self.entries[self.by_key[i] as usize])
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        read(&entry.value).map(Some).ok_or_else(|| self.wrong(entry, expected))
    }

    pub(super) fn wrong(&self, entry: &Entry, expected: &str) -> Error {
        let reason = format!("is {}, expected {expected}: convert the model again", describe(&entry.value));
        Error::bad_at(&self.path, &entry.key, entry.offset, reason)
    }
}

/// A value's type and, where it is short, the value.
fn describe(value: &Value) -> String {
    match value {
        Value::U8(n) => format!("the u8 {n}"),
        Value::I8(n) => format!("the i8 {n}"),
        Value::U16(n) => format!("the u16 {n}"),
        Value::I16(n) => format!("the i16 {n}"),
        Value::U32(n) => format!("the u32 {n}"),
        Value::I32(n) => format!("the i32 {n}"),
        Value::F32(x) => format!("the f32 {x}"),
        Value::Bool(b) => format!("the bool {b}"),
        Value::Str(_) => "a string".into(),
        Value::U64(n) => format!("the u64 {n}"),
        Value::I64(n) => format!("the i64 {n}"),
        Value::F64(x) => format!("the f64 {x}"),
        Value::Array(array) => {
            let (n, of) = match array {
                Array::U8(v) => (v.len(), "u8"),
                Array::I8(v) => (v.len(), "i8"),
                Array::U16(v) => (v.len(), "u16"),
                Array::I16(v) => (v.len(), "i16"),
                Array::U32(v) => (v.len(), "u32"),
                Array::I32(v) => (v.len(), "i32"),
                Array::F32(v) => (v.len(), "f32"),
                Array::Bool(v) => (v.len(), "bool"),
                Array::Str(v) => (v.len(), "strings"),
                Array::U64(v) => (v.len(), "u64"),
                Array::I64(v) => (v.len(), "i64"),
                Array::F64(v) => (v.len(), "f64"),
            };
            format!("an array of {n} {of}")
        }
    }
}
