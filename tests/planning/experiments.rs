//! Declared experiments: every shipped one can be read, rows come in turns and once each, a kill loses none, and only what passed its
//! check counts.

use dynamicinfer::error::Error;
use dynamicinfer::lab::experiment::rows::{Metrics, Row, RowsFile};
use dynamicinfer::lab::experiment::sentence::sentence;
use dynamicinfer::lab::experiment::summary::{Place, spread, summary};
use dynamicinfer::lab::experiment::{Spec, arm_name};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

const REPLAY: &str = r#"
name = "tiny"
question = "Which policy?"
expectation = "macro."
methods = ["replay"]
repeats = 3
[fixed]
ffn_share = 0.3
[axes]
link = [2.0, 10.0]
policy = ["static", "macro"]
[check]
gpu_share = { min = 0.2 }
[[plots]]
title = "Share"
x = "policy"
y = "gpu_share"
"#;

fn file(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("experiment.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn spec(text: &str) -> Result<Spec, Error> {
    let dir = tempfile::tempdir().unwrap();
    Spec::read(&file(dir.path(), text)).map(|(spec, _)| spec)
}

fn row(arm: usize, repeat: usize, share: f64, refused: Option<&str>) -> Row {
    Row {
        arm,
        settings: Vec::new(),
        repeat,
        metrics: Metrics::from([("gpu_share".into(), Some(share)), ("nothing".into(), None)]),
        refused: refused.map(str::to_owned),
        unix: 1,
        seconds: 0.5,
        commit: "abc".into(),
    }
}

#[test]
fn rows_come_in_turns_and_each_once() {
    let spec = spec(REPLAY).unwrap();
    assert_eq!(spec.arms().iter().map(|a| arm_name(a)).collect::<Vec<_>>()[1], "link=2 policy=macro");
    let order = spec.order();
    assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 12);
    for round in order.chunks(4) {
        assert_eq!(round.iter().map(|r| r.0).collect::<BTreeSet<_>>().len(), 4, "{round:?}");
    }
    // Another arm begins each round.
    assert_eq!(order.iter().step_by(4).map(|r| r.0).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn what_cannot_be_an_experiment_is_refused_by_its_field() {
    for (from, to, field) in [
        ("expectation = \"macro.\"", "expectation = \" \"", "expectation"),
        ("repeats = 3", "repeats = 0", "axes"),
        ("repeats = 3", "repeat = 3", "unknown field"),
        ("methods = [\"replay\"]", "methods = []", "methods"),
        ("ffn_share = 0.3", "link = 2.0", "fixed, too"),
        ("x = \"policy\"", "x = \"budget\"", "that is no axis"),
        ("link = [2.0, 10.0]", "link = []", "link"),
        ("name = \"tiny\"", "name = \"../tiny\"", "name"),
    ] {
        let error = spec(&REPLAY.replace(from, to)).unwrap_err();
        assert!(matches!(&error, Error::BadFile(_)) && error.to_string().contains(field), "{to}: {error}");
    }
}

#[test]
fn a_kill_leaves_whole_rows_and_two_runs_do_not_write_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let mut rows = RowsFile::open(&path).unwrap();
    rows.add(row(0, 0, 0.5, None)).unwrap();
    rows.add(row(1, 0, 0.25, Some("below"))).unwrap();
    assert!(matches!(RowsFile::open(&path), Err(Error::Failed(why)) if why.contains("another run")));
    drop(rows);
    let whole = std::fs::read(&path).unwrap();
    for cut in 0..=whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let mut rows = RowsFile::open(&path).unwrap();
        assert_eq!(rows.rows.len(), whole[..cut].iter().filter(|&&b| b == b'\n').count(), "cut at {cut}");
        let next = rows.rows.len();
        rows.add(row(next, 9, 0.1, None)).unwrap();
        drop(rows);
        let again = RowsFile::open(&path).unwrap();
        assert_eq!(again.rows.len(), next + 1, "cut at {cut}");
        assert!(again.has(next, 9));
    }
    std::fs::write(&path, "{\"arm\": 1}\n").unwrap();
    assert!(matches!(RowsFile::open(&path), Err(Error::BadFile(_))));
}

