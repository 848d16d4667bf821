//! ollama's API: what its clients send, what they get, and what they send back.

use crate::daemon::{Answer, Daemon, forecast};
use crate::native::TEMPLATE;
use crate::templates::serve;
use serde_json::{Value as Json, json};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn weather() -> Json {
    json!({"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": forecast()}})
}

fn clock() -> Json {
    json!({"type": "function", "function": {"name": "clock"}})
}

fn user(text: impl Into<Json>) -> Json {
    json!({"role": "user", "content": text.into()})
}

fn with(mut ask: Json, more: Json) -> Json {
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

fn options(num_predict: u64) -> Json {
    json!({"temperature": 0, "num_predict": num_predict})
}

fn whole(daemon: &Daemon, path: &str, ask: &Json) -> Json {
    let answer = daemon.post(path, &with(ask.clone(), json!({"stream": false})));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.headers.contains("content-type: application/json"), "{}", answer.headers);
    answer.json()
}

fn lines(stream: &Answer) -> Vec<Json> {
    assert!(stream.status == 200 && stream.whole, "{}", stream.text());
    assert!(stream.headers.contains("content-type: application/x-ndjson"), "{}", stream.headers);
    stream.text().lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// Checks what the last line says of the answer, and takes away what differs from one time to the next.
fn timeless(mut last: Json) -> Json {
    assert_eq!(last["done"], true, "{last}");
    let fields = last.as_object_mut().unwrap();
    let created = fields.remove("created_at").unwrap();
    let created = created.as_str().unwrap();
    assert!(created.len() == 20 && created.ends_with('Z') && created.as_bytes()[10] == b'T', "{created}");
    let [total, load, prompt, eval] = ["total", "load", "prompt_eval", "eval"]
        .map(|name| fields.remove(&format!("{name}_duration")).unwrap().as_u64().unwrap());
    assert!(total == load + prompt + eval && prompt > 0, "{total} {load} {prompt} {eval}");
    for call in last.pointer_mut("/message/tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
        call.as_object_mut().unwrap().remove("id");
    }
    last
}

/// Streams a request, which is what happens where it does not say. The pieces together are the whole answer, which is returned.
fn streamed(daemon: &Daemon, path: &str, ask: &Json) -> Json {
    let mut whole = timeless(whole(daemon, path, ask));
    let lines = lines(&daemon.post(path, ask));
    let (last, pieces) = lines.split_last().unwrap();
    let mut made = timeless(last.clone());
    let empty = if path == CHAT { &last["message"]["content"] } else { &last["response"] };
    assert_eq!(empty, "", "{last}");
    let (mut text, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
    for piece in pieces {
        assert_eq!((&piece["done"], &piece["model"]), (&json!(false), &whole["model"]), "{piece}");
        let message = if path == CHAT { &piece["message"] } else { piece };
        text += message["content"].as_str().or(message["response"].as_str()).unwrap();
        thoughts += message["thinking"].as_str().unwrap_or_default();
        calls.extend(message["tool_calls"].as_array().cloned().unwrap_or_default());
    }
    calls.iter_mut().for_each(|call| _ = call.as_object_mut().unwrap().remove("id").expect("an id"));
    let message = if path == CHAT { &mut made["message"] } else { &mut made };
    message[if path == CHAT { "content" } else { "response" }] = text.into();
    for (field, value) in [("thinking", json!(thoughts)), ("tool_calls", json!(calls))] {
        if value != "" && value != json!([]) {
            message[field] = value;
        }
    }
    assert_eq!(made, whole);
    whole["pieces"] = pieces.len().into();
    whole
}

/// That the prompt of a request is this text.
fn is_told(daemon: &Daemon, ask: &Json, text: &str) {
    let tokens = daemon.post("/tokenize", &json!({"content": text, "parse_special": true})).json();
    let answer = whole(daemon, CHAT, &with(ask.clone(), json!({"options": options(1)})));
    assert_eq!(answer["prompt_eval_count"], tokens["count"], "{text}");
}

#[test]
fn an_answer_is_the_same_as_in_openais_api_whole_and_in_lines() {
    let daemon = Daemon::start(&[]);
    let messages = json!([{"role": "system", "content": "Tell a story."}, user("Once upon a time")]);
    let chat = json!({"messages": messages, "max_tokens": 24, "temperature": 0});
    let chat = daemon.post("/v1/chat/completions", &chat).json();
    let text = &chat["choices"][0]["message"]["content"];
    for model in ["demo", "demo:latest", ""] {
        let ask = json!({"model": model, "messages": messages, "options": options(24), "keep_alive": "5m"});
        let answer = streamed(&daemon, CHAT, &ask);
        assert_eq!(answer["message"], json!({"role": "assistant", "content": text}));
        assert!(answer["pieces"].as_u64().unwrap() > 3, "{answer}");
        assert_eq!(
            (&answer["done_reason"], &answer["eval_count"], &answer["prompt_eval_count"], &answer["model"]),
            (&json!("length"), &json!(24), &chat["usage"]["prompt_tokens"], &json!("demo"))
        );
    }
    let ask = json!({"prompt": "Once upon a time", "system": "Tell a story.", "options": options(24)});
    assert_eq!(&streamed(&daemon, GENERATE, &ask)["response"], text);
    // A raw prompt is continued.
    let plain = daemon
        .post("/v1/completions", &json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}))
        .json();
    let ask = json!({"prompt": "Once upon a time", "raw": true, "options": options(24)});
    let answer = streamed(&daemon, GENERATE, &ask);
    assert_eq!(answer["response"], plain["choices"][0]["text"]);
    assert_eq!(answer["prompt_eval_count"], plain["usage"]["prompt_tokens"]);
    // A stop ends it; a seed makes it again what it was; limits of 0 or less are none.
    let said = answer["response"].as_str().unwrap();
    let stop = &said[9..14];
    let stopped = with(ask.clone(), json!({"options": {"temperature": 0, "num_predict": 24, "stop": [stop]}}));
    let answer = streamed(&daemon, GENERATE, &stopped);
    assert_eq!(
        (answer["response"].as_str(), &answer["done_reason"]),
        (Some(&said[..said.find(stop).unwrap()]), &json!("stop"))
    );
    let seeded = with(
        ask,
        json!({"options": {
        "temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "seed": 7, "num_predict": 16, "num_ctx": 512, "repeat_last_n": 64, "mirostat": 0,
        "mirostat_tau": 5.0, "tfs_z": 1, "typical_p": 1.0, "num_keep": 4, "num_gpu": 99, "num_thread": 4, "use_mmap": true}}),
    );
    streamed(&daemon, GENERATE, &seeded);
    let endless =
        json!({"prompt": "Once", "raw": true, "options": {"num_predict": -1, "temperature": 0, "stop": ["."]}});
    assert!(whole(&daemon, GENERATE, &endless)["eval_count"].as_u64().unwrap() > 1);
    // Nothing asked: the model is loaded.
    for (path, ask) in [
        (CHAT, json!({"model": "demo"})),
        (CHAT, json!({"messages": []})),
        (GENERATE, json!({"model": "demo", "prompt": "", "keep_alive": 0})),
    ] {
        let answer = daemon.post(path, &ask);
        let answer = answer.json();
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("load")), "{answer}");
    }
}

