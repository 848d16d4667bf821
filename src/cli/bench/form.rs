//! The forms in which `bench` gives its rows: tables for people, and llama-bench's markdown, CSV and SQL.

use crate::error::human_bytes;
use crate::evaluation::bench::BenchRow;
use crate::open::report::DeviceReport;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use serde_json::Value as Json;

/// A row with what the device did in all of them.
#[derive(Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) row: BenchRow,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<DeviceReport>,
}

/// Tables of at most 80 columns, below a line about the model: how fast, what was computed, where the time went.
pub fn tables(rows: &[Row]) -> String {
    let Some(first) = rows.first().map(|row| &row.row) else { return String::new() };
    let mut parts = vec![format!(
        "{}: {} parameters, {}\n{} threads, {}, keys and values {}\n",
        first.model_type,
        parameters(first.model_n_params),
        human_bytes(first.model_size),
        first.n_threads,
        first.instruction_set,
        first.type_k
    )];
    parts.push(speeds(rows));
    parts.extend(rows.iter().filter_map(|row| products(&row.row)));
    parts.extend(rows.iter().filter_map(|row| net(&row.row)));
    if rows.iter().any(|row| row.row.n_gen > 0) {
        let machine = first.machine_gb_s;
        parts.push(format!(
            "GB/s of weights, and their share of the {machine:.1} that the machine reads.\n\n{}\n{}",
            computed(rows),
            times(rows)
        ));
    }
    if rows.iter().any(|row| row.row.disk.is_some()) {
        parts.push(format!("\n{}", from_disk(rows)));
    }
    parts.concat()
}

/// How the products of a prompt were computed, and how near to what the units can.
fn products(row: &BenchRow) -> Option<String> {
    let (how, gops) = (row.prefill?, row.prefill_gops?);
    let share = percent(row.share_of_unit);
    let unit = row.unit_gops.map_or(String::new(), |unit| format!(", {share} of the units' {unit:.0}"));
    Some(format!("{}: {how}, {gops:.0} GOPS{unit}\n", row.test))
}

/// A token without what a virtual device did on this machine.
fn net(row: &BenchRow) -> Option<String> {
    let (net, pretended) = (row.net_ms?, row.pretended_ms?);
    Some(format!("{} (virtual): {net:.2} ms a token without {pretended:.2} of the device's\n", row.test))
}

/// Its name in the tables. Each line with times of a virtual device says so.
fn test(row: &Row) -> String {
    let pretended = row.device.as_ref().is_some_and(|device| !device.measured);
    format!("{}{}", row.row.test, if pretended { " (virtual)" } else { "" })
}

fn speeds(rows: &[Row]) -> String {
    let mut table = empty(&["test", "tokens/s", "ms/token p50 / p95 / p99", "GB/s read"]);
    for row in rows {
        let r = &row.row;
        let times = match (r.token_ms_p50, r.token_ms_p95, r.token_ms_p99) {
            (Some(p50), Some(p95), Some(p99)) => [p50, p95, p99].map(number).join(" / "),
            _ => "-".into(),
        };
        let read = r.read_gb_s.map_or("-".into(), |rate| format!("{rate:.1} ({})", percent(r.share_of_machine)));
        table.add_row([test(row), format!("{} ± {}", number(r.avg_ts), number(r.stddev_ts)), times, read]);
    }
    finished(table)
}