#[test]
fn medians_count_what_was_not_refused() {
    let spec = spec(REPLAY).unwrap();
    let refused = spec.refusal(&row(0, 0, 0.1, None).metrics).unwrap();
    assert_eq!(refused, "gpu_share is 0.1, below 0.2");
    assert_eq!(spec.refusal(&row(0, 0, 0.2, None).metrics), None);
    assert_eq!(spec.refusal(&Metrics::new()).unwrap(), "there is no gpu_share");
    let rows = [row(0, 0, 0.5, None), row(0, 1, 0.1, Some(&refused)), row(0, 2, 0.7, None)];
    let summary = summary(&spec, &rows);
    let line = &summary.lines[0];
    let share = line.spreads[summary.metrics.iter().position(|m| m == "gpu_share").unwrap()].unwrap();
    assert_eq!((line.rows, line.refused, share.median, share.min, share.max), (2, 1, 0.6, 0.5, 0.7));
    assert!(summary.lines[1].spreads.iter().all(Option::is_none));
    assert_eq!(spread(vec![3.0, 1.0, 2.0]).unwrap().median, 2.0);
    assert_eq!(spread(Vec::new()), None);
    // Names that are no numbers stand side by side.
    let (series, names) = summary.series("policy", "gpu_share");
    let points = [Place { x: 0.0, median: 0.6, min: 0.5, max: 0.7 }];
    assert_eq!((series[0].name.as_str(), &series[0].points[..]), ("link 2 %", &points[..]));
    assert_eq!(names, ["static", "macro"], "an arm without rows keeps its place");
}

/// The number and unit behind `what` in a sentence, as the figure that stands in the rows.
fn figure_after(sentence: &str, what: &str, metric: &str) -> f64 {
    let rest = sentence.split(what).nth(1).unwrap_or_else(|| panic!("{what}: {sentence}"));
    let number: String = rest.chars().take_while(|c| c.is_ascii_digit() || "-.".contains(*c)).collect();
    let unit = rest[number.len()..].trim_start();
    let factor = match unit {
        _ if unit.starts_with('%') && !metric.ends_with("_percent") => 0.01,
        _ if unit.starts_with("KiB") => 1024.0,
        _ if unit.starts_with("MiB") => 1024.0 * 1024.0,
        _ if unit.starts_with("GiB") => 1024.0 * 1024.0 * 1024.0,
        _ => 1.0,
    };
    let number = number.trim_end_matches('.');
    number.parse::<f64>().unwrap_or_else(|e| panic!("{what} {number}: {e}: {sentence}")) * factor
}

/// The medians of a metric by arm, read from a file of rows without this crate.
fn medians(rows: &str, metric: &str) -> Vec<(serde_json::Value, f64)> {
    let mut found: Vec<(serde_json::Value, Vec<f64>)> = Vec::new();
    for row in rows.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()) {
        let Some(value) = row["metrics"][metric].as_f64().filter(|_| row["refused"].is_null()) else { continue };
        match found.iter_mut().find(|(arm, _)| *arm == row["settings"]) {
            Some((_, values)) => values.push(value),
            None => found.push((row["settings"].clone(), vec![value])),
        }
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[values.len() / 2] + values[(values.len() - 1) / 2]) / 2.0
    };
    found.into_iter().map(|(arm, values)| (arm, median(values))).collect()
}

/// Of every recorded run: what its page says below each plot is what its rows say.
#[test]
fn what_a_page_says_follows_from_the_rows() {
    let (mut sentences, mut compared) = (0, 0);
    for dir in recorded(&root().join("runs")) {
        let record: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("run.json")).unwrap()).unwrap();
        let spec = Spec::from_text(record["spec"].as_str().unwrap(), &dir).unwrap();
        let text = std::fs::read_to_string(dir.join("rows.jsonl")).unwrap();
        let rows: Vec<Row> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let summary = summary(&spec, &rows);
        for plot in &spec.plots {
            let said = sentence(plot, &summary);
            let medians = medians(&text, &plot.y);
            if medians.is_empty() {
                assert_eq!(said, "", "{}: {}", dir.display(), plot.y);
                continue;
            }
            sentences += 1;
            let (low, high) = medians.iter().fold((f64::MAX, f64::MIN), |(l, h), (_, v)| (l.min(*v), h.max(*v)));
            let near = |a: f64, b: f64| (a - b).abs() <= 0.006 * b.abs() + 1e-6;
            if said.contains(" everywhere.") {
                assert!(near(low, high) && near(figure_after(&said, ": ", &plot.y), low), "{said}");
                continue;
            }
            assert!(near(figure_after(&said, "highest ", &plot.y), high), "{high}: {said}");
            assert!(near(figure_after(&said, "lowest ", &plot.y), low), "{low}: {said}");
            // Of two lines: how often the second is above the first.
            let (series, _) = summary.series(&plot.x, &plot.y);
            let [first, second] = &series[..] else { continue };
            if !said.contains(" places and below at ") {
                continue;
            }
            compared += 1;
            let above = first.points.iter().filter(|p| {
                let other = second.points.iter().find(|q| q.x == p.x);
                other.is_some_and(|q| q.median > p.median)
            });
            // What reads the same is not counted as above, so the sentence may say less.
            let told = figure_after(&said, &format!("is above {} at ", first.name), "") as usize;
            assert!(told <= above.count(), "{said}");
        }
    }
    assert!(sentences >= 20 && compared >= 2, "{sentences} sentences, {compared} comparisons");
}

