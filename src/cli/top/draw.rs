//! What `top` draws. Figures are put on lines as wide as the terminal, and none is cut where it has 60 columns.

use super::look::{Interval, Look};
use crate::cli::human_bytes;
use crate::cli::wrap::Wrap;
use crate::error::printable;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span as Piece};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table};
use serde_json::Value;
use std::collections::VecDeque;

/// Looks that the graphs remember: more columns than a terminal has.
const REMEMBERED: usize = 512;
/// Lines of the graphs with their frames.
const GRAPH: u16 = 5;
/// Columns from which on a layer's number of neurons is shown next to the number on the device.
const WIDE: u16 = 72;

/// What the graphs show, the latest last.
#[derive(Default)]
pub struct History {
    /// Tokens per second, times 10.
    tokens: VecDeque<u64>,
    /// Of active neurons those that the device computed, of needed ones those that were in memory, or of memory's speed what was reached; in
    /// thousandths.
    share: VecDeque<u64>,
}

impl History {
    pub fn add(&mut self, span: &Interval<'_>) {
        let (_, share) = found(span);
        push(&mut self.tokens, (10.0 * span.rate("generation_tokens_total")) as u64);
        push(&mut self.share, (1000.0 * share.unwrap_or_default()).clamp(0.0, 1000.0) as u64);
    }
}

fn push(values: &mut VecDeque<u64>, value: u64) {
    values.push_back(value);
    if values.len() > REMEMBERED {
        values.pop_front();
    }
}

/// What the second graph shows, and how much of it there is, 0 to 1.
fn found(span: &Interval<'_>) -> (&'static str, Option<f64>) {
    match (span.now.has_device(), span.now.has_disk()) {
        (true, _) => ("hits", span.hits()),
        (false, true) => ("found in memory", span.in_memory()),
        (false, false) => ("memory's speed", reached(span)),
    }
}

/// The CPU's rate of reading neurons, as a share of the memory's rate, 0 to 1.
fn reached(span: &Interval<'_>) -> Option<f64> {
    let (rate, limit) = span.path("cpu");
    Some(rate? / limit?)
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share))
}

/// Puts figures on lines of `width` columns; one that is longer than a line has one of its own.
fn flow(figures: Vec<(String, Color)>, width: u16) -> Vec<Line<'static>> {
    let mut lines: Vec<(usize, Vec<Piece<'static>>)> = Vec::new();
    for (figure, color) in figures.into_iter().filter(|(figure, _)| !figure.is_empty()) {
        let wide = figure.chars().count();
        let piece = Piece::styled(figure, Style::new().fg(color));
        match lines.last_mut().filter(|(columns, _)| columns + 3 + wide <= usize::from(width)) {
            Some((columns, pieces)) => {
                *columns += 3 + wide;
                pieces.extend([Piece::raw("   "), piece]);
            }
            None => lines.push((wide, vec![piece])),
        }
    }
    lines.into_iter().map(|(_, pieces)| Line::from(pieces)).collect()
}

/// Draws one snapshot. `waiting` gives the reason if none is current.
pub fn draw(frame: &mut Frame, span: &Interval<'_>, history: &History, waiting: Option<&str>) {
    let area = frame.area();
    let inside = area.width.saturating_sub(2);
    let mut lines = summary(span, inside);
    if let Some(why) = waiting {
        let mut wrap = Wrap::default();
        let why = wrap.push(&printable(why), Some(usize::from(inside))) + &wrap.finish(Some(usize::from(inside)));
        let why = why.lines().map(|line| Line::from(line.to_owned()).bold().red());
        let notice = Line::from("waiting for it; the figures below are older").yellow();
        lines.splice(0..0, why.chain([notice]));
    }
    let height = lines.len() as u16 + 2;
    let parts = [height, GRAPH, 3, 3, 1];
    let rows = [
        Constraint::Length(parts[0]),
        Constraint::Length(parts[1]),
        Constraint::Length(parts[2]),
        Constraint::Min(parts[3]),
        Constraint::Length(parts[4]),
    ];
    let [head, graphs, memory, layers, keys] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("dynamicinfer".bold().cyan())), head);
    draw_graphs(frame, graphs, span, history);
    draw_memory(frame, memory, span.now);
    frame.render_widget(layer_table(span, inside), layers);
    let hints = Line::from("q ends   + - refreshes more or less often");
    frame.render_widget(Paragraph::new(hints).dim(), keys);
}

