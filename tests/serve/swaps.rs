//! Several models: requests name them, the daemon loads one at a time, and nobody's answer is cut for that.

use crate::daemon::{Answer, Daemon, command, read_answer, request};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

/// A daemon that makes one answer at a time, with the demo model and a folder of others: `a`, `deep/b`, and `damaged`.
fn daemon(dir: &Path, settings: &[(&str, &str)]) -> Daemon {
    let folder = dir.join("models");
    std::fs::create_dir_all(folder.join("deep")).unwrap();
    let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    std::fs::copy(fixture("qwen2.gguf"), folder.join("a.gguf")).unwrap();
    std::fs::copy(fixture("llama.gguf"), folder.join("deep/b.gguf")).unwrap();
    std::fs::write(folder.join("damaged.gguf"), "GGUF is what it says, and nothing behind it").unwrap();
    let one = [("DYNAMICINFER_SERVE_MODELS", folder.to_str().unwrap()), ("DYNAMICINFER_SERVE_PARALLEL", "1")];
    let environment = [&one, settings].concat();
    let mut daemon = Daemon::spawn(dir, &["serve", "demo"], &environment);
    daemon.wait_for("is ready");
    daemon
}

const AT_ONCE: (&str, &str) = ("DYNAMICINFER_SERVE_MIN_RESIDENCY", "0");

fn completion(model: &str) -> Json {
    json!({"model": model, "prompt": "Once", "max_tokens": 2, "ignore_eos": true})
}

fn loaded(daemon: &Daemon) -> Json {
    daemon.get("/v1/x/ps")["models"][0]["name"].clone()
}

fn until_state(daemon: &Daemon, wanted: &str) -> Json {
    let start = Instant::now();
    loop {
        let state = daemon.get("/v1/x/ps");
        if state["state"] == wanted {
            return state;
        }
        assert!(start.elapsed() < crate::daemon::PATIENCE, "{state} and not {wanted}");
    }
}

/// One request of each API that names a model, and where the answer names it.
fn each_api(model: &str) -> Vec<(&'static str, Json, &'static str)> {
    let said = json!([{"role": "user", "content": "Once"}]);
    let options = json!({"num_predict": 2});
    vec![
        ("/v1/completions", completion(model), "/model"),
        ("/v1/chat/completions", json!({"model": model, "messages": said, "max_tokens": 2}), "/model"),
        ("/v1/responses", json!({"model": model, "input": "Once", "max_output_tokens": 2}), "/model"),
        ("/v1/messages", json!({"model": model, "messages": said, "max_tokens": 2}), "/model"),
        ("/v1/embeddings", json!({"model": model, "input": "Once"}), "/model"),
        ("/api/chat", json!({"model": model, "messages": said, "options": options, "stream": false}), "/model"),
        ("/api/generate", json!({"model": model, "prompt": "Once", "options": options, "stream": false}), "/model"),
        ("/api/embed", json!({"model": model, "input": "Once"}), "/model"),
    ]
}

#[test]
fn a_request_loads_the_model_that_it_names_and_lists_tell_which_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    let ids = |list: Json| list.as_array().unwrap().iter().map(|one| one["id"].clone()).collect::<Vec<_>>();
    let list = daemon.get("/v1/models");
    assert_eq!(ids(list["data"].clone()), ["demo", "a", "damaged", "deep/b"]);
    assert_eq!((&list["data"][0]["loaded"], &list["data"][1]["loaded"]), (&json!(true), &json!(false)));
    assert_eq!(daemon.get("/v1/models/deep/b")["id"], "deep/b");
    for (i, (path, ..)) in each_api("").iter().enumerate() {
        let model = ["a", "demo", "deep/b"][i % 3];
        let (_, ask, name) = each_api(model).swap_remove(i);
        let answer = daemon.post(path, &ask);
        assert_eq!(answer.status, 200, "{path} {model}: {}", answer.text());
        assert_eq!(answer.json().pointer(name), Some(&json!(model)), "{path}");
        assert_eq!(loaded(&daemon), model);
        // What names none is answered by the model that is there.
        assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).json()["model"], model);
    }
    assert_eq!(daemon.post("/v1/completions", &completion("a:latest")).json()["model"], "a");
    let tags = daemon.get("/api/tags");
    let sizes: Vec<_> =
        tags["models"].as_array().unwrap().iter().map(|m| (m["name"].clone(), m["size"].as_u64())).collect();
    assert!(sizes.len() == 4 && sizes.iter().all(|(_, size)| *size > Some(0)), "{sizes:?}");
    // A model that is not loaded is not loaded to be shown.
    let shown = daemon.post("/api/show", &json!({"model": "deep/b"})).json();
    assert_eq!(
        (&shown["details"]["family"], &shown["model_info"]["llama.block_count"]),
        (&json!("llama"), &json!(2)),
        "{shown}"
    );
    assert_eq!((daemon.post("/api/show", &json!({"model": "gpt-9"})).status, loaded(&daemon)), (404, json!("a")));
    let running = daemon.get("/api/ps");
    assert_eq!((running["models"].as_array().unwrap().len(), &running["models"][0]["name"]), (1, &json!("a")));
    assert_eq!(daemon.get("/v1/x/ps")["models"][0]["on_demand"], true);
    // A name is no path.
    for name in ["../models/a", "a.gguf", dir.path().join("models/a.gguf").to_str().unwrap()] {
        assert_eq!(daemon.post("/v1/completions", &completion(name)).status, 404, "{name}");
    }
}

