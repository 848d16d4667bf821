//! Schemas that are programs against the daemon: each is refused, and nobody else notices.

use crate::daemon::{Answer, Daemon, PATIENCE, read_answer, request};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

fn ask(schema: &Json) -> Json {
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    json!({"prompt": "Once", "max_tokens": 40, "temperature": 0, "response_format": format})
}

/// No two are equal, all are as the API's users write them.
fn ordinary(i: usize) -> Json {
    json!({
        "title": format!("person {i}"), "type": "object", "required": ["name", "age"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
            "mail": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]}
        },
    })
}

/// With a word of the refusal: where in the schema it is.
fn bombs() -> Vec<(&'static str, Json, &'static str)> {
    let names: Vec<String> = (0..20_000).map(|i| format!("n{i}")).collect();
    let properties: Json = names.iter().map(|name| (name.clone(), json!({}))).collect::<serde_json::Map<_, _>>().into();
    let multiple = |of: u64| json!({"type": "integer", "multipleOf": of});
    vec![
        ("8,000 required", json!({"type": "object", "required": names[..8000]}), "/required"),
        ("20,000 properties", json!({"type": "object", "properties": properties}), "/properties"),
        ("2^31", multiple(1 << 31), "/multipleOf"),
        ("2^30", multiple(1 << 30), "/multipleOf"),
        ("2^29", multiple(1 << 29), "/multipleOf"),
        ("2^28 + 1", multiple(268_435_457), "/multipleOf"),
        (
            "9973 and 9967",
            json!({"allOf": [multiple(9973), multiple(9967)]}),
            "/allOf/0/multipleOf, /allOf/1/multipleOf",
        ),
        (
            "behind an optional property",
            json!({"type": "object", "properties": {"a": {"type": "string"}, "b": multiple(268_435_457)}}),
            "/properties/b/multipleOf",
        ),
    ]
}

fn refused(name: &str, answer: &Answer) -> String {
    assert_eq!(answer.status, 400, "{name}: {}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("invalid_request_error"), &json!("unsupported_schema")),
        "{name}"
    );
    assert_eq!(error["param"], "response_format", "{name}");
    error["message"].as_str().unwrap().to_owned()
}

/// Processor time in ticks (of 10 ms) of each child of the daemon that tries schemas, by its process id.
fn trials(daemon: &Daemon) -> Vec<(u32, u64)> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let child = |id: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // Behind the name, which may hold anything: state, parent, ..., and 11 and 12 on, user and system time.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ours = fields[1] == daemon.child.id().to_string() && fields[0] != "Z";
        let command = std::fs::read_to_string(format!("/proc/{id}/cmdline")).ok()?;
        let ticks = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
        (ours && command.contains("__try-schema")).then_some((id, ticks))
    };
    ids.filter_map(child).collect()
}

/// 8,000 names in `required` overflowed a runtime thread's stack and ended the daemon by signal 6; a `multipleOf` of nine digits
/// span on a thread for ever, and took 37 MB/s.
#[test]
fn a_schema_that_would_take_everything_is_refused_while_everybody_else_is_answered() {
    let daemon = Daemon::start(&["--deterministic"]);
    let plain = json!({"prompt": "The king", "max_tokens": 8, "temperature": 0});
    let text = |answer: &Answer| answer.json()["choices"][0]["text"].as_str().map(str::to_owned);
    let alone = text(&daemon.post(TEXT, &plain));
    assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200);
    let memory = daemon.metric("process_resident_memory_bytes");
    for (name, schema, place) in bombs() {
        let start = Instant::now();
        let (message, others) = std::thread::scope(|scope| {
            let bomb = scope.spawn(|| daemon.post(TEXT, &ask(&schema)));
            let mut others = 0;
            while !bomb.is_finished() || others == 0 {
                assert_eq!(daemon.call("GET", "/health", "").status, 200, "{name}");
                assert_eq!(text(&daemon.post(TEXT, &plain)), alone, "{name}: another client's answer");
                assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200, "{name}: a known schema");
                assert!(start.elapsed() < PATIENCE, "{name}: no answer");
                others += 1;
            }
            (refused(name, &bomb.join().unwrap()), others)
        });
        let grown = (daemon.metric("process_resident_memory_bytes") - memory) / f64::from(1 << 20);
        println!("{name}: {:?}, {others} others answered, memory {grown:+.1} MiB: {message}", start.elapsed());
        assert!(message.contains(place), "{name}: {message}");
        // Who waits for the trial of a bomb is done once, when it is over.
        assert!(start.elapsed() < Duration::from_secs(2) || others > 2, "{name}: {others} others");
        assert!(grown < 24.0, "{name}: memory has grown by {grown} MiB");
    }
    // One process waits for the next; none works.
    assert!(trials(&daemon).len() <= 1, "{:?}", trials(&daemon));
    assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200);
}