fn draw_graphs(frame: &mut Frame, area: Rect, span: &Interval<'_>, history: &History) {
    let halves = [Constraint::Ratio(1, 2), Constraint::Ratio(1, 2)];
    let [left, right] = Layout::horizontal(halves).areas(area);
    let tokens = format!("tokens/s {:.1}", span.rate("generation_tokens_total"));
    let (name, share) = found(span);
    let mut graph = |area: Rect, title: String, values: &VecDeque<u64>, most: Option<u64>, color| {
        let columns = usize::from(area.width.saturating_sub(2));
        let latest: Vec<u64> = values.iter().skip(values.len().saturating_sub(columns)).copied().collect();
        let graph =
            Sparkline::default().block(Block::bordered().title(title)).data(latest).style(Style::new().fg(color));
        frame.render_widget(most.map_or(graph.clone(), |most| graph.max(most)), area);
    };
    graph(left, tokens, &history.tokens, None, Color::Green);
    graph(right, format!("{name} {}", percent(share)), &history.share, Some(1000), Color::Blue);
}

/// The memory of the device, or of a model that is partly on disk, against its budget, or that of the process against the machine's.
fn draw_memory(frame: &mut Frame, area: Rect, now: &Look) {
    let (title, used, of) = match now.has_device() {
        false if now.has_disk() => {
            ("host memory, of what --ram allows", now.number("ram_used_bytes"), now.number("ram_budget_bytes"))
        }
        true => ("device memory", now.number("vram_used_bytes"), now.number("vram_budget_bytes")),
        false => {
            let used = now.number("process_resident_memory_bytes");
            ("memory, of what the machine has for it", used, used + now.number("available_memory_bytes"))
        }
    };
    let share = if of > 0.0 { (used / of).clamp(0.0, 1.0) } else { 0.0 };
    let color = if share > 0.95 { Color::Yellow } else { Color::Green };
    let label = format!("{} of {}", human_bytes(used as u64), human_bytes(of as u64));
    let gauge = Gauge::default().block(Block::bordered().title(title)).label(label);
    frame.render_widget(gauge.gauge_style(Style::new().fg(color)).ratio(share), area);
}

fn path(span: &Interval<'_>, path: &str) -> String {
    let (rate, limit) = span.path(path);
    let rate = rate.map_or("-".into(), |rate| format!("{rate:.1}"));
    limit.map_or(format!("{path} {rate} GB/s"), |limit| format!("{path} {rate} of {limit:.1} GB/s"))
}

