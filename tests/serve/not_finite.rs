//! A model with numbers that are none: a daemon answered from it, with embeddings of nulls and texts of "!!!!".

use crate::daemon::{Answer, Daemon, PATIENCE, command, read_all, request};
use crate::damaged::store_with;
use dynamicinfer::model::Model;
use dynamicinfer::tokenizer::{Special, Tokenizer, from_hf_dir};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};

const GOOD: &str = "once";
const BAD: &str = "zZz";

/// A model whose embeddings of [`BAD`]'s tokens, but for those of [`GOOD`]'s, are NaN.
fn damaged(dir: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama");
    let store = dir.join("good.neurons");
    let pack = ["pack", from.to_str().unwrap(), "-o", store.to_str().unwrap(), "--quant", "f32"];
    assert!(command(dir, &pack).output().unwrap().status.success());
    let tokenizer = Tokenizer::new(from_hf_dir(&from).unwrap(), &from).unwrap();
    let tokens = |text: &str| tokenizer.encode_prompt(text, Special::AsText).unwrap();
    let good = tokens(GOOD);
    let bad: Vec<u32> = tokens(BAD).into_iter().filter(|token| !good.contains(token)).collect();
    assert!(!bad.is_empty());
    let hidden = Model::open(&store).unwrap().config.hidden;
    let places: Vec<(usize, f32)> = bad.iter().map(|&token| (token as usize * hidden, f32::NAN)).collect();
    store_with(dir, &store, "embed", &places)
}

/// Every endpoint that answers from the model: 500 with the reason and without the folder that the model is in, at the socket and over TCP;
/// and what needs nothing of the damage is answered before and after.
#[test]
fn no_endpoint_answers_from_numbers_that_are_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let model = damaged(dir.path());
    let mut daemon =
        Daemon::spawn(dir.path(), &["serve", model.to_str().unwrap(), "--listen", "127.0.0.1:0", "-c", "64"], &[]);
    let (address, token) = daemon.port();
    daemon.wait_for("is ready");
    let over_tcp = |path: &str, body: &Json| -> Answer {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let text = String::from_utf8(request("POST", path, &body.to_string())).unwrap();
        let with_token = text.replacen("\r\n", &format!("\r\nAuthorization: Bearer {token}\r\n"), 1);
        stream.write_all(with_token.as_bytes()).unwrap();
        read_all(&mut stream)
    };
    let good = || {
        let answer = daemon.post("/v1/completions", &json!({"prompt": GOOD, "max_tokens": 1, "temperature": 0}));
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    good();
    let (prompt, chat) = (json!({"prompt": BAD}), json!({"messages": [{"role": "user", "content": BAD}]}));
    let asks: Vec<(&str, Json)> = vec![
        ("/v1/completions", prompt.clone()),
        ("/v1/chat/completions", chat.clone()),
        ("/v1/responses", json!({"input": BAD})),
        ("/v1/embeddings", json!({"input": BAD})),
        ("/v1/messages", json!({"messages": chat["messages"], "max_tokens": 9})),
        ("/api/chat", chat.clone()),
        ("/api/generate", prompt.clone()),
        ("/api/embed", json!({"input": BAD})),
        ("/api/embeddings", prompt.clone()),
    ];
    // What computes nothing of the model's numbers; this model has no tokens for filling in.
    let others = ["/v1/messages/count_tokens", "/infill", "/api/show", "/tokenize", "/detokenize"];
    for (route, methods) in daemon.get("/openapi.json")["paths"].as_object().unwrap() {
        let computes = !route.starts_with("/v1/x/") && !others.contains(&route.as_str());
        let is_asked = asks.iter().any(|(path, _)| path == route);
        assert!(is_asked || !computes || methods.get("post").is_none(), "{route} is not asked; add it above");
    }
    for (path, body) in asks {
        let (mut whole, mut streamed) = (body.clone(), body);
        // Ollama's answers are streamed unless a request says otherwise.
        whole["stream"] = false.into();
        streamed["stream"] = true.into();
        let streams = !path.contains("/embed");
        if !streams {
            whole.as_object_mut().unwrap().remove("stream");
        }
        for (way, answer) in [("socket", daemon.post(path, &whole)), ("TCP", over_tcp(path, &whole))] {
            let text = answer.text();
            assert_eq!(answer.status, 500, "{path} by {way}: {text}");
            if path.starts_with("/v1/") && path != "/v1/messages" {
                assert_eq!(answer.json()["error"]["code"], "engine_failed", "{path} by {way}: {text}");
            }
            assert!(text.contains("not finite") && !text.contains("[null"), "{path} by {way}: {text}");
            assert!(!text.contains(dir.path().to_str().unwrap()), "{path} by {way}: {text}");
        }
        for (way, answer) in [("socket", daemon.post(path, &streamed)), ("TCP", over_tcp(path, &streamed))] {
            if streams {
                let text = answer.text();
                let is_whole = ["[DONE]", "message_stop", "\"done\":true"].iter().any(|end| text.contains(end));
                assert!(text.contains("not finite") && !is_whole, "{path} by {way}: {text}");
                assert!(!text.contains(dir.path().to_str().unwrap()), "{path} by {way}: {text}");
            }
        }
        good();
    }
}
