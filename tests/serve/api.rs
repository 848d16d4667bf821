//! What is answered.

use crate::daemon::Daemon;
use dynamicinfer::api::anthropic::MESSAGES_FIELDS;
use dynamicinfer::api::chat::CHAT_FIELDS;
use dynamicinfer::api::completions::COMPLETION_FIELDS;
use dynamicinfer::api::embeddings::EMBEDDING_FIELDS;
use dynamicinfer::api::infill::INFILL_FIELDS;
use dynamicinfer::api::ollama::{
    OLLAMA_CHAT_FIELDS, OLLAMA_EMBED_FIELDS, OLLAMA_EMBEDDINGS_FIELDS, OLLAMA_GENERATE_FIELDS, OLLAMA_SHOW_FIELDS,
};
use dynamicinfer::api::responses::RESPONSES_FIELDS;
use dynamicinfer::serve::ROUTES;
use serde_json::{Value as Json, json};
use std::collections::BTreeSet;

fn ask(text: &str) -> Json {
    json!({"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24})
}

fn with(mut request: Json, fields: Json) -> Json {
    fields.as_object().unwrap().iter().for_each(|(field, value)| request[field] = value.clone());
    request
}

fn content(answer: &Json) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn a_stream_says_what_a_whole_answer_says() {
    let daemon = Daemon::start(&[]);
    let whole = daemon.post("/v1/chat/completions", &ask("Once upon a time"));
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    assert!(content(&whole).len() > 20);
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let total = whole["usage"]["prompt_tokens"].as_u64().unwrap() + 24;
    assert_eq!(whole["usage"]["total_tokens"], total);

    let request = with(ask("Once upon a time"), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let stream = daemon.post("/v1/chat/completions", &request);
    assert!(stream.headers.contains("content-type: text/event-stream"));
    assert_eq!(stream.streamed(), (content(&whole).to_owned(), Some("length".into())));
    let events = stream.events();
    assert!(stream.whole && events.last().unwrap() == "[DONE]");
    let first: Json = serde_json::from_str(&events[0]).unwrap();
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let usage: Json = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(24)));
    let ends = events.iter().filter(|e| e.contains("\"finish_reason\":\"")).count();
    assert_eq!(ends, 1);

    // The second time the prompt's keys were there already.
    assert!(usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn a_stop_string_cuts_at_its_beginning_streamed_or_not() {
    let daemon = Daemon::start(&[]);
    let whole = daemon.post("/v1/chat/completions", &ask("Once upon a time")).json();
    let text = content(&whole);
    let at = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    // It begins and ends inside tokens.
    let stop: String = text[at..].chars().take(9).collect();
    let want = &text[..text.find(&stop).unwrap()];
    for stop in [json!(stop), json!(["never said", stop])] {
        let request = with(ask("Once upon a time"), json!({"stop": stop}));
        let cut = daemon.post("/v1/chat/completions", &request).json();
        assert_eq!((content(&cut), &cut["choices"][0]["finish_reason"]), (want, &json!("stop")));
        let stream = daemon.post("/v1/chat/completions", &with(request, json!({"stream": true})));
        assert_eq!(stream.streamed(), (want.to_owned(), Some("stop".into())));
    }
}

#[test]
fn the_same_seed_gives_the_same_text_and_choices_differ() {
    let daemon = Daemon::start(&["--deterministic"]);
    let request = with(ask("The king said"), json!({"temperature": 1.5, "seed": 7, "n": 3}));
    let texts = |answer: Json| -> Vec<String> {
        let text = |choice: &Json| choice["message"]["content"].as_str().unwrap().to_owned();
        answer["choices"].as_array().unwrap().iter().map(text).collect()
    };
    let first = texts(daemon.post("/v1/chat/completions", &request).json());
    assert_eq!(first.len(), 3);
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 3, "{first:?}");
    assert_eq!(texts(daemon.post("/v1/chat/completions", &request).json()), first);
    // Choice i is what seed + i gives alone.
    let alone = with(request.clone(), json!({"seed": 8, "n": 1}));
    assert_eq!(texts(daemon.post("/v1/chat/completions", &alone).json())[0], first[1]);
    let other = with(request, json!({"seed": 100}));
    assert_ne!(texts(daemon.post("/v1/chat/completions", &other).json())[0], first[0]);
}

#[test]
fn log_probabilities_are_of_the_tokens_that_were_said() {
    let daemon = Daemon::start(&[]);
    let request = with(ask("Once upon a time"), json!({"logprobs": true, "top_logprobs": 3}));
    let answer = daemon.post("/v1/chat/completions", &request).json();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 24);
    let text: String = tokens.iter().map(|t| t["token"].as_str().unwrap()).collect();
    assert_eq!(text, content(&answer));
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy takes the likeliest.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0 && top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
    }
    let stream = daemon.post("/v1/chat/completions", &with(request, json!({"stream": true})));
    let events =
        stream.events().into_iter().filter(|e| e != "[DONE]").map(|e| serde_json::from_str::<Json>(&e).unwrap());
    let streamed: Vec<Json> = events
        .flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .map(|t| t["token"].clone())
        .collect();
    assert_eq!(streamed, tokens.iter().map(|t| t["token"].clone()).collect::<Vec<_>>());
}

