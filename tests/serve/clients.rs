//! What clients made for OpenAI bring along: a port and a token, functions to call, the newer API, texts as vectors.

use crate::daemon::{Daemon, PATIENCE, command, read_all, read_answer, request, said};
use dynamicinfer::api::call_format::CallFormat;
use dynamicinfer::api::reader::Reader;
use dynamicinfer::api::reading::{Callable, Part, Reading};
use dynamicinfer::api::tools::FunctionCall;
use rustix::process::Signal;
use serde_json::{Value as Json, json};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

fn get(address: &str, path: &str, token: Option<&str>) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n").unwrap();
    read_all(&mut stream).status
}

/// Each start had another token, which every client had to be given anew.
#[test]
fn the_token_stays_from_one_start_to_the_next_and_is_its_users_alone() {
    let dir = tempfile::tempdir().unwrap();
    let start = |listen: &str| {
        let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", listen], &[]);
        let (address, token) = daemon.port();
        (daemon, address, token)
    };
    let (mut daemon, address, token) = start("localhost:0");
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    assert_eq!((get(&address, "/v1/models", Some(&token)), get(&address, "/v1/models", None)), (200, 401));
    // A supervisor asks without.
    assert_eq!((get(&address, "/health", None), get(&address, "/metrics", None)), (200, 401));
    let file = dir.path().join(".local/state/dynamicinfer/token");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    daemon.signal(Signal::TERM);
    daemon.wait();
    let (mut daemon, address, again) = start("0");
    assert_eq!((again == token, get(&address, "/v1/models", Some(&token))), (true, 200));
    daemon.signal(Signal::TERM);
    daemon.wait();
    // Who could read it once may know it.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let done = said(&mut command(dir.path(), &["serve", "--listen", "0"])).expect("it ends");
    let why = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && why.contains("other users can read this token; remove the file"), "{why}");
}

/// It was written under a name that holds the process's number, which a process of another container may have, too: through a link of that
/// name one daemon overwrote what another had.
#[test]
fn a_new_token_overwrites_nothing_and_one_with_another_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (state, victim) = (dir.path().join(".local/state/dynamicinfer"), dir.path().join("victim"));
    std::fs::create_dir_all(&state).unwrap();
    std::fs::write(&victim, "somebody's").unwrap();
    // The shell's number becomes the daemon's.
    let script = r#"ln victim ".local/state/dynamicinfer/token.$$.tmp" && exec "$0" serve --listen 0"#;
    let mut shell = command(dir.path(), &[]);
    let program = shell.get_program().to_owned();
    let environment: Vec<_> =
        shell.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
    shell = std::process::Command::new("/bin/sh");
    shell.args(["-c", script]).arg(program).current_dir(dir.path()).env_clear();
    environment.into_iter().for_each(|(name, value)| _ = value.map(|value| shell.env(name, value)));
    let child = shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut daemon = Daemon::listening_to(child, dir.path());
    let (address, token) = daemon.port();
    assert_eq!(get(&address, "/v1/models", Some(&token)), 200);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "somebody's");
    daemon.signal(Signal::TERM);
    daemon.wait();
    let file = state.join("token");
    let names = std::fs::read_dir(&state).unwrap().count();
    assert_eq!((std::fs::read_to_string(&file).unwrap().trim(), names), (token.as_str(), 2), "no other file is left");
    // Under its other name somebody else may keep it, or change it.
    std::fs::hard_link(&file, dir.path().join("other")).unwrap();
    let done = said(&mut command(dir.path(), &["serve", "--listen", "0"])).expect("it ends");
    let why = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && why.contains("has other names (hard links)"), "{why}");
}

/// The name of the default socket was made of two variables, of which each verb may have had others.
#[test]
fn without_a_runtime_directory_every_verb_looks_at_the_same_place_and_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("/tmp/dynamicinfer-{}/dynamicinfer.sock", rustix::process::getuid().as_raw());
    for verb in [&["ps"][..], &["stop"], &["top", "--json"], &["budget"], &["load", "demo"]] {
        for runtime in [None, Some("relative"), Some("/nowhere/at/all")] {
            let mut command = command(dir.path(), verb);
            command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", dir.path());
            runtime.into_iter().for_each(|dir| _ = command.env("XDG_RUNTIME_DIR", dir));
            let done = said(&mut command).expect("it ends");
            let err = String::from_utf8(done.stderr).unwrap();
            assert!(done.status.code() == Some(3) && err.contains(&socket), "{verb:?} {runtime:?}: {err}");
        }
    }
}