/// Folders of recorded experiments.
fn recorded(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if dir.join("run.json").is_file() && dir.join("rows.jsonl").is_file() {
        found.push(dir.to_owned());
    }
    let inside = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    inside.filter(|path| path.is_dir()).for_each(|path| found.extend(recorded(&path)));
    found
}

#[test]
fn a_sentence_names_ends_direction_and_difference() {
    let text = REPLAY.replace("x = \"policy\"", "x = \"link\"");
    let spec = spec(&text).unwrap();
    let rows: Vec<Row> =
        [0.5, 0.6, 0.75, 0.7].iter().enumerate().map(|(arm, &share)| row(arm, 0, share, None)).collect();
    let summary = summary(&spec, &rows);
    assert_eq!(
        sentence(&spec.plots[0], &summary),
        "Computed neurons that lie on the device, by part of a layer that is carried while one is computed: highest 75 % (static, 10 %), lowest \
         50 % (static, 2 %). Static rises from 50 % to 75 % between 2 % and 10 %. Macro rises from 60 % to 70 % between 2 % and 10 %. Macro is \
         above static at 1 of 2 places and below at 1; most apart at 2 %: 60 % and 50 %."
    );
    assert_eq!(sentence(&spec.plots[0], &self::summary(&spec, &[])), "");
}

/// A page of every recorded run and an index over them, of a copy.
#[test]
fn all_experiments_get_pages_and_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    for from in recorded(&root().join("runs")) {
        let to = runs.join(from.strip_prefix(root().join("runs")).unwrap());
        std::fs::create_dir_all(&to).unwrap();
        for name in ["run.json", "rows.jsonl"] {
            std::fs::copy(from.join(name), to.join(name)).unwrap();
        }
    }
    let broken = runs.join("broken");
    std::fs::create_dir_all(&broken).unwrap();
    std::fs::write(broken.join("run.json"), "{\"name\": \"<script>\"}").unwrap();
    std::fs::write(broken.join("rows.jsonl"), "").unwrap();
    let done = program(dir.path(), &["experiment", "--all", "runs"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let index = std::fs::read_to_string(runs.join("index.html")).unwrap();
    assert!(index.matches("/summary.html").count() >= 15 && index.contains("Cannot be shown"), "{index}");
    for page in recorded(&runs).iter().filter(|dir| **dir != broken) {
        let html = std::fs::read_to_string(page.join("summary.html")).unwrap();
        assert!(html.contains("What this cannot tell") && html.contains("UTC"), "{}", page.display());
        assert!(!html.replace("http://www.w3.org/2000/svg", "").contains("http"), "the page needs nothing else");
        assert!(!html.contains("NaN"), "{}", page.display());
    }
    let nothing = program(dir.path(), &["experiment", "--all", "."]);
    assert!(nothing.status.success(), "a folder above is as good");
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    let nothing = program(dir.path(), &["experiment", "--all", "empty"]);
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("there is no experiment below empty"));
    assert_eq!(nothing.status.code(), Some(2));
}