/// The message of an error in the form of an API.
fn message(path: &str, answer: &Answer) -> String {
    let error = answer.json()["error"].clone();
    let message = if path.starts_with("/api/") { &error } else { &error["message"] };
    message.as_str().unwrap_or_else(|| panic!("{path}: {}", answer.text())).to_owned()
}

#[test]
fn what_cannot_be_loaded_is_refused_in_the_apis_form_and_the_loaded_model_stays() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    for i in 0..each_api("").len() {
        let (path, unknown, _) = each_api("gpt-9").swap_remove(i);
        let answer = daemon.post(path, &unknown);
        assert_eq!(answer.status, 404, "{path}: {}", answer.text());
        assert!(message(path, &answer).contains("'gpt-9' is not loaded; 'demo' is"), "{}", answer.text());
        let damaged = daemon.post(path, &each_api("damaged").swap_remove(i).1);
        // Anthropic's clients come again after another status.
        let wanted = if path == "/v1/messages" { 529 } else { 503 };
        assert_eq!(damaged.status, wanted, "{path}: {}", damaged.text());
        assert!(damaged.headers.contains("retry-after: "), "{path}: {}", damaged.headers);
        let why = message(path, &damaged);
        assert!(why.contains("'damaged' cannot be loaded now") && !why.contains(dir.path().to_str().unwrap()), "{why}");
        assert_eq!(loaded(&daemon), "demo", "{path}");
    }
    assert_eq!(daemon.metric("dynamicinfer_model_loads_total"), 1.0);
}

#[test]
fn the_daemon_can_be_told_to_load_nothing_for_requests() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE, ("DYNAMICINFER_SERVE_ON_DEMAND", "false")]);
    assert_eq!(daemon.post("/v1/completions", &completion("a")).status, 404);
    assert_eq!(daemon.get("/v1/models")["data"].as_array().unwrap().len(), 1);
    assert_eq!(daemon.post("/api/show", &json!({"model": "a"})).status, 404);
    // What it has freed by itself is still its model.
    let free = json!({"model": "demo", "keep_alive": 0});
    assert_eq!(daemon.post("/api/generate", &free).status, 200);
    until_state(&daemon, "freed");
    let said = command(dir.path(), &["ps"]).output().unwrap();
    assert!(String::from_utf8(said.stdout).unwrap().contains("demo was freed"));
    assert_eq!(daemon.post("/v1/completions", &completion("a")).status, 404);
    assert_eq!(daemon.post("/v1/completions", &completion("demo:latest")).status, 200);
}

#[test]
fn a_model_is_not_loaded_twice_within_its_residency() {
    let dir = tempfile::tempdir().unwrap();
    let settings = [("DYNAMICINFER_SERVE_MIN_RESIDENCY", "3600"), ("DYNAMICINFER_SERVE_SWAP_SECONDS", "5")];
    let daemon = daemon(dir.path(), &settings);
    // The first time need not wait.
    for model in ["a", "deep/b"] {
        assert_eq!(daemon.post("/v1/completions", &completion(model)).status, 200, "{model}");
    }
    for model in ["demo", "a"] {
        let refused = daemon.post("/v1/completions", &completion(model));
        assert!(refused.status == 503 && refused.headers.contains("retry-after: 30"), "{}", refused.text());
        assert_eq!(refused.json()["error"]["code"], "model_busy");
    }
    assert_eq!(daemon.post("/v1/completions", &completion("deep/b")).status, 200);
    // The user is asked nothing.
    assert_eq!(daemon.post("/v1/x/models/load", &json!({"model": "demo"})).status, 200);
    assert_eq!(daemon.metric("dynamicinfer_model_loads_total"), 4.0);
}

