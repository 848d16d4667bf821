//! The forms of answers: what of a schema is kept to and what is only said not to be, calls beside JSON, and white space.

use crate::daemon::{Answer, Daemon, forecast};
use serde_json::{Value as Json, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn weather() -> Json {
    let parameters = forecast();
    json!({"type": "function", "function": {"name": "weather", "parameters": parameters}})
}

/// A function that takes an object with a value of this schema.
fn odd(value: &Json, strict: bool) -> Json {
    let parameters =
        json!({"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": false});
    json!({"type": "function", "function": {"name": "odd", "parameters": parameters, "strict": strict}})
}

/// JSON pointers of what the answer was not kept to.
fn unenforced(answer: &Answer) -> Vec<String> {
    let line = answer.headers.lines().find_map(|line| line.strip_prefix("x-dynamicinfer-unenforced: "));
    line.map_or(Vec::new(), |list| list.split(", ").map(str::to_owned).collect())
}

/// Schemas with words that no grammar holds, and these words' places.
fn beyond_grammars() -> Vec<(Json, &'static [&'static str])> {
    vec![
        (json!({"type": "string", "pattern": "^(?!a)[a-z]+$", "maxLength": 5}), &["/pattern"]),
        (json!({"type": "string", "pattern": "^(a|b)\\1$", "maxLength": 5}), &["/pattern"]),
        (json!({"type": "string", "format": "telephone", "maxLength": 5}), &["/format"]),
        (json!({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true}), &["/uniqueitems"]),
        (json!({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "contains": {"const": 2}}), &["/contains"]),
        (json!({"enum": [1, 2], "not": {"const": 2}}), &["/not"]),
        (
            json!({"enum": [1, 2], "if": {"const": 1}, "then": {"const": 1}, "else": {"const": 2}}),
            &["/if", "/then", "/else"],
        ),
        (
            json!({"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": false}),
            &["/propertynames"],
        ),
        (
            json!({
                "type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "additionalProperties": false, "dependentRequired": {"a": ["b"]}, "maxProperties": 1, "minProperties": 0,
            }),
            &["/dependentrequired"],
        ),
        (json!({"oneOf": [{"type": "integer", "maximum": 5}, {"enum": [3, 7]}]}), &["/oneof"]),
        (
            json!({
                "type": "object", "patternProperties": {"^(?=a)": {"type": "null"}}, "additionalProperties": false,
                "maxProperties": 0,
            }),
            &["/patternproperties/^(?=a)", "/additionalproperties"],
        ),
        (json!({"$ref": "https://example.org/place.json", "enum": [1]}), &["/$ref"]),
        (
            json!({"items": [{"anyOf": [{"enum": [1], "not": {}}]}], "type": "array", "maxItems": 1}),
            &["/items/0/anyof/0/not"],
        ),
    ]
}

/// One tool of a server took all of its tools down: any word of any schema that no grammar holds made the request a 400.
#[test]
fn what_no_grammar_holds_of_a_tools_schema_is_left_unenforced_and_said() {
    let daemon = Daemon::start(&[]);
    let ask = |tools: Json, choice: &str| {
        json!({
            "messages": [{"role": "user", "content": "Once"}], "tools": tools, "tool_choice": choice, "temperature": 0,
            "max_tokens": 60})
    };
    for (schema, places) in beyond_grammars() {
        let answer = daemon.post(CHAT, &ask(json!([weather(), odd(&schema, false)]), "auto"));
        assert_eq!(answer.status, 200, "{schema}: {}", answer.text());
        let found = unenforced(&answer);
        let wanted: Vec<String> =
            places.iter().map(|place| format!("/tools/1/function/parameters/properties/x{place}")).collect();
        assert_eq!(found, wanted, "{schema}");
        // Who wants all of it enforced is told where that cannot be.
        let strict = daemon.post(CHAT, &ask(json!([weather(), odd(&schema, true)]), "auto"));
        let error = strict.json()["error"].clone();
        assert_eq!(
            (strict.status, &error["param"], &error["code"]),
            (400, &json!("tools"), &json!("unsupported_schema"))
        );
    }
    // All that a grammar holds is kept to: the call of the odd function has five letters at most.
    let (schema, _) = &beyond_grammars()[0];
    let answer = daemon.post(CHAT, &ask(json!([odd(schema, false)]), "required"));
    assert_eq!(unenforced(&answer), ["/tools/0/function/parameters/properties/x/pattern"]);
    let call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].clone();
    let arguments: Json = serde_json::from_str(call.as_str().unwrap_or_else(|| panic!("{}", answer.text()))).unwrap();
    assert!(arguments["x"].as_str().unwrap().chars().count() <= 5, "{arguments}");
    // A schema that is none is refused, whoever wants what, and so is one that would take too much.
    for (bad, word) in [
        (json!({"type": "strnig"}), "/tools/1/function/parameters/properties/x/type"),
        (json!({"$ref": "#/nowhere"}), "not found"),
        (json!({"type": "integer", "multipleOf": 268_435_457}), "multipleOf"),
    ] {
        let answer = daemon.post(CHAT, &ask(json!([weather(), odd(&bad, false)]), "auto"));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tools")), "{bad}");
        assert!(answer.text().contains(word), "{bad}: {}", answer.text());
    }
    // What nothing is left out of says nothing.
    let whole = daemon.post(CHAT, &ask(json!([weather(), odd(&json!({"enum": [1, 2]}), true)]), "auto"));
    assert_eq!((whole.status, unenforced(&whole)), (200, vec![]));
}