/// Bombs that are on their way, each with a schema of its own, sent by a gateway for the client at this address.
fn sent(daemon: &Daemon, client: &str, schemas: impl Iterator<Item = Json>) -> Vec<UnixStream> {
    let send = |schema: Json| {
        let mut stream = daemon.connect();
        stream.write_all(&of(client, &ask(&schema))).unwrap();
        stream
    };
    schemas.map(send).collect()
}

fn of(client: &str, ask: &Json) -> Vec<u8> {
    let plain = String::from_utf8(request("POST", TEXT, &ask.to_string())).unwrap();
    plain.replacen("\r\n", &format!("\r\nX-Real-IP: {client}\r\n"), 1).into_bytes()
}

fn slow(i: u64) -> Json {
    json!({"type": "integer", "multipleOf": 268_435_457 + 2 * i})
}

/// Requests waited for the trials of their schemas in the places in which all are read: beside four of one client a plain completion of two
/// tokens took 5.9 s.
#[test]
fn nothing_but_schemas_waits_for_the_trial_of_a_schema() {
    for client in ["10.0.0.1", "10.0.0.2"] {
        let daemon = Daemon::start(&[]);
        let _bombs = sent(&daemon, "10.0.0.1", (0..8).map(slow));
        daemon.until("dynamicinfer_schemas_tried_total", 1.0);
        daemon.until("dynamicinfer_num_requests_unread", 0.0);
        let plain = json!({"prompt": "The king", "max_tokens": 2, "temperature": 0});
        let answer = daemon.raw(&of(client, &plain));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let tried = daemon.metric("dynamicinfer_schemas_tried_total");
        assert!(tried < 4.0, "{tried} schemas were tried before a request without one was answered");
    }
}

/// Whichever request was woken first had its schema tried next, so one client's schemas came before another's for as long as it sent some.
#[test]
fn clients_take_turns_with_their_schemas() {
    let daemon = Daemon::start(&[]);
    let _bombs = sent(&daemon, "10.0.0.1", (0..8).map(slow));
    daemon.until("dynamicinfer_schemas_tried_total", 1.0);
    let answer = daemon.raw(&of("10.0.0.2", &ask(&ordinary(1))));
    assert_eq!(answer.status, 200, "{}", answer.text());
    // The one that was being tried, its own, and one more at most, while it was compiled and answered.
    let tried = daemon.metric("dynamicinfer_schemas_tried_total");
    assert!(tried <= 3.0, "{tried} schemas were tried before the second client's was answered");
}

/// Alternatives that must all hold: the library makes every combination, 39,304 objects of 420 names each from 145 KB.
fn cube() -> Json {
    let names = |axis: usize, i: usize| (0..140).map(move |j| format!("{axis}{i}_{j}")).collect::<Vec<_>>();
    let object = |axis, i| json!({"type": "object", "required": names(axis, i)});
    let axis = |axis| json!({"anyOf": (0..34).map(|i| object(axis, i)).collect::<Vec<_>>()});
    json!({"allOf": [axis(0), axis(1), axis(2)]})
}

/// What takes memory takes the child's, even where the daemon could have more.
#[test]
fn a_schema_that_wants_memory_gets_none_of_the_daemons() {
    let daemon = Daemon::start(&[]);
    assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200);
    // If it grew after all, it would end and not this machine.
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let size = status.lines().find_map(|l| l.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let most = Some((size.unwrap() << 10) + (1 << 30));
    prlimit(Some(Pid::from_child(&daemon.child)), Resource::As, Rlimit { current: most, maximum: most }).unwrap();
    let memory = daemon.metric("process_resident_memory_bytes");
    let start = Instant::now();
    let message = refused("cube", &daemon.post(TEXT, &ask(&cube())));
    let grown = (daemon.metric("process_resident_memory_bytes") - memory) / f64::from(1 << 20);
    println!("{:?}, {grown:+.1} MiB: {message}", start.elapsed());
    assert!(message.contains("512 MiB of memory") || message.contains("takes more than 2s"), "{message}");
    assert!(start.elapsed() < PATIENCE && grown < 24.0, "{grown} MiB after {:?}", start.elapsed());
    assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200);
}