#[test]
fn twenty_clients_that_take_turns_between_two_models_are_all_answered_and_load_none_twice_within_a_second() {
    const CLIENTS: usize = 20;
    const ROUNDS: usize = 3;
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[("DYNAMICINFER_SERVE_MIN_RESIDENCY", "1")]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let daemon = &daemon;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let model = ["a", "deep/b"][(client + round) % 2];
                    let answer = daemon.post("/v1/completions", &completion(model));
                    assert_eq!((answer.status, &answer.json()["model"]), (200, &json!(model)), "{}", answer.text());
                }
            });
        }
    });
    // Each model once at the start, and once more after each second.
    let loads = daemon.metric("dynamicinfer_model_loads_total") - 1.0;
    let most = 2.0 * (1.0 + start.elapsed().as_secs_f64().floor());
    assert!(loads >= 2.0 && loads <= most, "{loads} loads, {most} at most");
}

/// Long answers of the demo model, streamed together: one at a time is made, so that they take longer than what is tried beside them.
fn long(daemon: &Daemon) -> std::os::unix::net::UnixStream {
    let ask = json!({
        "prompt": vec!["Once"; 3], "max_tokens": 400, "ignore_eos": true, "temperature": 0, "stream": true,
    });
    let mut busy = daemon.connect();
    busy.write_all(&request("POST", "/v1/completions", &ask.to_string())).unwrap();
    while daemon.metric("dynamicinfer_num_requests_running") == 0.0 {}
    busy
}

#[test]
fn answers_under_way_end_before_the_model_that_a_request_names_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE, ("DYNAMICINFER_SERVE_DRAIN_SECONDS", "0")]);
    let mut busy = long(&daemon);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| daemon.post("/v1/completions", &completion("a")));
        until_state(&daemon, "loading");
        // What names none waits for what comes of it.
        let any = scope.spawn(|| daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})));
        assert_eq!(read_answer(&mut busy).streamed().1.as_deref(), Some("length"));
        for answer in [other, any].map(|asked| asked.join().unwrap()) {
            assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("a")), "{}", answer.text());
        }
    });
}

/// From when a streamed request is handed in until its first pass was over nothing counted it: the model was taken away under it.
#[test]
fn no_streamed_answer_is_cut_while_clients_take_turns_between_models() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    std::thread::scope(|scope| {
        for client in 0..4 {
            let daemon = &daemon;
            scope.spawn(move || {
                for round in 0..4 {
                    let mut ask = completion(["a", "deep/b"][(client + round) % 2]);
                    (ask["stream"], ask["prompt"]) = (true.into(), "word ".repeat(60).into());
                    let answer = daemon.post("/v1/completions", &ask);
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    assert_eq!(answer.streamed().1.as_deref(), Some("length"), "{}", answer.text());
                }
            });
        }
    });
}

#[test]
fn the_user_need_not_wait_for_answers_that_a_request_for_another_model_waits_for() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE, ("DYNAMICINFER_SERVE_DRAIN_SECONDS", "0")]);
    let mut busy = long(&daemon);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| daemon.post("/v1/completions", &completion("a")));
        until_state(&daemon, "loading");
        assert_eq!(daemon.post("/v1/x/models/load", &json!({"model": "demo"})).status, 200);
        assert_eq!(other.join().unwrap().status, 200);
    });
    assert!(read_answer(&mut busy).text().contains("the server is stopping"));
}

#[test]
fn a_daemon_that_ends_does_not_wait_for_a_model_that_a_request_waits_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = daemon(dir.path(), &[AT_ONCE]);
    let mut busy = long(&daemon);
    let mut other = daemon.connect();
    other.write_all(&request("POST", "/v1/completions", &completion("a").to_string())).unwrap();
    until_state(&daemon, "loading");
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(read_answer(&mut other).json()["error"]["code"], "stopping");
    assert_eq!(read_answer(&mut busy).streamed().1.as_deref(), Some("length"));
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn a_request_that_is_given_up_leaves_the_model_that_still_answers() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    let mut busy = long(&daemon);
    let mut gone = daemon.connect();
    gone.write_all(&request("POST", "/v1/completions", &completion("a").to_string())).unwrap();
    until_state(&daemon, "loading");
    drop(gone);
    assert_eq!(until_state(&daemon, "ready")["models"][0]["name"], "demo");
    assert_eq!(daemon.post("/v1/completions", &completion("demo")).status, 200);
    assert_eq!(read_answer(&mut busy).streamed().1.as_deref(), Some("length"));
    assert_eq!(daemon.metric("dynamicinfer_model_loads_total"), 1.0);
}