fn weather() -> Json {
    let parameters = json!({
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": false,
        "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
    });
    json!({"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": parameters}})
}

fn clock() -> Json {
    json!({"type": "function", "function": {"name": "clock"}})
}

/// The call that an answer is, with its arguments read.
fn call(choice: &Json) -> (String, Json) {
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &choice["message"]["content"]), (1, &Json::Null));
    let function = &calls[0]["function"];
    let arguments = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    (function["name"].as_str().unwrap().to_owned(), arguments)
}

#[test]
fn a_call_that_is_required_is_one_of_the_functions_with_arguments_of_its_schema() {
    let daemon = Daemon::start(&[]);
    let mut names = Vec::new();
    for seed in 0..6 {
        let ask = json!({
            "messages": [{"role": "user", "content": "Will it rain in Rome?"}],
            "tools": [weather(), clock()], "tool_choice": "required",
            "temperature": 1.5, "seed": seed, "max_tokens": 100, "reasoning_effort": "low",
        });
        let whole = daemon.post("/v1/chat/completions", &ask);
        assert_eq!(whole.status, 200, "{}", whole.text());
        let (name, arguments) = call(&whole.json()["choices"][0]);
        match name.as_str() {
            "weather" => {
                assert!(arguments["place"] == "Rome" || arguments["place"] == "Oslo", "{arguments}");
                assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{arguments}");
            }
            "clock" => assert_eq!(arguments, json!({})),
            other => panic!("{other}"),
        }
        names.push(name);
    }
    // One that is named is the one that is called; a stream has the same call, its arguments as they come.
    let mut ask = json!({
        "messages": [{"role": "user", "content": "x"}], "tools": [clock(), weather()], "temperature": 0, "max_tokens": 100,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    });
    let whole = daemon.post("/v1/chat/completions", &ask).json();
    let (name, arguments) = call(&whole["choices"][0]);
    assert_eq!(name, "weather");
    ask["stream"] = true.into();
    let events = daemon.post("/v1/chat/completions", &ask).events();
    let events: Vec<Json> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let pieces: Vec<&Json> =
        events.iter().flat_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert!(pieces.len() > 3 && pieces.iter().all(|piece| piece["index"] == 0), "{pieces:?}");
    assert!(pieces[1..].iter().all(|piece| piece["id"].is_null() && piece["function"]["name"].is_null()));
    let streamed: String = pieces.iter().map(|piece| piece["function"]["arguments"].as_str().unwrap()).collect();
    let streamed: Json = serde_json::from_str(&streamed).unwrap();
    assert_eq!((&pieces[0]["function"]["name"], streamed), (&json!("weather"), arguments));
    assert!(events.iter().all(|e| e["choices"][0]["delta"]["content"].as_str().is_none_or(str::is_empty)));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    // What the function gave goes on; without the call that it answers it is refused.
    let made = &whole["choices"][0]["message"];
    let result = json!({"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "sunny"});
    let next = |messages: Json| {
        daemon.post("/v1/chat/completions", &json!({"messages": messages, "tools": [weather()], "max_tokens": 5}))
    };
    let said = next(json!([{"role": "user", "content": "x"}, made, result]));
    assert_eq!(said.status, 200, "{}", said.text());
    let alone = next(json!([{"role": "user", "content": "x"}, result]));
    assert_eq!((alone.status, &alone.json()["error"]["param"]), (400, &json!("messages.1.tool_call_id")));
}

#[test]
fn an_answer_that_may_call_is_text_or_a_whole_call() {
    let daemon = Daemon::start(&[]);
    let brace =
        daemon.post("/tokenize", &json!({"content": "a{"})).json()["tokens"].as_array().unwrap().last().cloned();
    let brace = brace.unwrap().to_string();
    let mut ask = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}], "tools": [weather()], "temperature": 0,
        "max_tokens": 60, "ignore_eos": true,
    });
    let text = daemon.post("/v1/chat/completions", &ask).json();
    let said = text["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(said.len() > 20 && !said.trim_start().starts_with('{'), "{said}");
    ask["stream"] = true.into();
    assert_eq!(daemon.post("/v1/chat/completions", &ask).streamed().0, said);
    // A model that wants to call begins with a brace; from there on the grammar leads it.
    ask["stream"] = false.into();
    ask["logit_bias"] = json!({ brace: 100 });
    let (name, arguments) = call(&daemon.post("/v1/chat/completions", &ask).json()["choices"][0]);
    assert!(name == "weather" && arguments["days"].is_u64(), "{arguments}");
    // `none` calls nothing, whatever there is.
    ask["tool_choice"] = "none".into();
    let none = daemon.post("/v1/chat/completions", &ask).json();
    assert!(none["choices"][0]["message"]["content"].is_string() && none["choices"][0]["finish_reason"] == "length");
}

