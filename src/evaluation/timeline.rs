//! A trace of host and device ([`Timeline`]) as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open, and a
//! summary of it as text.
//!
//! Process 1 is the host, process 2 the device with a thread for each of its streams. Slices of the host nest: pass, layer, stage.

use crate::device::timeline::{FfnSums, Sample, Span, Stage, Sums, Track};
use crate::device::{Timeline, timeline::MoveSums};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// The whole file, to be serialised as JSON. Times are us since the beginning of the trace.
pub struct Chrome<'a>(pub &'a Timeline);

impl Serialize for Chrome<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("displayTimeUnit", "ms")?;
        map.serialize_entry("otherData", &About::of(self.0))?;
        map.serialize_entry("traceEvents", &Events(self.0))?;
        map.end()
    }
}

#[derive(serde::Serialize)]
struct About {
    program: &'static str,
    clock: &'static str,
    /// How far the device's slices may be displaced from their true times, us.
    device_uncertain_us: f64,
    /// Older slices that were dropped, and stretches of the device's time without a measurement.
    left_out: u64,
    unknown: u64,
}

impl About {
    fn of(timeline: &Timeline) -> About {
        About {
            program: concat!("dynamicinfer ", env!("CARGO_PKG_VERSION")),
            clock: if timeline.is_virtual {
                "virtual: that of a virtual device, no measurement"
            } else {
                "the host's; the device's events placed on it"
            },
            device_uncertain_us: us(timeline.uncertain_ns),
            left_out: timeline.left_out(),
            unknown: timeline.unknown,
        }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

struct Events<'a>(&'a Timeline);

impl Serialize for Events<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let timeline = self.0;
        let clock = if timeline.is_virtual { " (virtual clock)" } else { "" };
        let mut seq = serializer.serialize_seq(None)?;
        let mut name = |what, (pid, tid), name: &str| {
            seq.serialize_element(&Event {
                args: Some(Args { name: Some(name), ..Args::default() }),
                ..meta(what, pid, tid)
            })
        };
        name("process_name", (HOST, 0), &format!("host{clock}"))?;
        name("thread_name", (HOST, 1), "engine")?;
        if let Some(device) = &timeline.device {
            name("process_name", (DEVICE, 0), &format!("{device}{clock}"))?;
            name("thread_name", (DEVICE, 1), "compute stream")?;
            name("thread_name", (DEVICE, 2), "copy stream")?;
        }
        timeline.spans().try_for_each(|span| seq.serialize_element(&slice(span)))?;
        for sample in timeline.samples() {
            counters(sample).iter().try_for_each(|counter| seq.serialize_element(counter))?;
        }
        seq.end()
    }
}

/// One event of the format: M names, X is a slice, i an instant, C a counter.
#[derive(serde::Serialize, Default)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    pid: u32,
    tid: u32,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    /// Scope of an instant event: its thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args<'a>>,
}

#[derive(serde::Serialize, Default)]
struct Args<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    neurons: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gb_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
}

fn meta(name: &'static str, pid: u32, tid: u32) -> Event<'static> {
    Event { name, ph: "M", pid, tid, ..Event::default() }
}

fn slice(span: &Span) -> Event<'static> {
    let (pid, tid) = match span.track {
        Track::Host => (HOST, 1),
        Track::Compute => (DEVICE, 1),
        Track::Copy => (DEVICE, 2),
    };
    let (ts, ns) = (us(span.begin_ns), span.end_ns - span.begin_ns);
    let args = Args { layer: span.layer, ..Args::default() };
    let event = Event { name: span.part.name(), ph: "X", pid, tid, ts, dur: Some(us(ns)), ..Event::default() };
    let neurons = Some(span.count);
    match (span.part, span.track) {
        (Stage::Pass, _) => {
            let args = Args { tokens: Some(span.count), position: Some(span.value), ..args };
            let name = if span.count == 1 { "token" } else { "pass" };
            Event { name, args: Some(args), ..event }
        }
        (Stage::Move, Track::Host) => {
            let args = Args { neurons, ..args };
            Event { name: "move decided", ph: "i", s: Some("t"), dur: None, args: Some(args), ..event }
        }
        (Stage::Move, _) => {
            let gb_s = Some(span.value as f64 / ns.max(1) as f64);
            let args = Args { neurons, bytes: Some(span.value), gb_s, ..args };
            let name = if span.late { "move, late" } else { "move, in time" };
            Event { name, args: Some(args), ..event }
        }
        _ => Event { args: Some(args), ..event },
    }
}