/// A question with an escape in it, or a folder named so, set the terminal's colour when the report was shown there; a folder named like an
/// address was one.
#[test]
fn no_report_has_what_a_terminal_acts_on_or_leads_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let acts = |c: char| c != '\n' && c != '\t' && dynamicinfer::error::is_unprintable(c);
    file(dir.path(), &REPLAY.replace("Which policy?", "Which \\u001B[31m\\u202E\\u009B policy <b>?"));
    let runs = dir.path().join("runs");
    let names = ["red \u{1b}[31m\u{202e}", "javascript:alert(1)", "a?b#c%41&\"<i>"];
    for name in names {
        let out = runs.join(name);
        let done = program(dir.path(), &["experiment", "experiment.toml", "--out", out.to_str().unwrap()]);
        let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
        assert!(done.status.success() && !said.contains(acts), "{said:?}");
        for entry in std::fs::read_dir(&out).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            // The rows are the program's own, and are read back.
            assert!(path.ends_with("rows.jsonl") || !text.contains(acts), "{path:?}: {text:?}");
        }
    }
    let done = program(dir.path(), &["experiment", "--all", "runs"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let index = std::fs::read_to_string(runs.join("index.html")).unwrap();
    assert!(!index.contains(acts) && !index.contains("<i>") && !index.contains("<b>"), "{index:?}");
    let links: Vec<&str> = index.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let expected = ["./red%20%1B%5B31m%E2%80%AE", "./javascript%3Aalert%281%29", "./a%3Fb%23c%2541%26%22%3Ci%3E"];
    assert_eq!(links.len(), names.len());
    assert!(expected.iter().all(|to| links.contains(&format!("{to}/summary.html").as_str())), "{links:?}");
}

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer-lab"));
    command.args(args).current_dir(dir).env("XDG_CACHE_HOME", dir.join("cache")).env("XDG_DATA_HOME", dir.join("data"));
    command.env("DYNAMICINFER_ASSETS", root().join("assets"));
    command
}

fn program(dir: &Path, args: &[&str]) -> Output {
    command(dir, args).output().unwrap()
}

#[test]
fn a_run_that_was_killed_goes_on_without_losing_or_repeating_a_row() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), REPLAY);
    let run = || program(dir.path(), &["experiment", "experiment.toml", "--out", "out"]);
    let done = run();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let path = dir.path().join("out/rows.jsonl");
    let all = RowsFile::open(&path).unwrap().rows;
    assert_eq!(all.len(), 12);
    let bytes = std::fs::read(&path).unwrap();
    let seventh = bytes.iter().enumerate().filter(|(_, b)| **b == b'\n').nth(6).unwrap().0;
    // Killed within the eighth row.
    std::fs::write(&path, &bytes[..seventh + 40]).unwrap();
    let done = run();
    assert!(String::from_utf8_lossy(&done.stderr).contains("7 of 12 rows are there already"));
    let again = RowsFile::open(&path).unwrap().rows;
    let key = |r: &Row| (r.arm, r.repeat, format!("{:?}", r.metrics));
    assert_eq!(again.iter().map(key).collect::<Vec<_>>(), all.iter().map(key).collect::<Vec<_>>());
    // Nothing is left to do, and the report is made again.
    assert!(run().status.success());
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 12);
    let html = std::fs::read_to_string(dir.path().join("out/summary.html")).unwrap();
    assert!(html.contains("<svg") && html.contains("Which policy?") && !html.contains("http-equiv"));
    assert!(!html.replace("http://www.w3.org/2000/svg", "").contains("http"), "the page needs nothing else");
    for name in ["run.json", "rows.csv", "summary.json", "summary.md", "plot-1.svg"] {
        assert!(dir.path().join("out").join(name).is_file(), "{name}");
    }
    // Rows of two versions of an experiment do not mix.
    file(dir.path(), &REPLAY.replace("0.3", "0.4"));
    let other = run();
    assert_eq!(other.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&other.stderr).contains("take another --out"));
}

#[test]
fn every_shipped_experiment_can_be_read_and_an_arm_that_cannot_be_is_refused_before_the_first_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut shipped = 0;
    for entry in std::fs::read_dir(root().join("configs/experiments")).unwrap() {
        let path = entry.unwrap().path();
        let listed = program(dir.path(), &["experiment", path.to_str().unwrap(), "--list"]);
        assert!(listed.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&listed.stderr));
        let (spec, _) = Spec::read(&path).unwrap();
        assert_eq!(String::from_utf8_lossy(&listed.stdout).lines().count(), spec.order().len());
        assert_eq!(path.file_stem().unwrap().to_str(), Some(spec.name.as_str()));
        shipped += 1;
    }
    assert!(shipped >= 11, "{shipped} experiments");
    file(dir.path(), &REPLAY.replace("\"macro\"", "\"best\""));
    let refused = program(dir.path(), &["experiment", "experiment.toml"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2));
    assert!(said.contains("link=2 policy=best") && said.contains("is not a policy"), "{said}");
    assert!(!dir.path().join("experiment-tiny/rows.jsonl").exists());
}