#[test]
fn calls_have_objects_as_arguments_and_results_go_back_in() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let tools = json!([weather(), clock()]);
    is_told(
        &daemon,
        &json!({"messages": [user("Rain?")], "tools": tools}),
        "Tweather:[\"place\", \"days\"]\nTclock:[]\nuser: Rain?<end>\nassistant:",
    );
    let call = |name: &str, arguments: Json| json!({"function": {"name": name, "arguments": arguments}});
    let history = json!([
        user("Rain?"),
        {"role": "assistant", "content": "Well.", "thinking": "Hm.", "tool_calls": [call("weather", json!({"place": "Rome"})), call("clock", json!({}))]},
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "sun", "tool_name": "weather"}]);
    is_told(
        &daemon,
        &json!({"messages": history}),
        "user: Rain?<end>\nassistant: <think>Hm.</think> Well.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":\"Rome\"}}\n</tool_call><tool_call>\n\
         {\"name\": \"clock\", \"arguments\": {}}\n</tool_call><end>\n<tool_response>noon</tool_response>\n\
         <tool_response>sun</tool_response>\nassistant:",
    );
}

/// Calls without being told to: the template begins one, and its answers are nothing else.
const CALLS: &str = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for call in m.tool_calls or [] %}{\"name\": \"{{ call.function.name }}\", \"parameters\": {{ call.function.arguments | tojson }}}{% endfor %}\n{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}";

#[test]
fn a_call_is_a_line_of_its_own_once_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), CALLS);
    // A format that an answer without a call would have is JSON, so that sooner or later one begins as a call does.
    let ask = |i: u64| {
        json!({"messages": [user(format!("Rain {i}?"))], "tools": [weather(), clock()], "options": options(200),
            "format": {"type": "integer"}})
    };
    let called = |ask: &Json| whole(&daemon, CHAT, ask)["message"]["tool_calls"].is_array();
    let ask = (0..80).map(ask).find(called).expect("an answer that is a call");
    let answer = streamed(&daemon, CHAT, &ask);
    let call = &answer["message"]["tool_calls"][0]["function"];
    assert!(
        call["arguments"].is_object() && ["weather", "clock"].contains(&call["name"].as_str().unwrap()),
        "{answer}"
    );
    assert_eq!((&call["index"], &answer["message"]["content"]), (&json!(0), &json!("")), "{answer}");
    let back = json!({"messages": [user("Rain?"), answer["message"], {"role": "tool", "content": "sun", "tool_name": call["name"]}], "options": options(3)});
    assert_eq!(whole(&daemon, CHAT, &back)["eval_count"], 3);
    // Half of a call is none.
    let cut = with(ask, json!({"options": options(4)}));
    let answer = streamed(&daemon, CHAT, &cut);
    assert_eq!((&answer["done_reason"], &answer["message"]["tool_calls"]), (&json!("length"), &Json::Null), "{answer}");
}