fn counters(sample: &Sample) -> [Event<'static>; 4] {
    [
        ("resident neurons, %", HOST, 100.0 * sample.resident_share),
        ("weights read by the host, GB/s", HOST, sample.host_gb_s),
        ("weights read by the device, GB/s", DEVICE, sample.device_gb_s),
        ("to the device, GB/s", DEVICE, sample.link_gb_s),
    ]
    .map(|(name, pid, value)| {
        let args = Some(Args { value: Some(value), ..Args::default() });
        Event { name, ph: "C", pid, ts: us(sample.at_ns), args, ..Event::default() }
    })
}

/// Summary of a trace as lines of text; empty where nothing ran.
pub fn summary(timeline: &Timeline) -> String {
    let mut out = String::new();
    for (sums, what) in timeline.sums.iter().zip(["passes", "long passes of prompts"]) {
        if sums.passes > 0 {
            out += &of_passes(sums, what, timeline.device.is_some());
        }
    }
    if timeline.moves.groups > 0 {
        out += &of_moves(&timeline.moves);
    }
    if out.is_empty() {
        return out;
    }
    if timeline.is_virtual {
        out += "  all times are those of a virtual device's clock, no measurement\n";
    } else if timeline.device.is_some() {
        out += &format!(
            "  the device's times are placed on the host's clock within {:.1} us\n",
            us(timeline.uncertain_ns)
        );
    }
    let missing = [(timeline.left_out(), "older slices"), (timeline.unknown, "stretches of the device")];
    for (count, what) in missing.iter().filter(|(count, _)| *count > 0) {
        out += &format!("  {count} {what} are not in the file\n");
    }
    out
}

fn ms(ns: u64, passes: u64) -> f64 {
    ns as f64 / passes as f64 / 1e6
}

fn of_passes(sums: &Sums, what: &str, device: bool) -> String {
    let n = sums.passes;
    let percent = |ns: u64| 100.0 * ns as f64 / sums.ns.max(1) as f64;
    let parts = |ns: &[u64]| -> String {
        let some = Stage::ALL.into_iter().filter(|part| ns[*part as usize] > 0);
        let text = |stage: Stage| format!("{} {:.3}", stage.name(), ms(ns[stage as usize], n));
        some.map(text).collect::<Vec<_>>().join(", ")
    };
    let mut out = format!("timeline: {n} {what}, {:.3} ms each\n", ms(sums.ns, n));
    out += &format!("  host, ms:   {}\n", parts(&sums.host_ns));
    if !device || sums.compute_ns.iter().all(|&ns| ns == 0) {
        return out;
    }
    out += &format!("  device, ms: {}\n", parts(&sums.compute_ns));
    out += &format!(
        "  both computed {:.1} % of the time, the host alone {:.1} %, the device alone {:.1} %, neither {:.1} %\n",
        percent(sums.both_ns),
        percent(sums.host_alone_ns),
        percent(sums.device_alone_ns),
        percent(sums.neither_ns)
    );
    if sums.computing_ns > 0 {
        let (device, host) = (percent(sums.computing_ns), percent(sums.working_ns));
        out += &format!(
            "  kernels and copies of the compute stream took {device:.1} % of the time, products and attention of the host {host:.1} %\n"
        );
    }
    if sums.ffn.layers > 0 {
        out += &of_ffn(&sums.ffn);
    }
    out
}

/// Compares the time of a layer's FFN with that of its slower part; the aim is at most 1.1 * max(device's part, host's part + sync).
fn of_ffn(f: &FfnSums) -> String {
    let us = |ns: u64| ns as f64 / f.layers as f64 / 1e3;
    format!(
        "  FFN of a layer that both had a half of ({} times): {:.1} us; the device's half {:.1}, the host's {:.1} and exchanging \
         {:.1}: {:.2} times the longer side\n",
        f.layers,
        us(f.ns),
        us(f.device_ns),
        us(f.host_ns),
        us(f.sync_ns),
        f.ns as f64 / f.longer_ns.max(1) as f64
    )
}

fn of_moves(moves: &MoveSums) -> String {
    format!(
        "  moves: {} neurons in {} groups, {:.1} MB at {:.2} GB/s; {} groups were on their way when their layer was used\n",
        moves.neurons,
        moves.groups,
        moves.bytes as f64 / 1e6,
        moves.bytes as f64 / moves.ns.max(1) as f64,
        moves.late
    )
}