/// The thread that span went on after its client had left.
#[test]
fn a_client_that_leaves_ends_the_trial_of_its_schema() {
    let daemon = Daemon::start(&[]);
    let (_, bomb, _) = &bombs()[5];
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", TEXT, &ask(bomb).to_string())).unwrap();
    let start = Instant::now();
    let works = || trials(&daemon).into_iter().find(|(_, ticks)| *ticks >= 10);
    let id = loop {
        assert!(start.elapsed() < PATIENCE, "nothing tries the schema: {:?}", trials(&daemon));
        if let Some((id, _)) = works() {
            break id;
        }
    };
    drop(stream);
    let mut ticks = 0;
    while let Some((_, now)) = trials(&daemon).into_iter().find(|(other, _)| *other == id) {
        ticks = now;
        assert!(start.elapsed() < PATIENCE, "it goes on after its client has left");
    }
    assert!(ticks < 150, "it computed for {ticks}0 ms, and would have been ended after 2 s by itself");
    assert_eq!(daemon.post(TEXT, &ask(&ordinary(0))).status, 200);
}

#[test]
fn a_schema_is_tried_once_and_the_last_64_are_known() {
    let daemon = Daemon::start(&[]);
    let tried = || daemon.metric("dynamicinfer_schemas_tried_total");
    let timed = |i: usize| {
        let start = Instant::now();
        let answer = daemon.post(TEXT, &ask(&ordinary(i)));
        assert_eq!(answer.status, 200, "{}", answer.text());
        start.elapsed()
    };
    timed(0);
    let mut first: Vec<Duration> = (1..64).map(timed).collect();
    let mut again: Vec<Duration> = (1..64).map(timed).collect();
    assert_eq!(tried(), 64.0);
    timed(0);
    assert_eq!(tried(), 64.0);
    timed(64);
    // 1 is the one that was used least lately.
    timed(0);
    assert_eq!(tried(), 65.0);
    timed(1);
    assert_eq!(tried(), 66.0);
    first.sort();
    again.sort();
    println!("median of a request with a new schema {:?}, with a known one {:?}", first[31], again[31]);
    assert!(first[31] < again[31] + Duration::from_secs(1), "{first:?} {again:?}");
    // A refusal is known, too.
    let (name, bomb, _) = &bombs()[2];
    let message = refused(name, &daemon.post(TEXT, &ask(bomb)));
    let start = Instant::now();
    assert_eq!(refused(name, &daemon.post(TEXT, &ask(bomb))), message);
    println!("a refusal again: {:?}", start.elapsed());
    assert_eq!((tried(), daemon.metric("dynamicinfer_schemas_refused_total")), (67.0, 2.0));
}

/// What is large and within the limits is answered.
#[test]
fn a_large_schema_within_the_limits_is_kept_to() {
    let daemon = Daemon::start(&["--ctx-size", "512"]);
    let names: Vec<String> = (0..4096).map(|i| format!("n{i}")).collect();
    for schema in
        [json!({"type": "object", "required": names, "additionalProperties": {"type": "null"}}), json!({"enum": names})]
    {
        let start = Instant::now();
        let answer = daemon.post(TEXT, &ask(&schema));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.json()["choices"][0]["text"].as_str().unwrap().to_owned();
        println!("{:?}: {text}", start.elapsed());
        assert!(text.starts_with("{\"n0\": null, \"n1\": null") || text.starts_with("\"n"), "{text}");
    }
}

/// A fault that only the answer reaches was a 500, which clients repeat.
#[test]
fn a_schema_that_is_too_much_in_the_middle_of_an_answer_is_told_as_the_askers_fault() {
    let daemon = Daemon::start(&[]);
    // Where the last "a" and "e" stood: a state for each pair of places, as the answer goes on.
    let heavy = json!({"type": "string", "pattern": "^(.*a.{30}.*e.{9}|[^a]*)$"});
    let properties = json!({"x": {"type": "boolean"}, "y": heavy});
    let schema = json!({"type": "object", "properties": properties, "required": ["x", "y"]});
    let mut ask = ask(&schema);
    ask["max_tokens"] = 400.into();
    ask["temperature"] = 1.into();
    ask["seed"] = 1.into();
    let whole = daemon.post(TEXT, &ask);
    println!("{}", whole.text());
    refused("whole", &whole);
    ask["stream"] = true.into();
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", TEXT, &ask.to_string())).unwrap();
    let streamed = read_answer(&mut stream);
    let last = streamed.events().pop().unwrap();
    assert!(last.contains("unsupported_schema") && last.contains("invalid_request_error") && !streamed.whole, "{last}");
    assert_eq!(daemon.metric("dynamicinfer_request_failed_total"), 0.0);
    assert_eq!(daemon.metric("dynamicinfer_requests_rejected_total{reason=\"schema\"}"), 2.0);
}