#[test]
fn thoughts_come_apart_and_think_tells_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path(), TEMPLATE);
    let ask = |more: Json| with(json!({"messages": [user("Hi")], "options": options(12)}), more);
    let plain = "user: Hi<end>\nassistant:";
    is_told(&daemon, &ask(json!({})), plain);
    is_told(&daemon, &ask(json!({"think": false})), plain);
    is_told(&daemon, &ask(json!({"think": true})), &format!("{plain}<think>\n"));
    is_told(&daemon, &ask(json!({"think": "high"})), "user: Hi<end>\nEffort high. assistant:");
    let answer = streamed(&daemon, CHAT, &ask(json!({"think": true})));
    assert!(
        !answer["message"]["thinking"].as_str().unwrap().is_empty() && answer["message"]["content"] == "",
        "{answer}"
    );
    let answer = streamed(&daemon, GENERATE, &json!({"prompt": "Hi", "think": true, "options": options(12)}));
    assert!(!answer["thinking"].as_str().unwrap().is_empty() && answer["response"] == "", "{answer}");
    let shown = daemon.post("/api/show", &json!({"model": "model"})).json();
    assert_eq!(
        (&shown["capabilities"], shown["template"].as_str()),
        (&json!(["completion", "tools", "thinking"]), Some(TEMPLATE))
    );
}