#[test]
fn a_model_that_nobody_uses_is_freed_and_comes_back_with_the_next_request() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    let ask = |keep: Json| json!({"model": "demo", "prompt": "x", "options": {"num_predict": 1}, "stream": false, "keep_alive": keep});
    assert_eq!(daemon.post("/api/generate", &ask(json!(0))).status, 200);
    assert_eq!(until_state(&daemon, "freed")["freed"], "demo");
    assert_eq!(daemon.get("/ready"), json!({"status": "ready", "model": "demo"}));
    assert_eq!(daemon.call("GET", "/v1/x/cache", "").json()["error"]["code"], "model_freed");
    assert_eq!(daemon.get("/v1/models")["data"][0]["id"], "demo");
    // Another name means none, and a request for a model that cannot be loaded leaves it freed.
    assert_eq!(daemon.post("/v1/completions", &completion("gpt-9")).status, 404);
    assert_eq!(daemon.post("/v1/completions", &completion("damaged")).status, 503);
    assert_eq!(daemon.get("/v1/x/ps")["freed"], "demo");
    // `ollama stop` loads none to free it.
    assert_eq!(daemon.post("/api/generate", &json!({"model": "a", "keep_alive": 0})).status, 503);
    assert_eq!(daemon.get("/v1/x/ps")["freed"], "demo");
    // A request without a name means it.
    let answer = daemon.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("demo")), "{}", answer.text());
    for bad in [json!("soon"), json!({}), json!([])] {
        let refused = daemon.post("/api/generate", &ask(bad));
        assert!(refused.status == 400 && message("/api/", &refused).contains("keep_alive"), "{}", refused.text());
    }
    // What `stop` unloads stays away until it is asked for by a name that is offered.
    assert_eq!(daemon.post("/v1/x/models/unload", &json!({})).status, 200);
    assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x"})).json()["error"]["code"], "no_model");
    assert_eq!(daemon.post("/v1/completions", &completion("a")).status, 200);
    drop(daemon);

    let second = [AT_ONCE, ("DYNAMICINFER_SERVE_KEEP_ALIVE", "1")];
    let daemon = self::daemon(dir.path(), &second);
    until_state(&daemon, "freed");
    assert_eq!(daemon.post("/v1/completions", &completion("a")).status, 200);
    assert_eq!(until_state(&daemon, "freed")["freed"], "a");
}

#[test]
fn a_preset_has_its_own_context_sampling_and_system_message() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    let text = "[serve]\nmin_residency = 0\n[model.brief]\npath = \"demo\"\ncontext = 64\ntemperature = 0\nsystem = \"Tell a story.\"\n\
                [model.gone]\npath = \"/nowhere\"\n";
    std::fs::write(&config, text).unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--config", config.to_str().unwrap()], &[]);
    daemon.wait_for("is ready");
    let ask = |model: &str, messages: Json| {
        let ask = json!({"model": model, "messages": messages, "max_tokens": 16, "temperature": if model == "demo" { Some(0) } else { None }});
        let answer = daemon.post("/v1/chat/completions", &ask);
        assert_eq!(answer.status, 200, "{}", answer.text());
        (answer.json()["choices"][0]["message"]["content"].clone(), answer.json()["usage"]["prompt_tokens"].clone())
    };
    let user = json!({"role": "user", "content": "Once upon a time"});
    let told = ask("demo", json!([{"role": "system", "content": "Tell a story."}, user]));
    assert_eq!(ask("brief", json!([user])), told);
    assert_eq!(daemon.get("/v1/models/brief")["context_length"], 64);
    // A system message of the request takes its place.
    let own = ask("brief", json!([{"role": "system", "content": "A."}, user]));
    assert_eq!(own, ask("demo", json!([{"role": "system", "content": "A."}, user])));
    assert_eq!(daemon.post("/v1/completions", &completion("gone")).status, 503);
    assert_eq!(loaded(&daemon), "demo");
    let verb = command(dir.path(), &["load", "brief"]).stderr(Stdio::piped()).output().unwrap();
    assert!(verb.status.success(), "{}", String::from_utf8_lossy(&verb.stderr));
    assert_eq!(daemon.get("/v1/models")["data"][0]["context_length"], 64);
}

/// `chat NAME` replaced the model that other clients were talking to.
#[test]
fn a_chat_replaces_nobodys_model_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path(), &[AT_ONCE]);
    let chat = |model: &str| {
        let done = command(dir.path(), &["chat", model]).output().unwrap();
        (done.status.code().unwrap(), String::from_utf8(done.stderr).unwrap())
    };
    let model = dir.path().join("models/a.gguf");
    let (code, said) = chat(model.to_str().unwrap());
    assert!(
        code == 2 && said.contains("the daemon runs demo, which others may use") && said.contains("--here"),
        "{said}"
    );
    assert_eq!(loaded(&daemon), "demo");
    assert_eq!(chat("demo").0, 0);
    assert_eq!(daemon.post("/v1/x/models/unload", &json!({})).status, 200);
    let (code, said) = chat(model.to_str().unwrap());
    assert!(code == 0 && said.contains("loading"), "{said}");
    assert_eq!(loaded(&daemon), "a");
}