#[test]
fn a_json_schema_is_kept_to() {
    let daemon = Daemon::start(&[]);
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": true}});
    for seed in 0..5 {
        let request = with(
            ask("A boy of ten"),
            json!({
            "response_format": format, "temperature": 1, "seed": seed, "max_tokens": 200}),
        );
        let answer = daemon.post("/v1/chat/completions", &request).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let person: Json = serde_json::from_str(content(&answer)).unwrap();
        assert!(person["name"].as_str().unwrap().chars().count() <= 12);
        assert!((0..=99).contains(&person["age"].as_i64().unwrap()));
        assert_eq!(person.as_object().unwrap().len(), 2);
    }
}

#[test]
fn completions_continue_texts_and_tokens_alike() {
    let daemon = Daemon::start(&[]);
    let text = json!({"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "logprobs": 2});
    let answer = daemon.post("/v1/completions", &text).json();
    assert_eq!(answer["object"], "text_completion");
    let choice = &answer["choices"][0];
    let tokens = &choice["logprobs"];
    assert_eq!(tokens["tokens"].as_array().unwrap().len(), 8);
    assert_eq!(tokens["text_offset"][0], 0);
    let ids = daemon.post("/tokenize", &json!({"content": "Once upon a time", "add_special": true})).json();
    let by_tokens = with(text.clone(), json!({"prompt": ids["tokens"]}));
    assert_eq!(daemon.post("/v1/completions", &by_tokens).json()["choices"][0]["text"], choice["text"]);
    let two = with(text, json!({"prompt": ["Once upon a time", "The king"]}));
    let two = daemon.post("/v1/completions", &two).json();
    assert_eq!(two["choices"][0]["text"], choice["text"]);
    assert_eq!((two["choices"][1]["index"].as_u64(), two["choices"].as_array().unwrap().len()), (Some(1), 2));
    let back = daemon.post("/detokenize", &json!({"tokens": ids["tokens"]})).json();
    assert_eq!(back["content"], "Once upon a time");
}

/// They counted bytes, and other ones in a stream than in a whole answer.
#[test]
fn text_offsets_count_characters() {
    let daemon = Daemon::start(&[]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "é日本ok"}}});
    let request = json!({"prompt": "x", "max_tokens": 40, "logprobs": 1, "response_format": schema});
    let choice = daemon.post("/v1/completions", &request).json()["choices"][0].clone();
    assert_eq!(choice["text"], "\"é日本ok\"");
    let offsets = choice["logprobs"]["text_offset"].as_array().unwrap().clone();
    assert!(offsets.len() > 7, "characters of several tokens are among them: {offsets:?}");
    let last = choice["logprobs"]["tokens"].as_array().unwrap().iter().rposition(|token| token == "\"").unwrap();
    assert_eq!((&offsets[0], &offsets[last]), (&json!(0), &json!(6)));
    let streamed = daemon.post("/v1/completions", &with(request, json!({"stream": true})));
    let streamed: Vec<Json> = streamed
        .text()
        .lines()
        .filter_map(|line| serde_json::from_str::<Json>(line.strip_prefix("data: ")?).ok())
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, offsets);
}