#[test]
fn an_answer_has_the_format_that_is_asked_for() {
    let daemon = Daemon::start(&[]);
    let schema = json!({"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"], "additionalProperties": false});
    let read = |answer: &Json| -> Json {
        let text = answer["message"]["content"].as_str().or(answer["response"].as_str()).unwrap();
        serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {answer}"))
    };
    let ask = json!({"messages": [user("Where?")], "options": options(60), "format": schema});
    assert!(["Rome", "Oslo"].contains(&read(&streamed(&daemon, CHAT, &ask))["place"].as_str().unwrap()));
    let ask = json!({"prompt": "Where?", "options": options(60), "format": schema});
    assert!(["Rome", "Oslo"].contains(&read(&streamed(&daemon, GENERATE, &ask))["place"].as_str().unwrap()));
    let json = (0..20).map(|seed| {
        let options = json!({"temperature": 1, "seed": seed, "num_predict": 200});
        whole(&daemon, CHAT, &json!({"messages": [user("JSON")], "format": "json", "options": options}))
    });
    assert!(json.filter(|answer| answer["done_reason"] == "stop").all(|answer| read(&answer).is_object()));
    let odd = json!({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true});
    let answer = daemon.post(CHAT, &json!({"messages": [user("x")], "options": options(9), "format": odd}));
    assert!(answer.headers.contains("x-dynamicinfer-unenforced: /format/uniqueitems"), "{}", answer.headers);
    assert_eq!(daemon.post(CHAT, &json!({"messages": [user("x")], "format": ""})).status, 200);
}

#[test]
fn the_loaded_model_is_listed_and_described() {
    let daemon = Daemon::start(&["--device", "virtual", "--ffn-share", "0.5", "--no-history"]);
    let card = daemon.get("/v1/models")["data"][0].clone();
    let tags = daemon.get("/api/tags");
    let [model] = &tags["models"].as_array().unwrap()[..] else { panic!("{tags}") };
    assert_eq!(
        (&model["name"], &model["model"], &model["digest"]),
        (&json!("demo"), &json!("demo"), &card["fingerprint"])
    );
    assert!(
        model["size"].as_u64().unwrap() > 1 << 20 && model["modified_at"].as_str().unwrap().ends_with('Z'),
        "{model}"
    );
    let loaded = daemon.get("/api/ps")["models"][0].clone();
    let ps = daemon.get("/v1/x/ps")["models"][0].clone();
    let bytes = ps["model_bytes"].as_u64().unwrap() + ps["kv_bytes"].as_u64().unwrap();
    assert_eq!((loaded["size"].as_u64(), &loaded["context_length"]), (Some(bytes), &card["context_length"]));
    assert_eq!(loaded["size_vram"], daemon.get("/v1/x/budget")["vram_used_bytes"]);
    for ask in [json!({"model": "demo"}), json!({"name": "demo:latest", "verbose": true}), json!({})] {
        let shown = daemon.post("/api/show", &ask).json();
        let family = shown["details"]["family"].as_str().unwrap();
        assert_eq!(shown["model_info"]["general.architecture"], family);
        assert_eq!(shown["model_info"][format!("{family}.context_length")], card["context_length"]);
        assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
        assert!(shown["parameters"].as_str().unwrap().contains("top_k"), "{shown}");
    }
    assert_eq!(daemon.get("/api/version")["version"], env!("CARGO_PKG_VERSION"));
    daemon.post("/v1/x/models/unload", &json!({}));
    assert_eq!((daemon.get("/api/tags"), daemon.get("/api/ps")), (json!({"models": []}), json!({"models": []})));
}

#[test]
fn vectors_are_those_of_openais_api() {
    let daemon = Daemon::start(&[]);
    let openai = daemon.post("/v1/embeddings", &json!({"input": ["a king", "a tree"]})).json();
    let vector = |i: usize| openai["data"][i]["embedding"].clone();
    let both = daemon.post(
        "/api/embed",
        &json!({"model": "demo", "input": ["a king", "a tree"], "truncate": true, "options": {"num_ctx": 512}}),
    );
    let both = both.json();
    assert_eq!(both["embeddings"], json!([vector(0), vector(1)]));
    assert_eq!(both["prompt_eval_count"], openai["usage"]["prompt_tokens"]);
    assert!(both["total_duration"].as_u64().unwrap() > 0);
    assert_eq!(daemon.post("/api/embed", &json!({"input": "a king"})).json()["embeddings"], json!([vector(0)]));
    let old = daemon.post("/api/embeddings", &json!({"model": "demo", "prompt": "a tree", "keep_alive": 300}));
    assert_eq!(old.json(), json!({"embedding": vector(1)}));
}