#[test]
fn the_newer_api_says_what_a_chat_says_whole_and_as_events() {
    let daemon = Daemon::start(&[]);
    let chat = json!({
        "messages": [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Once upon a time"}],
        "temperature": 0, "max_tokens": 12});
    let chat = daemon.post("/v1/chat/completions", &chat).json();
    let expected = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let mut ask = json!({
        "instructions": "Tell a story.", "input": "Once upon a time", "temperature": 0, "max_output_tokens": 12,
        "reasoning": {"effort": "low"}});
    let whole = daemon.post("/v1/responses", &ask);
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["output"][0]["content"][0]["text"], expected);
    assert_eq!(whole["usage"]["output_tokens"], 12);
    // A conversation goes on with the answer's own output.
    let turns = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Once upon a time"}]}, whole["output"][0],
        {"type": "message", "role": "user", "content": "Then"}]);
    let next = json!({"input": turns, "max_output_tokens": 3, "text": {"format": {"type": "json_object"}}});
    assert_eq!(daemon.post("/v1/responses", &next).status, 200);
    ask["stream"] = true.into();
    let stream = daemon.post("/v1/responses", &ask);
    let events: Vec<Json> = stream
        .text()
        .split("\n\n")
        .filter_map(|event| event.split_once("\ndata: "))
        .map(|(name, data)| {
            let event: Json = serde_json::from_str(data).unwrap();
            assert_eq!(event["type"].as_str(), name.strip_prefix("event: "));
            event
        })
        .collect();
    assert!(stream.whole && events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    let kind = |event: &Json| event["type"].as_str().unwrap().to_owned();
    assert_eq!(kind(&events[0]), "response.created");
    assert_eq!(kind(events.last().unwrap()), "response.incomplete");
    let pieces = events.iter().filter(|event| kind(event) == "response.output_text.delta");
    assert_eq!(pieces.map(|event| event["delta"].as_str().unwrap()).collect::<String>(), expected);
    assert_eq!(events.last().unwrap()["response"]["output"][0]["content"][0]["text"], expected);
    for (field, value) in [
        ("conversation", json!("conv_1")),
        ("include", json!(["message.output_text.logprobs"])),
        ("truncation", json!("auto")),
        ("background", json!(true)),
    ] {
        let mut bad = json!({"input": "x"});
        bad[field] = value;
        let answer = daemon.post("/v1/responses", &bad);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
    }
}

/// Arguments passed through 64-bit floats: an account's number of 30 digits came out as another.
#[test]
fn the_arguments_of_a_call_are_the_text_that_the_model_wrote() {
    for arguments in [
        r#"{"account": 123456789012345678901234567890, "sum": 0.1000000000000000055511151231257827}"#,
        r#"{"least":1E-400,"most":1e400, "same": 1.0, "name": "Jos\u00e9"}"#,
        "{}",
    ] {
        // As it said it, and as it is told of it in the next turn.
        let callable = vec![Callable { name: "pay".into(), arguments: json!({}) }];
        let reading = Reading { calls: Some((CallFormat::told(), callable)), ..Reading::default() };
        let mut reader = Reader::new(&reading.into());
        let parts = reader.push(&FunctionCall::said("pay", arguments));
        assert_eq!(parts, [Part::Call("pay".into()), Part::Arguments(arguments.into())]);
        assert_eq!(reader.end(), []);
        let call = FunctionCall { name: "pay".into(), arguments: arguments.into() };
        assert_eq!(call.json("1")["function"]["arguments"], arguments);
    }
}