#[test]
fn a_response_format_is_kept_to_as_far_as_a_grammar_can_unless_it_is_strict() {
    let mut daemon = Daemon::start(&[]);
    let ask = |schema: &Json, strict: Option<bool>| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}});
        json!({"prompt": "Once", "max_tokens": 60, "temperature": 0, "response_format": format})
    };
    for (schema, places) in beyond_grammars() {
        for strict in [None, Some(false)] {
            let answer = daemon.post(TEXT, &ask(&schema, strict));
            assert_eq!(answer.status, 200, "{schema}: {}", answer.text());
            let wanted: Vec<String> =
                places.iter().map(|place| format!("/response_format/json_schema/schema{place}")).collect();
            assert_eq!(unenforced(&answer), wanted, "{schema}");
        }
        let strict = daemon.post(TEXT, &ask(&schema, Some(true)));
        assert_eq!((strict.status, &strict.json()["error"]["param"]), (400, &json!("response_format")), "{schema}");
    }
    // The log says it, too, and so does the head of a stream.
    let mut stream = ask(&json!({"enum": [1], "not": {"const": 2}}), None);
    stream["stream"] = true.into();
    let answer = daemon.post(TEXT, &stream);
    assert_eq!(
        (unenforced(&answer), answer.streamed().0),
        (vec!["/response_format/json_schema/schema/not".into()], "1".into())
    );
    daemon.wait_for("unenforced=\"/response_format/json_schema/schema/pattern\"");
    daemon.wait_for("unenforced=\"/response_format/json_schema/schema/not\"");
}

/// A schema that was `true` allowed white space without end, which a small model then writes.
#[test]
fn white_space_between_tokens_is_one_space_at_most_whatever_the_form() {
    let daemon = Daemon::start(&[]);
    let last = |text: &str| {
        let tokens = daemon.post("/tokenize", &json!({"content": format!("a{text}")})).json()["tokens"].clone();
        tokens.as_array().unwrap().last().unwrap().to_string()
    };
    // It would rather write white space than anything else, then quotes, then lists.
    let mut bias = serde_json::Map::new();
    ["\n", "\t", "\r"].iter().for_each(|space| _ = bias.insert(last(space), 100.into()));
    bias.insert(last("\""), 80.into());
    bias.insert(last("["), 60.into());
    let of = |schema: Json| json!({"type": "json_schema", "json_schema": {"schema": schema}});
    for format in [
        json!({"type": "json_object"}),
        of(json!(true)),
        of(json!({})),
        of(json!({"type": "array"})),
        of(json!({"type": "array", "uniqueItems": true})),
        of(json!({"type": "object", "additionalProperties": {"type": "array"}})),
    ] {
        let ask = json!({
            "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 60, "logit_bias": bias,
            "response_format": format});
        let answer = daemon.post(CHAT, &ask).json();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(text.len() > 1 && !text.contains(['\n', '\t', '\r']), "{format}: {text:?}");
        let (mut quoted, mut before) = (false, 'x');
        for character in text.chars() {
            assert!(quoted || character != ' ' || ",:".contains(before), "{format}: {text:?}");
            quoted ^= character == '"';
            before = character;
        }
    }
}