/// Four digits or more, as many as anybody looks at.
fn number(value: f64) -> String {
    if value < 100.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

fn computed(rows: &[Row]) -> String {
    let mut table = empty(&["test", "predictor", "computed", "active", "recall", "precision"]);
    for row in rows.iter().filter(|row| row.row.n_gen > 0) {
        let r = &row.row;
        let shares = [r.computed_share, r.active_share, r.recall, r.precision].map(percent);
        table.add_row([test(row), r.predictor.clone()].into_iter().chain(shares));
    }
    finished(table)
}

fn times(rows: &[Row]) -> String {
    let mut table = empty(&["test", "ms: attention", "predict", "schedule", "FFN", "head"]);
    for row in rows {
        let Some(p) = &row.row.parts_ms else { continue };
        let times = [p.attention, p.predictor, row.row.scheduler_ms.unwrap_or_default(), p.ffn, p.head];
        table.add_row([test(row)].into_iter().chain(times.map(|ms| format!("{ms:.2}"))));
    }
    finished(table)
}

fn from_disk(rows: &[Row]) -> String {
    let mut table = empty(&["test", "in memory", "foreseen", "MB/token from disk", "reads", "disk GB/s", "ms waited"]);
    for row in rows {
        let Some(d) = &row.row.disk else { continue };
        let megabytes = d.bytes_per_token as f64 / 1e6;
        table.add_row([
            test(row),
            percent(Some(d.hit_share)),
            percent(Some(d.early_share)),
            number(megabytes),
            format!("{:.0}", d.reads_per_token),
            number(d.gb_s),
            number(d.wait_ms),
        ]);
    }
    finished(table)
}

/// In llama-bench's format, so that one table can hold both.
pub fn markdown(rows: &[Row]) -> String {
    let mut table = empty(&["model", "size", "params", "backend", "threads", "test", "t/s"]);
    for row in rows {
        let r = &row.row;
        table.add_row([
            r.model_type.clone(),
            human_bytes(r.model_size),
            parameters(r.model_n_params),
            row.device.as_ref().map_or("CPU".into(), |device| device.device.clone()),
            r.n_threads.to_string(),
            test(row),
            format!("{:.2} ± {:.2}", r.avg_ts, r.stddev_ts),
        ]);
    }
    finished(table)
}

/// A line of names, then one for each row; every value in quotes, as llama-bench writes them.
pub fn csv(rows: &[Row]) -> String {
    let quoted = |text: String| format!("\"{}\"", text.replace('"', "\"\""));
    let line = |cells: Vec<String>| cells.join(",") + "\n";
    let fields: Vec<_> = rows.iter().map(fields).collect();
    let names = fields.first().map_or(String::new(), |row| line(row.iter().map(|(name, _)| name.clone()).collect()));
    let row = |row: &Vec<(String, Json)>| line(row.iter().map(|(_, value)| quoted(plain(value))).collect());
    names + &fields.iter().map(row).collect::<String>()
}

/// A table `dynamicinfer` and a line that adds each row, for sqlite and its like.
pub fn sql(rows: &[Row]) -> String {
    let fields: Vec<_> = rows.iter().map(fields).collect();
    let Some(first) = fields.first() else { return String::new() };
    let kind = |value: &Json| match value {
        Json::String(_) => "TEXT",
        Json::Number(n) if n.is_u64() => "INTEGER",
        Json::Bool(_) => "INTEGER",
        _ => "REAL",
    };
    let columns: Vec<String> = first.iter().map(|(name, value)| format!("  {name} {}", kind(value))).collect();
    let mut text = format!("CREATE TABLE IF NOT EXISTS dynamicinfer (\n{}\n);\n", columns.join(",\n"));
    for row in &fields {
        let names: Vec<&str> = row.iter().map(|(name, _)| name.as_str()).collect();
        let values: Vec<String> = row.iter().map(|(_, value)| literal(value)).collect();
        text += &format!("INSERT INTO dynamicinfer ({}) VALUES ({});\n", names.join(", "), values.join(", "));
    }
    text
}

fn literal(value: &Json) -> String {
    match value {
        Json::Null => "NULL".into(),
        Json::Bool(yes) => u8::from(*yes).to_string(),
        Json::String(text) => format!("'{}'", text.replace('\'', "''")),
        other => other.to_string(),
    }
}

fn plain(value: &Json) -> String {
    match value {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The row's fields by name, without lists; those of a field that has fields are named after both.
fn fields(row: &Row) -> Vec<(String, Json)> {
    let Json::Object(fields) = serde_json::to_value(row).expect("plain data") else { return Vec::new() };
    let mut flat = Vec::new();
    for (name, value) in fields {
        match value {
            Json::Array(_) => {}
            Json::Object(parts) => {
                flat.extend(parts.into_iter().map(|(part, value)| (format!("{name}_{part}"), value)))
            }
            value if name == "parts_ms" => {
                let parts = ["attention", "predictor", "ffn", "head"];
                flat.extend(parts.map(|part| (format!("{name}_{part}"), value.clone())));
            }
            value => flat.push((name, value)),
        }
    }
    flat.retain(|(_, value)| !value.is_array() && !value.is_object());
    flat
}

/// `6.74 B`, as llama-bench writes it.
fn parameters(n: u64) -> String {
    let n = n as f64;
    if n >= 1e9 { format!("{:.2} B", n / 1e9) } else { format!("{:.2} M", n / 1e6) }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

fn empty(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(head.iter().copied());
    table
}

fn finished(mut table: Table) -> String {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::bench::BenchRow;

    fn row(test: &str, generate: usize) -> Row {
        let decode = generate > 0;
        let some = |value: f64| decode.then_some(value);
        let row = BenchRow {
            test: test.into(),
            model_filename: "it's \"one\", in\\a/folder.neurons".into(),
            model_type: "llama 13B Q4_0".into(),
            model_size: 7_365_960_935,
            model_n_params: 13_015_864_320,
            n_threads: 128,
            type_k: "f16".into(),
            n_prompt: if decode { 0 } else { 512 },
            n_gen: generate,
            n_depth: 0,
            n_sequences: 1,
            avg_ns: 1,
            stddev_ns: 1,
            avg_ts: 1234.567,
            stddev_ts: 123.456,
            samples_ns: vec![1],
            samples_ts: vec![1.0],
            instruction_set: "avx512",
            prefill: (!decode).then_some("int8-per-tensor"),
            prefill_gops: (!decode).then_some(12_345.6),
            unit_gops: (!decode).then_some(23_456.7),
            share_of_unit: (!decode).then_some(0.526),
            token_ms_p50: some(123.456),
            token_ms_p95: some(234.567),
            token_ms_p99: some(345.678),
            bytes_per_token: decode.then_some(1),
            predictor: "mlp,dense@0".into(),
            computed_share: some(0.105),
            active_share: some(0.1),
            recall: some(0.968),
            precision: some(0.9),
            parts_ms: decode.then_some(crate::evaluation::bench::PartsMs {
                attention: 123.45,
                predictor: 12.34,
                ffn: 123.45,
                head: 12.34,
            }),
            scheduler_ms: some(1.2),
            predict_ms: some(12.34),
            pretended_ms: some(12.34),
            net_ms: some(111.1),
            net_ms_p50: some(111.1),
            timed_gpu_share: some(0.9),
            moves_per_pass: some(1234.5),
            disk: None,
            read_gb_s: some(123.4),
            machine_gb_s: 345.6,
            share_of_machine: some(0.36),
        };
        Row { row, device: None }
    }

    #[test]
    fn no_table_is_wider_than_80_columns() {
        let rows = [row("pp512 @ d4096", 0), row("tg128 x 8 @ d4096", 128)];
        for line in tables(&rows).lines() {
            assert!(line.chars().count() <= 80, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn csv_and_sql_have_the_same_columns_in_every_row_and_quote_what_is_odd() {
        let rows = [row("pp512", 0), row("tg128", 128)];
        let csv = csv(&rows);
        let mut lines = csv.lines();
        let names: Vec<&str> = lines.next().unwrap().split(',').collect();
        assert!(names.contains(&"model_n_params") && names.contains(&"parts_ms_ffn") && !names.contains(&"samples_ns"));
        assert_eq!(lines.clone().count(), 2);
        assert!(lines.all(|line| line.contains(r#""it's ""one"", in\a/folder.neurons""#)));
        let sql = sql(&rows);
        assert_eq!(sql.matches("INSERT INTO dynamicinfer (").count(), 2);
        assert!(sql.contains("'it''s \"one\", in\\a/folder.neurons'") && sql.contains("  model_n_params INTEGER"));
        let insert = |line: &str| line.split(") VALUES").next().unwrap().to_owned();
        let heads: Vec<String> = sql.lines().filter(|line| line.starts_with("INSERT")).map(insert).collect();
        assert_eq!(heads[0], heads[1]);
    }
}