fn embedded(daemon: &Daemon, input: Json) -> Vec<Vec<f32>> {
    let answer = daemon.post("/v1/embeddings", &json!({"input": input}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let vectors = answer.json()["data"].as_array().unwrap().clone();
    vectors
        .iter()
        .map(|v| v["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect())
        .collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn a_texts_vector_has_length_1_and_is_nearer_to_that_of_its_like() {
    let daemon = Daemon::start(&[]);
    let texts =
        ["The cat sat on the mat.", "A cat was sitting on a mat.", "Two hundred and forty soldiers marched to war."];
    let vectors = embedded(&daemon, json!(texts));
    assert!(vectors.iter().all(|v| v.len() == vectors[0].len() && (cosine(v, v) - 1.0).abs() < 1e-4));
    let (near, far) = (cosine(&vectors[0], &vectors[1]), cosine(&vectors[0], &vectors[2]));
    assert!(near > far, "{near} and {far}");
    // The same whether alone or with others, as a text or as its tokens, and in the form that openai's package asks for.
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(&embedded(&daemon, json!(texts[0]))[0], &vectors[0]));
    let tokens = daemon.post("/tokenize", &json!({"content": texts[0], "add_special": true})).json()["tokens"].clone();
    assert!(close(&embedded(&daemon, tokens)[0], &vectors[0]));
    let packed = daemon.post("/v1/embeddings", &json!({"input": texts[0], "encoding_format": "base64"})).json();
    let length = packed["data"][0]["embedding"].as_str().unwrap().len();
    assert_eq!(length, (4 * vectors[0].len()).div_ceil(3) * 4);
    // A long text runs in chunks beside an answer, whose text it does not change.
    let story = json!({"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    let alone = daemon.post("/v1/completions", &story).json()["choices"][0]["text"].clone();
    let long = "The king went into the wood. ".repeat(30);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| daemon.post("/v1/completions", &story).json()["choices"][0]["text"].clone());
        assert_eq!(embedded(&daemon, json!(long))[0].len(), vectors[0].len());
        assert_eq!(running.join().unwrap(), alone);
    });
    for (field, value) in [("dimensions", json!(7)), ("encoding_format", json!("hex")), ("input", json!({}))] {
        let mut bad = json!({"input": "x"});
        bad[field] = value;
        let answer = daemon.post("/v1/embeddings", &bad);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
    }
}

/// One request could ask for hours of work: 256 texts as long as the context.
#[test]
fn the_texts_of_a_request_for_embeddings_have_a_limit_together() {
    let daemon = Daemon::start(&[]);
    let texts = |last: usize| {
        let mut texts = vec![vec![5; 511]; 128];
        texts.push(vec![5; last]);
        texts
    };
    // So many dimensions are refused once the texts are accepted, before any of them runs.
    let ask = |last: usize| daemon.post("/v1/embeddings", &json!({"input": texts(last), "dimensions": 7}));
    let answer = ask(129);
    let error = &answer.json()["error"];
    let limits = ["65537 tokens", "65536"].map(|number| error["message"].as_str().unwrap().contains(number));
    assert_eq!((answer.status, &error["param"], limits), (400, &json!("input"), [true; 2]), "{error}");
    let answer = ask(128);
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("dimensions")));
}

/// A load ended the engine under requests that had waited for minutes.
#[test]
fn embeddings_under_way_end_before_another_model_takes_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &[]);
    let ask = json!({"input": vec![vec![5; 511]; 6]}).to_string();
    let begin = || {
        let mut busy = daemon.connect();
        busy.write_all(&request("POST", "/v1/embeddings", &ask)).unwrap();
        daemon.until("dynamicinfer_num_requests_embedding", 1.0);
        busy
    };
    let mut busy = begin();
    let loaded = daemon.post("/v1/x/models/load", &json!({"model": "demo"}));
    assert_eq!(loaded.status, 200, "{}", loaded.text());
    let answer = read_answer(&mut busy);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["data"].as_array().unwrap().len(), 6);
    // Who takes the model away does not wait, and its requests hear so.
    let mut busy = begin();
    assert_eq!(daemon.call("POST", "/v1/x/models/unload", "").status, 200);
    let answer = read_answer(&mut busy);
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("model_stopped")));
    daemon.until("dynamicinfer_num_requests_embedding", 0.0);
}

/// A device has no part in it, and what lies there for others stays.
#[test]
fn a_vector_is_the_same_beside_a_device() {
    let daemon = Daemon::start(&["--predictor", "dense"]);
    let divided =
        Daemon::start(&["--device", "virtual", "--ffn-share", "0.25", "--policy", "static", "--predictor", "dense"]);
    let text = json!("The cat sat on the mat, and the dog lay in the yard.");
    let [alone, beside] = [&daemon, &divided].map(|daemon| embedded(daemon, text.clone()).remove(0));
    assert_eq!(alone, beside);
}