/// The figures of the whole daemon, for lines of `width` columns.
fn summary(span: &Interval<'_>, width: u16) -> Vec<Line<'static>> {
    let now = span.now;
    let model = &now.ps["models"][0];
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let plain = |figure: String| (figure, Color::Reset);
    let name = printable(model["name"].as_str().unwrap_or("no model"));
    let state = text(&now.ps["state"]);
    let color = if state == "ready" { Color::Green } else { Color::Yellow };
    let ending = if now.number("draining") > 0.0 { "ending" } else { "" };
    let mut lines = flow(
        vec![
            (name, Color::Cyan),
            (state, color),
            (ending.into(), Color::Yellow),
            plain(format!("up {} s", now.number("uptime_seconds") as u64)),
            plain(text(&model["predictor"])),
        ],
        width,
    );
    let bytes = |bytes: f64| human_bytes(bytes as u64);
    let at_once = span.share("decode_columns_total", &["decode_passes_total"]);
    let waiting = now.number("num_requests_waiting");
    let refused = span.rate("requests_rejected_total{reason=\"queue_full\"}");
    let alarm = |bad: bool| if bad { Color::Red } else { Color::Reset };
    let cores = now.number("cores").max(1.0);
    let mut figures = vec![
        (format!("tokens/s {:.1}", span.rate("generation_tokens_total")), Color::Green),
        plain(format!("prompts {:.1}/s", span.rate("prompt_tokens_total"))),
        plain(format!("found again {:.1}/s", span.rate("cached_tokens_total"))),
        plain(at_once.map_or(String::new(), |n| format!("{n:.1} at a time"))),
        plain(format!(
            "{} of {} running, {waiting} waiting",
            now.number("num_requests_running"),
            now.number("num_requests_max")
        )),
        (format!("{refused:.1}/s refused"), alarm(refused > 0.0)),
        plain(format!("{} left by their clients", now.number("client_disconnects_total"))),
        plain(format!("CPU {:.0} % of {:.0} cores", 100.0 * span.rate("process_cpu_seconds_total") / cores, cores)),
        plain(path(span, "cpu")),
        plain(format!("{} resident", bytes(now.number("process_resident_memory_bytes")))),
        plain(format!("keys and values up to {}", bytes(model["kv_bytes"].as_f64().unwrap_or_default()))),
        plain(format!(
            "prompt cache {} of {}",
            bytes(now.number("prompt_cache_bytes")),
            bytes(now.number("prompt_cache_budget_bytes"))
        )),
        plain(format!("weights {}", bytes(model["model_bytes"].as_f64().unwrap_or_default()))),
        plain(format!(
            "{} of the neurons computed",
            percent(span.share("neurons_computed_total", &["neurons_all_total"]))
        )),
    ];
    let active = now.number("audited_active_total");
    if active > 0.0 {
        let recall = now.number("audited_found_total") / active;
        let tokens = now.number("audited_tokens_total");
        figures.push((format!("recall {} at {tokens} tokens", percent(Some(recall))), alarm(recall < 0.9)));
    }
    if now.has_device() {
        figures.extend(of_device(span));
    }
    if now.has_disk() {
        figures.extend(of_disk(span));
    }
    lines.extend(flow(figures, width));
    lines
}

/// What only a daemon with a device has to say.
fn of_device(span: &Interval<'_>) -> Vec<(String, Color)> {
    let scheduler = &span.now.policy["scheduler"];
    let count = |name: &str| scheduler[name].as_u64().unwrap_or_default();
    let policy = printable(span.now.policy["policy"].as_str().unwrap_or_default());
    let moving = if scheduler["moving"] == true { "moving" } else { "static" };
    let mut figures = vec![
        (format!("hits {}", percent(span.hits())), Color::Blue),
        (path(span, "device"), Color::Reset),
        (path(span, "link"), Color::Reset),
        (format!("migrations {:.1}/s", span.rate("block_migrations_total{direction=\"in\"}")), Color::Reset),
    ];
    if scheduler.is_object() {
        figures.extend([
            (format!("policy {policy}, {moving}"), Color::Reset),
            (format!("scheduler {} seen, {} late", count("observed"), count("late")), Color::Reset),
            (format!("{} moves stale", count("stale")), Color::Reset),
            (format!("{} sequences", count("sequences")), Color::Reset),
        ]);
        figures.extend(verdict(scheduler).map(|text| (text, Color::Reset)));
    }
    figures
}

/// What comparing moving with the static placement has shown last; `None` before the first comparison.
fn verdict(scheduler: &Value) -> Option<String> {
    let ms = |name: &str| scheduler[name].as_f64().unwrap_or_default() / 1e6;
    let (moving, resting) = (ms("moving_ns"), ms("resting_ns"));
    let verdict = scheduler["verdict"].as_str().filter(|verdict| ["pays", "even", "loses"].contains(verdict))?;
    Some(format!("moving {verdict}: {moving:.2} ms, static {resting:.2}"))
}

/// What only a daemon has to say that leaves a part of its model on disk.
fn of_disk(span: &Interval<'_>) -> Vec<(String, Color)> {
    let (bytes, reads) = (span.rate("disk_read_bytes_total"), span.rate("disk_reads_total"));
    vec![
        (format!("in memory {}", percent(span.in_memory())), Color::Blue),
        (format!("disk {:.2} GB/s, {reads:.0} reads/s", bytes / 1e9), Color::Reset),
        (format!("threads wait {:.2} s/s for it", span.rate("disk_wait_seconds_total")), Color::Reset),
    ]
}

fn layer_table(span: &Interval<'_>, width: u16) -> Table<'static> {
    let (before, now, device) = (&span.before.cache, &span.now.cache, span.now.has_device());
    let row = |(l, layer): (usize, &Value)| {
        let number = |name: &str| layer[name].as_u64().unwrap_or_default();
        let threshold = layer["threshold"].as_f64().map_or("-".into(), |t| format!("{t:.3}"));
        let predictor = printable(layer["predictor"].as_str().unwrap_or_default());
        let mut cells = vec![number("layer").to_string(), predictor, threshold];
        if device {
            // A model that was loaded anew counts from nothing.
            let added =
                |name: &str| number(name).saturating_sub(before["layers"][l][name].as_u64().unwrap_or_default());
            let (hits, all) = (added("hits"), added("hits").saturating_add(added("misses")));
            cells.push(percent((all > 0).then(|| hits as f64 / all as f64)));
            cells.push(format!("{} of {}", number("resident"), number("slots")));
            cells.push(number("filling").to_string());
        }
        if !device || width >= WIDE {
            cells.push(number("neurons").to_string());
        }
        Row::new(cells)
    };
    let rows: Vec<Row> = now["layers"].as_array().into_iter().flatten().enumerate().map(row).collect();
    let of_device: &[(&str, u16)] = if device { &[("hits", 7), ("resident", 14), ("coming", 6)] } else { &[] };
    let neurons: &[(&str, u16)] = if device && width < WIDE { &[] } else { &[("neurons", 8)] };
    let columns = [&[("layer", 5), ("predictor", 9), ("threshold", 9)], of_device, neurons].concat();
    Table::new(rows, columns.iter().map(|(_, width)| Constraint::Length(*width)))
        .header(Row::new(columns.iter().map(|(name, _)| *name)).bold().cyan())
        .block(Block::bordered().title("layers"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{self, Duration, Instant};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    fn look(from: Instant, later: u64, (device, disk): (bool, bool)) -> Look {
        let n = later as f64;
        let mut numbers = vec![
            ("uptime_seconds", 86_400.0 * 365.0),
            ("generation_tokens_total", 12_345.6 * n),
            ("prompt_tokens_total", 98_765.4 * n),
            ("cached_tokens_total", 98_764.3 * n),
            ("num_requests_running", 32.0),
            ("num_requests_max", 32.0),
            ("num_requests_waiting", 65_536.0),
            ("client_disconnects_total", 4_294_967_295.0),
            ("process_cpu_seconds_total", 96.0 * n),
            ("cores", 128.0),
            ("process_resident_memory_bytes", 700e9),
            ("available_memory_bytes", 100e9),
            ("neurons_computed_total", 999.0 * n),
            ("neurons_all_total", 1000.0 * n),
            ("path_bytes_total{path=\"cpu\"}", 345.6e9 * n),
            ("prompt_cache_bytes", 255.0 * f64::from(1 << 20)),
            ("prompt_cache_budget_bytes", f64::from(1 << 28)),
            ("path_seconds_total{path=\"cpu\"}", n),
            ("path_limit_bytes_per_second{path=\"cpu\"}", 456.7e9),
        ];
        if device {
            numbers.extend([("vram_budget_bytes", 80e9), ("vram_used_bytes", 79e9)]);
            numbers.extend([("hits_total", 999.0 * n), ("misses_total", n)]);
            numbers.push(("block_migrations_total{direction=\"in\"}", 54_321.0 * n));
        }
        numbers.extend([("ram_hits_total", 999.0 * n), ("ram_misses_total", n), ("ram_used_bytes", 7e9)]);
        numbers.extend([("disk_read_bytes_total", 12.34e9 * n), ("disk_reads_total", 987_654.0 * n)]);
        numbers.extend([("disk_wait_seconds_total", 64.25 * n), ("ram_budget_bytes", if disk { 8e9 } else { 0.0 })]);
        let layers = json!([{"layer": 127, "predictor": "magnitude", "threshold": 0.123, "hits": 999 * later, "misses": later,
            "resident": 28_671, "slots": 28_672, "filling": 4096, "neurons": 28_672}]);
        let scheduler = json!({"observed": 1_234_567_890u64, "late": 987_654, "stale": 876_543, "sequences": 64, "moving": true, "verdict": "pays", "moving_ns": 12_340_000, "resting_ns": 13_450_000});
        Look {
            at: from + Duration::from_secs(later),
            numbers: numbers.into_iter().map(|(name, n)| (name.to_owned(), n)).collect(),
            ps: json!({"state": "ready", "models": [{"name": "m", "predictor": "mlp", "kv_bytes": 1u64 << 33, "model_bytes": 1u64 << 36}]}),
            cache: json!({"layers": layers}),
            policy: json!({"policy": "full", "scheduler": if device { scheduler } else { Value::Null }}),
        }
    }

    fn drawn(columns: u16, device: (bool, bool), waiting: Option<&str>) -> String {
        let from = clock::now();
        let (before, now) = (look(from, 0, device), look(from, 1, device));
        let span = Interval { before: &before, now: &now };
        let mut history = History::default();
        (0..100).for_each(|_| history.add(&span));
        let mut terminal = Terminal::new(TestBackend::new(columns, 50)).unwrap();
        terminal.draw(|frame| draw(frame, &span, &history, waiting)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
        buffer.content().chunks(usize::from(columns)).map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn no_figure_is_cut_at_60_columns_however_large() {
        let everywhere = [
            "up 31536000 s",
            "prompts 98765.4/s",
            "found again 98764.3/s",
            "32 of 32 running, 65536 waiting",
            "4294967295 left by their clients",
            "CPU 75 % of 128 cores",
            "cpu 345.6 of 456.7 GB/s",
            "keys and values up to 8.00 GiB",
            "prompt cache 255.00 MiB of 256.00 MiB",
            "weights 64.00 GiB",
            "99.9 % of the neurons computed",
            "q ends",
        ];
        let of_device = [
            "hits 99.9 %",
            "migrations 54321.0/s",
            "policy full, moving",
            "scheduler 1234567890 seen, 987654 late",
            "876543 moves stale",
            "64 sequences",
            "moving pays: 12.34 ms, static 13.45",
            "28671 of 28672",
            "73.57 GiB of 74.51 GiB",
        ];
        for columns in [60, 80, 200] {
            let with = drawn(columns, (true, false), None);
            for figure in everywhere.iter().chain(&of_device) {
                assert!(with.contains(figure), "{figure} at {columns}:\n{with}");
            }
            let without = drawn(columns, (false, false), None);
            for figure in everywhere.iter().chain(&["memory's speed 75.7 %", "28672", "of what the machine has"]) {
                assert!(without.contains(figure), "{figure} at {columns}:\n{without}");
            }
            let others = ["hits", "link", "migrations", "device", "resident of", "disk"];
            assert!(!others.iter().any(|word| without.contains(word)));
            let from_disk = drawn(columns, (false, true), None);
            let of_disk = [
                "found in memory 99.9 %",
                "in memory 99.9 %",
                "disk 12.34 GB/s, 987654 reads/s",
                "threads wait 64.25 s/s for it",
                "6.52 GiB of 7.45 GiB",
            ];
            for figure in everywhere.iter().chain(&of_disk) {
                assert!(from_disk.contains(figure), "{figure} at {columns}:\n{from_disk}");
            }
            assert!(with.contains('█') && without.contains('█'), "the graphs are empty");
        }
    }

    #[test]
    fn while_the_daemon_is_away_it_says_so_and_shows_what_was() {
        let drawn = drawn(60, (true, false), Some("no daemon answers"));
        assert!(drawn.contains("no daemon answers") && drawn.contains("waiting for it") && drawn.contains("weights"));
    }
}
