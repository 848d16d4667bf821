//! A timeline as it lies on disk, and what holds for every one.
#![allow(dead_code)]

use serde_json::Value;
use std::path::Path;

#[derive(Clone, Debug)]
pub struct Slice {
    pub name: String,
    pub tid: u64,
    pub begin: i64,
    pub end: i64,
    pub args: Value,
}

pub struct Trace {
    pub text: String,
    json: Value,
}

impl Trace {
    pub fn read(path: &Path) -> Trace {
        let text = std::fs::read_to_string(path).unwrap();
        let json = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}"));
        Trace { text, json }
    }

    pub fn slices(&self, pid: u64) -> Vec<Slice> {
        let ns = |event: &Value, name: &str| (event[name].as_f64().unwrap() * 1e3).round() as i64;
        let events = self.json["traceEvents"].as_array().unwrap().iter();
        let mut slices: Vec<Slice> = events
            .filter(|e| e["ph"] == "X" && e["pid"] == pid)
            .map(|e| Slice {
                name: e["name"].as_str().unwrap().into(),
                tid: e["tid"].as_u64().unwrap(),
                begin: ns(e, "ts"),
                end: ns(e, "ts") + ns(e, "dur"),
                args: e["args"].clone(),
            })
            .collect();
        slices.sort_by_key(|s| (s.begin, -s.end));
        slices
    }

    pub fn host(&self) -> Vec<Slice> {
        self.slices(1)
    }

    /// The device's compute stream.
    pub fn device(&self) -> Vec<Slice> {
        self.slices(2).into_iter().filter(|s| s.tid == 1).collect()
    }

    pub fn moves(&self) -> Vec<Slice> {
        self.slices(2).into_iter().filter(|s| s.tid == 2).collect()
    }

    pub fn layers(&self) -> usize {
        let layers = self.host().into_iter().filter_map(|s| s.args["layer"].as_u64());
        layers.max().map_or(0, |last| last as usize + 1)
    }

    /// What a format's reader relies on, and what must hold of times.
    pub fn check(&self) {
        for event in self.json["traceEvents"].as_array().unwrap() {
            let known = ["M", "X", "i", "C"].contains(&event["ph"].as_str().unwrap());
            assert!(known && event["name"].is_string() && event["pid"].is_u64(), "{event}");
        }
        // Times are us with three digits of ns: rounding may be off by one at each end.
        const ROUNDING: i64 = 2;
        let mut open: Vec<Slice> = Vec::new();
        for slice in self.host() {
            open.retain(|outer| outer.end - ROUNDING > slice.begin);
            let inside = |outer: &Slice| slice.end <= outer.end + ROUNDING;
            assert!(open.iter().all(inside), "{slice:?} crosses the end of one of {open:?}");
            open.push(slice);
        }
        let passes: Vec<Slice> =
            self.host().into_iter().filter(|s| ["token", "pass"].contains(&s.name.as_str())).collect();
        let mut before = i64::MIN;
        for slice in self.device() {
            let within = |p: &Slice| p.begin <= slice.begin + ROUNDING && slice.end <= p.end + ROUNDING;
            assert!(passes.iter().any(within), "{slice:?} lies in no pass");
            assert!(
                before <= slice.begin + ROUNDING,
                "{slice:?} begins before {before}: a stream does one thing at a time"
            );
            before = slice.end;
        }
        for counter in self.json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "C") {
            let value = counter["args"]["value"].as_f64().unwrap();
            let share = counter["name"].as_str().unwrap().ends_with('%');
            assert!(value >= 0.0 && (!share || value <= 100.0), "{counter}");
        }
    }

    /// Time in which host and device both were at a layer's FFN.
    pub fn overlap_of_halves_ns(&self) -> i64 {
        let half = |slices: Vec<Slice>| slices.into_iter().filter(|s| s.name == "FFN half").collect::<Vec<_>>();
        let (host, device) = (half(self.host()), half(self.device()));
        let both = |a: &Slice, b: &Slice| (a.end.min(b.end) - a.begin.max(b.begin)).max(0);
        host.iter().map(|a| device.iter().filter(|b| b.args == a.args).map(|b| both(a, b)).sum::<i64>()).sum()
    }
}