#[test]
fn many_at_once_get_what_each_gets_alone() {
    let daemon = Daemon::start(&["--deterministic", "--parallel", "4"]);
    let texts = ["Once upon a time", "The king said", "In the wood", "There was a girl", "A wolf", "The sea"];
    let request = |text: &str| with(ask(text), json!({"temperature": 0.9, "seed": 3, "stream": true}));
    let alone: Vec<_> = texts.iter().map(|t| daemon.post("/v1/chat/completions", &request(t)).streamed()).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let (daemon, request) = (&daemon, &request);
        let ask = |text| scope.spawn(move || daemon.post("/v1/chat/completions", &request(text)).streamed());
        let running: Vec<_> = texts.into_iter().map(ask).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn the_second_turn_runs_only_what_is_new() {
    let daemon = Daemon::start(&["--parallel", "2"]);
    let first = daemon.post("/v1/chat/completions", &ask("Once upon a time there was a little girl")).json();
    let messages = json!([
        {"role": "user", "content": "Once upon a time there was a little girl"},
        {"role": "assistant", "content": content(&first)},
        {"role": "user", "content": "Then she said"},
    ]);
    let second = daemon.post("/v1/chat/completions", &with(ask(""), json!({"messages": messages}))).json();
    let usage = &second["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // All of the first prompt at least; where the answer's text is cut into other tokens, some of it is run again.
    assert!(cached >= first["usage"]["prompt_tokens"].as_u64().unwrap(), "{usage}");
    assert!(cached < usage["prompt_tokens"].as_u64().unwrap());
}

/// The true activations are looked at now and then, of single answers and of several in one pass.
#[test]
fn the_predictors_recall_is_told_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    std::fs::write(&config, "[engine]\naudit = 4\n").unwrap();
    let recall = |predictor: &str| {
        let args = ["--config", config.to_str().unwrap(), "--predictor", predictor, "--parallel", "4"];
        let daemon = Daemon::start_in(dir.path(), &args);
        let four =
            with(ask("Once upon a time"), json!({"n": 4, "temperature": 1, "max_tokens": 60, "ignore_eos": true}));
        assert_eq!(daemon.post("/v1/chat/completions", &four).status, 200);
        // One pass makes four tokens.
        let (tokens, made) = (daemon.metric("dynamicinfer_audited_tokens_total"), 4.0 * 60.0);
        assert!(tokens >= made / 8.0 && tokens <= made / 3.0, "{tokens} of {made} tokens were looked at");
        let told = daemon.get("/v1/x/cache")["audit"]["recall"].as_f64().unwrap();
        let counted =
            daemon.metric("dynamicinfer_audited_found_total") / daemon.metric("dynamicinfer_audited_active_total");
        assert!((told - counted).abs() < 1e-9);
        told
    };
    assert_eq!(recall("exact"), 1.0);
    let sign = recall("sign");
    assert!(sign > 0.6 && sign < 1.0, "{sign}");
}

#[test]
fn thresholds_can_be_turned_while_it_runs() {
    let daemon = Daemon::start(&["--predictor", "sign"]);
    let before = daemon.get("/v1/x/thresholds");
    let layers = before["thresholds"].as_array().unwrap().len();
    assert!(before["thresholds"][0].is_number());
    let share = |daemon: &Daemon| {
        let count = |name: &str| daemon.metric(&format!("dynamicinfer_neurons_{name}_total"));
        let before = (count("computed"), count("all"));
        daemon.post("/v1/chat/completions", &ask("Once upon a time"));
        (count("computed") - before.0) / (count("all") - before.1)
    };
    let all = daemon.call("PUT", "/v1/x/thresholds", r#"{"threshold": 0}"#);
    assert_eq!((all.status, &all.json()["thresholds"][0]), (200, &json!(0.0)));
    let everything = share(&daemon);
    let some = daemon.call("PUT", "/v1/x/thresholds", r#"{"threshold": 0.9, "layers": {"0": 0.5}}"#).json();
    assert_eq!((&some["thresholds"][0], some["thresholds"].as_array().unwrap().len()), (&json!(0.5), layers));
    assert!(share(&daemon) < everything);
    for bad in
        [r#"{"threshold": 2}"#, r#"{"layers": {"99": 0.1}}"#, r#"{"layers": {"x": 0.1}}"#, "{}", r#"{"treshold": 1}"#]
    {
        assert_eq!(daemon.call("PUT", "/v1/x/thresholds", bad).status, 400, "{bad}");
    }
    assert_eq!(daemon.get("/v1/x/thresholds"), some);
}

#[test]
fn what_lies_on_a_device_is_told_by_layer() {
    let daemon = Daemon::start(&["--device", "virtual", "--ffn-share", "0.25", "--policy", "static"]);
    daemon.post("/v1/chat/completions", &ask("Once upon a time"));
    let cache = daemon.get("/v1/x/cache");
    let layers = cache["layers"].as_array().unwrap();
    assert!(layers.iter().any(|l| l["resident"].as_u64() > Some(0) && l["resident"] == l["slots"]));
    let hits = cache["device"]["hits"].as_u64().unwrap();
    assert!(hits > 0);
    let by_layer: u64 = layers.iter().map(|l| l["hits"].as_u64().unwrap()).sum();
    assert_eq!(by_layer, hits);
    for path in ["cpu", "device"] {
        let number = |name: &str| daemon.metric(&format!("dynamicinfer_path_{name}{{path=\"{path}\"}}"));
        assert!(number("bytes_total") > 0.0 && number("seconds_total") > 0.0, "{path}");
        assert!(number("limit_bytes_per_second") > 0.0, "{path}");
    }
    let budget = daemon.get("/v1/x/budget");
    assert_eq!(budget["vram_used_bytes"], cache["device"]["used_bytes"]);
    assert_eq!(daemon.metric("dynamicinfer_vram_budget_bytes"), budget["vram_budget_bytes"].as_f64().unwrap());
    assert_eq!(daemon.get("/v1/x/policy")["policy"], "static");
    assert_eq!(cache["device"]["migrations"], 0);
    // From now on neurons move.
    assert_eq!(daemon.call("PUT", "/v1/x/policy", r#"{"policy": "full"}"#).status, 200);
    let now = daemon.get("/v1/x/policy");
    assert_eq!((&now["policy"], now["scheduler"]["observed"].as_u64() > Some(0)), (&json!("full"), true), "{now}");
    assert_eq!(daemon.call("PUT", "/v1/x/policy", r#"{"policy": "clever"}"#).status, 400);
    for bad in ["-1", "\"8GiB\"", "1e30", "null"] {
        assert_eq!(
            daemon.call("PUT", "/v1/x/budget", &format!("{{\"vram_budget_bytes\": {bad}}}")).status,
            400,
            "{bad}"
        );
    }
}

/// With the true gates it does not matter what lies where, so neither does the budget.
#[test]
fn budgets_change_under_a_running_answer_and_its_text_does_not() {
    let daemon = Daemon::start(&[
        "--device",
        "virtual",
        "--ffn-share",
        "0.5",
        "--predictor",
        "exact",
        "--deterministic",
        "--no-history",
    ]);
    let ask = json!({"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": true});
    let alone = daemon.post("/v1/completions", &ask).json()["choices"][0]["text"].clone();
    let whole = daemon.get("/v1/x/budget")["vram_budget_bytes"].as_u64().unwrap();
    let (mut changes, mut share) = (0, 0);
    let daemon = &daemon;
    let together = std::thread::scope(|scope| {
        let running = scope.spawn(|| daemon.post("/v1/completions", &ask).json()["choices"][0]["text"].clone());
        while !running.is_finished() {
            share = (share + 37) % 60;
            let asked = whole * (100 - share) / 100;
            let answer = daemon.call("PUT", "/v1/x/budget", &json!({"vram_budget_bytes": asked}).to_string());
            if answer.status == 200 {
                let budget = answer.json();
                assert_eq!(budget["vram_budget_bytes"], asked);
                assert!(budget["vram_used_bytes"].as_u64().unwrap() <= asked, "{budget}");
                changes += 1;
            }
        }
        running.join().unwrap()
    });
    assert!(changes >= 5, "{changes} changes");
    assert_eq!(together, alone);
}

#[test]
fn the_document_lists_every_route_and_every_field() {
    let document: Json = serde_json::from_str(include_str!("../../src/serve/openapi.json")).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let documented: BTreeSet<(String, String)> = paths
        .iter()
        .flat_map(|(path, methods)| methods.as_object().unwrap().keys().map(move |m| (path.clone(), m.clone())))
        .collect();
    let routes =
        ROUTES.iter().flat_map(|(path, methods)| methods.iter().map(|m| ((*path).to_owned(), (*m).to_owned())));
    assert_eq!(documented, routes.collect());
    let schemas = [
        ("ChatRequest", CHAT_FIELDS),
        ("CompletionRequest", COMPLETION_FIELDS),
        ("InfillRequest", INFILL_FIELDS),
        ("ResponsesRequest", RESPONSES_FIELDS),
        ("EmbeddingRequest", EMBEDDING_FIELDS),
        ("MessagesRequest", MESSAGES_FIELDS),
        ("OllamaChatRequest", OLLAMA_CHAT_FIELDS),
        ("OllamaGenerateRequest", OLLAMA_GENERATE_FIELDS),
        ("OllamaEmbedRequest", OLLAMA_EMBED_FIELDS),
        ("OllamaEmbeddingsRequest", OLLAMA_EMBEDDINGS_FIELDS),
        ("OllamaShowRequest", OLLAMA_SHOW_FIELDS),
    ];
    for (schema, fields) in schemas {
        let documented = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        assert!(documented.keys().map(String::as_str).eq(fields.iter().copied()), "{schema}");
    }
    // And the routes are those that answer: none is 404, and a method that is not listed is 405 with what is.
    let daemon = Daemon::start(&[]);
    for (path, methods) in ROUTES.iter().filter(|(path, _)| !path.ends_with("/unload")) {
        let at = path.replace("{model}", "demo").replace("{id}", "none");
        for method in *methods {
            let answer = daemon.call(&method.to_uppercase(), &at, if *method == "get" { "" } else { "{}" });
            let is_known = answer.status != 404 || answer.json()["error"]["code"] == "response_not_found";
            assert!(is_known && answer.status != 405, "{method} {path}: {}", answer.status);
        }
        let answer = daemon.call("PATCH", &at, "");
        assert_eq!(answer.status, 405, "{path}");
        let allow = answer.headers.lines().find_map(|line| line.strip_prefix("allow: ")).unwrap().to_owned();
        assert!(methods.iter().all(|m| allow.contains(m)), "{path}: {allow}");
        let error = answer.json()["error"].clone();
        match path.starts_with("/api/") {
            true => assert!(error.is_string(), "{path}: {error}"),
            false => assert_eq!(error["type"], "invalid_request_error", "{path}"),
        }
    }
    assert_eq!(daemon.get("/openapi.json"), document);
}

#[test]
fn the_log_tells_each_request_by_its_id_and_what_was_changed_from_outside() {
    let dir = tempfile::tempdir().unwrap();
    let device = ["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc", "--predictor", "mlp"];
    let args = [&["serve", "demo", "--no-history"], &device[..]].concat();
    let mut daemon = Daemon::spawn(dir.path(), &args, &[("DYNAMICINFER_LOG", "dynamicinfer=debug")]);
    daemon.wait_for("is ready");
    let body = json!({"prompt": "Once", "max_tokens": 3, "ignore_eos": true}).to_string();
    let named = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: mine-7\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    assert_eq!(daemon.raw(named.as_bytes()).status, 200);
    let slot = daemon.wait_for("has a slot");
    assert!(slot.contains("request{id=\"mine-7\" client=") && slot.contains(" model=\"demo\"}"), "{slot}");
    let answered = daemon.wait_for("answered");
    assert!(answered.contains("mine-7") && answered.contains(" generated=3 "), "{answered}");
    assert_eq!(daemon.call("PUT", "/v1/x/policy", r#"{"policy": "lru"}"#).status, 200);
    daemon.wait_for("policy before=\"full\" after=\"lru\"");
    assert_eq!(daemon.call("PUT", "/v1/x/thresholds", r#"{"threshold": 0.25}"#).status, 200);
    daemon.wait_for("after=0.25");
    assert_eq!(daemon.call("PUT", "/v1/x/budget", r#"{"vram_budget_bytes": 9437184}"#).status, 200);
    daemon.wait_for("bytes_after=9437184");
}
