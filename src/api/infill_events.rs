//! The answers of POST /infill: whole, and as events of a stream.

use super::reading::Part;
use super::writing::{Response, WritesParts};
use crate::clock::Duration;
use crate::generation::{Done, Reason};
use serde_json::{Map, Value, json};

/// Writes an answer of POST /infill.
#[derive(Debug)]
pub struct InfillEvents;

/// Whether only the prompt is read: its job makes one token, of which nothing is told.
fn reads_only(of: &Response) -> bool {
    of.echo["reads_only"] == true
}

fn object(of: &Response, text: &str) -> Value {
    let text = if reads_only(of) { "" } else { text };
    json!({"index": 0, "content": text, "tokens": [], "stop": false, "id_slot": -1, "model": of.model.name})
}

/// The fields of an object that the request asks for, those within others by their whole way.
fn chosen(object: Value, of: &Response) -> Value {
    let ways: Vec<&str> = of.echo["sent"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if ways.is_empty() {
        return object;
    }
    let value = |way: &str| way.split('/').try_fold(&object, |at, name| at.get(name)).cloned();
    ways.into_iter().filter_map(|way| Some((way.to_owned(), value(way)?))).collect::<Map<String, Value>>().into()
}

/// The last object, or the only one.
fn last(of: &Response, text: &str, done: &Done) -> Value {
    let stops = of.echo["stops"].as_array().map_or(&[][..], Vec::as_slice);
    let word = done.stopped_by.and_then(|i| stops.get(i)).filter(|_| !reads_only(of));
    let generated = if reads_only(of) { 0 } else { done.generated_tokens };
    let rates = |name: &str, n: usize, time: Duration| {
        let (n, ms) = (n as f64, time.as_secs_f64() * 1e3);
        let per = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        [
            (format!("{name}_n"), Value::from(n as u64)),
            (format!("{name}_ms"), ms.into()),
            (format!("{name}_per_token_ms"), per(ms, n).into()),
            (format!("{name}_per_second"), per(n * 1e3, ms).into()),
        ]
    };
    let read = rates("prompt", done.prompt_tokens - done.cached_tokens, done.prompt_time);
    let timings: Map<String, Value> =
        read.into_iter().chain(rates("predicted", generated, done.generation_time)).collect();
    let mut last = object(of, text);
    for (name, value) in [
        ("stop", true.into()),
        (
            "stop_type",
            match done.reason {
                _ if reads_only(of) => "limit",
                Reason::Length => "limit",
                Reason::Stop if word.is_some() => "word",
                Reason::Stop => "eos",
            }
            .into(),
        ),
        ("stopping_word", word.cloned().unwrap_or_else(|| "".into())),
        ("truncated", of.echo["truncated"].clone()),
        ("tokens_evaluated", done.prompt_tokens.into()),
        ("tokens_cached", done.cached_tokens.into()),
        ("tokens_predicted", generated.into()),
        ("generation_settings", json!({"n_ctx": of.model.context})),
        ("timings", timings.into()),
    ] {
        last[name] = value;
    }
    chosen(last, of)
}

impl WritesParts for InfillEvents {
    fn begin(&mut self, _of: &Response) -> Vec<Value> {
        Vec::new()
    }

    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value> {
        if let Part::Text(text) = part { vec![object(of, text)] } else { Vec::new() }
    }

    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value> {
        vec![last(of, "", done)]
    }

    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value {
        let text = |part: &Part| if let Part::Text(text) = part { text.clone() } else { String::new() };
        last(of, &parts.iter().map(text).collect::<String>(), done)
    }
}