/// The two were refused together, though a client may want JSON where nothing is called.
#[test]
fn an_answer_beside_tools_is_a_call_or_has_its_own_form() {
    let daemon = Daemon::start(&[]);
    let first = |text: &str| {
        let tokens = daemon.post("/tokenize", &json!({"content": text})).json()["tokens"].clone();
        tokens[0].to_string()
    };
    let schema = json!({
        "type": "object", "properties": {"verdict": {"$ref": "#/$defs/v"}}, "required": ["verdict"],
        "additionalProperties": false, "$defs": {"v": {"enum": ["good evening", "bad"]}}});
    let ask = |format: &Json, begin: &str, choice: &str| {
        json!({
            "messages": [{"role": "user", "content": "Once upon a time"}], "tools": [weather()], "temperature": 0,
            "max_tokens": 100, "response_format": format, "tool_choice": choice,
            "logit_bias": {(first(begin)): 100}})
    };
    let strict = json!({"type": "json_schema", "json_schema": {"name": "v", "schema": schema, "strict": true}});
    let loose = json!({"type": "json_schema", "json_schema": {"name": "v", "schema": schema}});
    let object = json!({"type": "json_object"});
    let called = |answer: &Json| {
        let choice = &answer["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["function"];
        let arguments: Json = serde_json::from_str(call["arguments"].as_str()?).unwrap();
        assert_eq!((&choice["finish_reason"], &call["name"]), (&json!("tool_calls"), &json!("weather")));
        assert!(["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap()), "{answer}");
        assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{answer}");
        Some(arguments)
    };
    for format in [&strict, &loose] {
        let answer = daemon.post(CHAT, &ask(format, "name", "auto"));
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(called(&answer.json()).is_some(), "{}", answer.text());
        let answer = daemon.post(CHAT, &ask(format, "verdict", "auto")).json();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"));
        let verdict: Json = serde_json::from_str(text).unwrap();
        assert!(["good evening", "bad"].contains(&verdict["verdict"].as_str().unwrap()), "{answer}");
        // What is no call streams as it comes.
        let mut streamed = ask(format, "verdict", "auto");
        streamed["stream"] = true.into();
        let stream = daemon.post(CHAT, &streamed);
        assert_eq!(stream.streamed(), (text.to_owned(), Some("stop".into())));
        let pieces = stream.events().iter().filter(|event| event.contains("\"content\":\"")).count();
        assert!(pieces > 3, "{}", stream.text());
        // A call that is required is one, and where nothing may be called the form alone holds.
        assert!(called(&daemon.post(CHAT, &ask(format, "verdict", "required")).json()).is_some());
        let none = daemon.post(CHAT, &ask(format, "name", "none")).json();
        let text = none["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(serde_json::from_str::<Json>(text).unwrap()["verdict"].is_string(), "{none}");
    }
    // An object that is no call lacks one of a call's names: a call is kept to its function's schema.
    let mut calls = 0;
    for seed in 0..8 {
        let mut ask = ask(&object, "name", "auto");
        ask["temperature"] = 1.into();
        ask["seed"] = seed.into();
        let answer = daemon.post(CHAT, &ask).json();
        calls += usize::from(called(&answer).is_some());
        if let Some(text) = answer["choices"][0]["message"]["content"].as_str() {
            assert!(text.starts_with('{'), "{answer}");
            let object: Json = serde_json::from_str(text).unwrap_or_default();
            assert!(object["name"].is_null() || object["arguments"].is_null(), "{answer}");
        }
    }
    println!("{calls} of 8 answers with any object are calls");
    let text = daemon.post(CHAT, &ask(&json!({"type": "text"}), "x", "auto"));
    assert_eq!(text.status, 200, "{}", text.text());
}

#[test]
fn chunks_before_the_one_with_the_numbers_of_tokens_have_none_where_they_were_asked_for() {
    let daemon = Daemon::start(&[]);
    for (path, mut ask) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4})),
        (TEXT, json!({"prompt": "Once", "max_tokens": 4, "n": 2, "logprobs": 1})),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [weather()], "tool_choice": "required"}),
        ),
    ] {
        ask["stream"] = true.into();
        for options in [json!({"include_usage": true}), json!({"include_usage": false}), Json::Null] {
            ask["stream_options"] = options.clone();
            let stream = daemon.post(path, &ask);
            let chunks: Vec<Json> =
                stream.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
            assert!(chunks.len() > 2, "{}", stream.text());
            let told: Vec<Option<&Json>> = chunks.iter().map(|chunk| chunk.get("usage")).collect();
            match options["include_usage"] == true {
                true => {
                    let (last, before) = told.split_last().unwrap();
                    assert!(last.unwrap()["total_tokens"].is_u64(), "{}", stream.text());
                    assert!(before.iter().all(|usage| *usage == Some(&Json::Null)), "{}", stream.text());
                }
                false => assert!(told.iter().all(Option::is_none), "{}", stream.text()),
            }
        }
    }
}