#[test]
fn what_cannot_be_is_refused_by_name_in_ollamas_form() {
    let daemon = Daemon::start(&[]);
    let chat: Vec<(&str, Json, &str)> = vec![
        ("model", json!("llama3"), "model: the model 'llama3' is not loaded"),
        ("messages", json!("x"), "messages: invalid request"),
        ("messages", json!([{"role": "robot", "content": "x"}]), "messages.0.role: unknown role 'robot'"),
        ("messages", json!([{"role": "user"}]), "messages.0.content: the content is missing"),
        (
            "messages",
            json!([{"role": "user", "content": "x", "images": ["aGk="]}]),
            "messages.0.images: images cannot be read",
        ),
        (
            "messages",
            json!([{"role": "user", "content": "x", "thinking": "y"}]),
            "messages.0.thinking: only the assistant",
        ),
        (
            "messages",
            json!([{"role": "tool", "content": "x", "tool_name": "f"}]),
            "messages.0.tool_name: there is no call of 'f'",
        ),
        (
            "messages",
            json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a b"}}]}]),
            "messages.0.tool_calls.0.function.name: 'a b'",
        ),
        ("messages", json!([user("x ".repeat(3000))]), "messages: the prompt has"),
        ("messages", json!([{"role": "user", "content": "x", "mood": 1}]), "messages[0].mood: unknown field 'mood'"),
        ("tools", json!([{"type": "web_search"}]), "tools"),
        ("tools", json!([{"type": "function", "function": {"name": "f g"}}]), "tools.0.function.name: 'f g'"),
        ("format", json!("xml"), "format must be json"),
        ("format", json!({"type": "strnig"}), "format: this schema cannot be enforced"),
        ("think", json!(5), "think must be"),
        ("logprobs", json!(true), "logprobs: "),
        ("top_logprobs", json!(3), "top_logprobs: "),
        ("truncate", json!(true), "truncate: "),
        ("shift", json!(true), "shift: "),
        ("option", json!({}), "option: unknown field 'option'; did you mean 'options'?"),
        ("options", json!({"temperature": -1}), "options.temperature: temperature is -1"),
        ("options", json!({"top_p": 2}), "options.top_p: top_p"),
        ("options", json!({"num_predict": "x"}), "options.num_predict: invalid request"),
        ("options", json!({"stop": [""]}), "options.stop: a stop string is empty"),
        ("options", json!({"num_ctx": 100_000}), "options.num_ctx: num_ctx is 100000"),
        ("options", json!({"mirostat": 2}), "options.mirostat: mirostat is not supported"),
        ("options", json!({"tfs_z": 0.5}), "options.tfs_z: "),
        ("options", json!({"typical_p": 0.5}), "options.typical_p: "),
        ("options", json!({"repeat_last_n": -1}), "options.repeat_last_n: "),
        ("options", json!({"penalize_newline": false}), "options.penalize_newline: "),
        ("options", json!({"mood": 1}), "options.mood: unknown field 'mood'"),
    ];
    let generate: Vec<(&str, Json, &str)> = vec![
        ("suffix", json!("x"), "suffix: this model has no FIM tokens"),
        ("images", json!(["aGk="]), "images cannot be read"),
        ("template", json!("{{ .Prompt }}"), "template: "),
        ("context", json!([1, 2]), "context: "),
        ("prompt", json!("x ".repeat(3000)), "prompt: the prompt has"),
        ("messages", json!([]), "messages: unknown field 'messages'"),
        ("model", json!("llama3"), "model: the model 'llama3' is not loaded"),
    ];
    let checked = |path: &str, mut ask: Json, field: &str, value: Json, begins: &str| {
        ask[field] = value;
        let answer = daemon.post(path, &ask);
        assert_eq!(answer.status, if field == "model" { 404 } else { 400 }, "{begins}: {}", answer.text());
        let answer = answer.json();
        let said = answer["error"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(said.starts_with(begins) && said.len() < 600, "{begins}: {said}");
        assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
    };
    for (field, value, begins) in chat {
        checked(CHAT, json!({"messages": [user("Once")], "options": {"num_predict": 1}}), field, value, begins);
    }
    for (field, value, begins) in generate {
        checked(GENERATE, json!({"prompt": "Once", "options": {"num_predict": 1}}), field, value, begins);
    }
    checked(GENERATE, json!({"prompt": "Once", "raw": true}), "system", json!("x"), "system: with raw");
    checked("/api/embed", json!({"model": "demo"}), "input", Json::Null, "input: the input is missing");
    checked("/api/embed", json!({"input": "x"}), "dimensions", json!(3), "dimensions is 3");
    checked("/api/embed", json!({"input": "x"}), "model", json!("llama3"), "model: ");
    checked("/api/embeddings", json!({"model": "demo"}), "prompt", Json::Null, "prompt: the input is missing");
    checked("/api/show", json!({}), "model", json!("llama3"), "model: ");
    checked("/api/show", json!({}), "nmae", json!("x"), "nmae: unknown field 'nmae'; did you mean 'name'?");
    for (method, path, status) in [("POST", "/api/pull", 404), ("GET", CHAT, 405), ("POST", "/api", 404)] {
        let answer = daemon.call(method, path, "{}");
        assert!(answer.status == status && answer.json()["error"].is_string(), "{path}: {}", answer.text());
    }
}

#[test]
fn limits_hold_as_for_a_chat() {
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DYNAMICINFER_SERVE_BODY_BYTES", "100000"), ("DYNAMICINFER_SERVE_UNKNOWN_FIELDS", "ignore")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &environment);
    daemon.wait_for("is ready");
    let large = "x".repeat(200_000);
    let deep = (0..200).fold(json!(1), |inner, _| json!({"x": inner}));
    for (path, field) in [
        (CHAT, "format"),
        (GENERATE, "format"),
        ("/api/embed", "options"),
        ("/api/embeddings", "options"),
        ("/api/show", "verbose"),
    ] {
        let answer = daemon.post(path, &json!({"prompt": large}));
        assert!(answer.status == 413 && answer.json()["error"].is_string(), "{path}: {}", answer.text());
        let answer = daemon.post(path, &json!({field: deep}));
        assert!(answer.status == 400 && answer.json()["error"].is_string(), "{path}: {}", answer.text());
    }
    // What cannot be kept to is ignored as unknown fields are, and logged once.
    let ask = json!({"prompt": "Once", "options": {"num_ctx": 100_000, "num_predict": 2, "mood": 1}, "colour": "red"});
    for _ in 0..2 {
        assert_eq!(whole(&daemon, GENERATE, &ask)["eval_count"], 2);
    }
    daemon.post("/api/show", &json!({"shape": 1}));
    let mut logged = Vec::new();
    while !logged.iter().any(|line: &String| line.contains("\"shape\"")) {
        logged.push(daemon.next_line().unwrap());
    }
    let ignored: Vec<&String> = logged.iter().filter(|line| line.contains("an unknown field is ignored")).collect();
    for field in ["\"options.num_ctx\"", "\"options.mood\"", "\"colour\""] {
        assert_eq!(ignored.iter().filter(|line| line.contains(field)).count(), 1, "{field}: {logged:?}");
    }
    daemon.post("/v1/x/models/unload", &json!({}));
    let answer = daemon.post(CHAT, &json!({"messages": [user("x")]}));
    assert!(answer.status == 503 && answer.json()["error"].is_string(), "{}", answer.text());
}
