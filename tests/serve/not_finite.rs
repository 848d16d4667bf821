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
    let asks = [
        ("/v1/completions", prompt),
        ("/v1/chat/completions", chat),
        ("/v1/responses", json!({"input": BAD})),
        ("/v1/embeddings", json!({"input": BAD})),
    ];
    for (path, body) in asks {
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let streams = path != "/v1/embeddings";
        for (way, answer) in [("socket", daemon.post(path, &body)), ("TCP", over_tcp(path, &body))] {
            let text = answer.text();
            assert_eq!(answer.status, 500, "{path} by {way}: {text}");
            assert_eq!(answer.json()["error"]["code"], "engine_failed", "{path} by {way}: {text}");
            assert!(text.contains("not finite") && !text.contains("[null"), "{path} by {way}: {text}");
            assert!(!text.contains(dir.path().to_str().unwrap()), "{path} by {way}: {text}");
        }
        for (way, answer) in [("socket", daemon.post(path, &streamed)), ("TCP", over_tcp(path, &streamed))] {
            if streams {
                let text = answer.text();
                assert!(text.contains("not finite") && !text.contains("[DONE]"), "{path} by {way}: {text}");
                assert!(!text.contains(dir.path().to_str().unwrap()), "{path} by {way}: {text}");
            }
        }
        good();
    }
}