/// The whole path with a model and a virtual device: budgets that are too small are rows that do not count, and no time is speed.
#[test]
fn a_device_that_is_too_small_is_a_refused_row_and_a_virtual_clock_is_no_speed() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"
name = "device"
question = "What fits?"
expectation = "Not everything."
methods = ["bench", "evaluate"]
[fixed]
model = "demo"
device = "virtual"
machine = "demo-pc"
predictor = "mlp"
tokens = 24
n_gen = 8
[axes]
vram = ["1MB", "11MB"]
"#;
    file(dir.path(), text);
    let done = program(dir.path(), &["experiment", "experiment.toml", "--out", "out"]);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    let before = said.split("rows").next().unwrap();
    assert!(before.contains("vram=1MB will be refused: ") && !said.contains("vram=11MB will be"), "{said}");
    let rows = RowsFile::open(&dir.path().join("out/rows.jsonl")).unwrap().rows;
    assert!(rows[0].refused.as_ref().unwrap().contains("1000000"), "{:?}", rows[0]);
    assert!(rows[1].refused.is_none() && rows[1].metrics["gpu_share"].unwrap() > 0.3);
    assert!(rows[1].metrics.contains_key("virtual_ffn_ms") && !rows[1].metrics.contains_key("tokens_per_s"));
    let page = std::fs::read_to_string(dir.path().join("out/summary.md")).unwrap();
    assert!(page.contains("The device is virtual") && page.contains("Refused rows"));
}

/// One file is for machines with a card and without one. What is made on the one does not go on on the other.
#[test]
fn what_stands_under_without_card_counts_where_there_is_none() {
    let text = r#"
name = "either"
question = "Which device?"
expectation = "What there is."
methods = ["bench"]
show = ["virtual_ffn_ms", "device_ffn_ms"]
[fixed]
model = "demo"
device = "cuda"
predictor = "mlp"
n_gen = 4
[without_card]
device = "virtual"
machine = "demo-pc"
[axes]
ffn_share = [0.2, 0.4]
[[plots]]
title = "On the card"
x = "ffn_share"
y = "device_ffn_ms"
[[plots]]
title = "Pretended"
x = "ffn_share"
y = "virtual_ffn_ms"
"#;
    let either = spec(text).unwrap();
    assert_eq!(arm_name(&either.fixed()), "model=demo device=cuda predictor=mlp n_gen=4");
    assert_eq!(
        arm_name(&either.on_no_card().fixed()),
        "model=demo device=virtual predictor=mlp n_gen=4 machine=demo-pc"
    );
    let twice = text.replace("machine = \"demo-pc\"", "ffn_share = 0.3");
    assert!(spec(&twice).unwrap_err().to_string().contains("fixed, too"));

    let dir = tempfile::tempdir().unwrap();
    let run = |text: &str| {
        file(dir.path(), text);
        // No library of the machine's is a driver.
        std::fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
        std::fs::write(dir.path().join("libcuda.so"), "").unwrap();
        let mut command = command(dir.path(), &["experiment", "experiment.toml", "--out", "out"]);
        command.env("LD_LIBRARY_PATH", dir.path()).output().unwrap()
    };
    let done = run(text);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && said.contains("instead: device=virtual machine=demo-pc"), "{said}");
    let page = std::fs::read_to_string(dir.path().join("out/summary.md")).unwrap();
    assert!(page.contains("The device is virtual") && page.contains("| ffn_share | virtual_ffn_ms | rows |"), "{page}");
    assert!(page.contains("plot-1.svg") && !page.contains("plot-2.svg"), "a plot without a point is left out");
    // The same folder, and the rows would now be of another machine.
    let record = dir.path().join("out/run.json");
    let elsewhere = std::fs::read_to_string(&record).unwrap().replace("device=virtual", "device=cuda");
    std::fs::write(&record, elsewhere).unwrap();
    let other = run(text);
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && said.contains("rows of two machines do not mix"), "{said}");
}
