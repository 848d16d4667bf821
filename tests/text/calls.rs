//! Calls of functions and thoughts in the formats of published chat templates, in short form: found by rendering, kept to by a grammar, and
//! read as they were rendered.

use dynamicinfer::api::call_format::{Body, CallFormat, ListMarks};
use dynamicinfer::api::call_grammar::NativeCalls;
use dynamicinfer::api::json_scan::Keys;
use dynamicinfer::api::probe::{CallHabits, Probe, thoughts_of};
use dynamicinfer::api::reader::Reader;
use dynamicinfer::api::reading::{Callable, Part, Reading, Thoughts};
use dynamicinfer::api::schema_parts::reroot;
use dynamicinfer::generation::{Grammar, Grammars, style};
use dynamicinfer::tokenizer::chat_template::{Input, render_in_process};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Qwen2.5, Qwen3, Hermes.
const HERMES: &str = "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}\
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}\
{%- elif message.role != 'assistant' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- else %}{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}\
{%- for call in message.tool_calls %}{%- set call = call.function %}\
{{- '\\n<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}\
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Qwen3.5 and Qwen3-Coder, with thoughts.
const XML: &str = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}{%- for message in messages %}\
{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content }}\
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}\
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\\n' }}\
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}\
{%- if not loop.last %}{{- '\\n' }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}\
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}";

/// Llama 3.1: one call, its end another token than a text's.
const LLAMA: &str = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}{%- for message in messages %}\
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}\
{%- if message.tool_calls %}{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}\
{%- set call = message.tool_calls[0].function %}{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}\
{{- call.arguments | tojson }}{{- '}<|eom_id|>' }}{%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}";

/// Mistral Nemo: a list, and ids of nine letters and digits.
const LIST: &str = "{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}\
{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}\
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}\
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}\
{%- if call.id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}\
{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments | tojson + ', \"id\": \"' + call.id + '\"}' }}\
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}{%- else %}{{- message.content + '</s>' }}{%- endif %}\
{%- endfor %}";

/// Mistral Small 3.2 and later.
const NAMED: &str = "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for message in messages %}\
{%- if message.role == 'assistant' %}{{- message.content }}{%- for call in message.tool_calls or [] %}\
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments }}{%- endfor %}{{- '</s>' }}\
{%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}";

/// GLM 4.5.
const KEYS: &str = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}{%- for message in messages %}\
{{- '<|' + message.role + '|>\\n' }}{%- if message.role == 'assistant' %}{{- '<think></think>\\n' }}{%- endif %}\
{{- message.content }}{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}\
{%- for key, value in call.function.arguments | items %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}\
{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}";

/// Gemma 4: a list in braces, texts between marks.
const MARKED_LIST: &str = r#"{%- macro value(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{ {%- for key, value_ in v | dictsort -%}{{ key }}:{{ value(value_) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%} }
{%- elif v is sequence -%}[{%- for one in v -%}{{ value(one) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}]{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}{%- for message in messages -%}<|turn>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls or [] -%}<|tool_call>call:{{ call.function.name }}{{ value(call.function.arguments) }}<tool_call|>
{%- endfor -%}<turn|>
{% endfor -%}{%- if add_generation_prompt -%}<|turn>model
{% endif -%}"#;

/// LFM2.5: calls as in Python.
const PYTHON: &str = r#"{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}{%- if message.tool_calls -%}<|tool_call_start|>[{%- for call in message.tool_calls -%}{{ call.function.name }}(
{%- for key, value in call.function.arguments | items -%}{{ key }}={{ "'" + value + "'" if value is string else value | tojson }}{%- if not loop.last -%}, {% endif -%}{%- endfor -%})
{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]<|tool_call_end|>{%- endif -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"#;

/// Olmo 3: a call on each line.
const LINES: &str = r#"{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}{%- if message.tool_calls -%}<function_calls>{%- for call in message.tool_calls -%}{{ call.function.name }}(
{%- for key, value in call.function.arguments | items -%}{{ key }}={{ value | tojson }}{%- if not loop.last -%}, {% endif -%}{%- endfor -%})
{%- if not loop.last -%}{{ "\n" }}{%- endif -%}{%- endfor -%}</function_calls>{%- endif -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"#;

/// A call that nothing marks.
const UNMARKED: &str = "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for message in messages %}{{- message.role + ': ' + message.content }}\
{%- for call in message.tool_calls or [] %}{{- call.function.name + '(' }}{%- for key, value in call.function.arguments | items %}\
{{- key + '=' + value | tojson + ', ' }}{%- endfor %}{{- ')' }}{%- endfor %}{{- '</s>' }}{%- endfor %}";

const MARK: &str = "<|\"|>";

fn render(template: &str, probe: Probe) -> dynamicinfer::Result<String> {
    let Probe { messages, tools, prompt } = probe;
    let mut input = Input { template: template.into(), messages, add_generation_prompt: prompt, ..Input::default() };
    if !tools.is_null() {
        input.extras.insert("tools".into(), tools);
    }
    render_in_process(&input, Path::new("t"))
}

fn habits(template: &str) -> Option<CallHabits> {
    CallHabits::of(&|probe| render(template, probe)).unwrap()
}

#[test]
fn the_formats_of_published_templates_are_found_by_rendering_them() {
    let object = |arguments: &str| Body::Object(Keys { name: "name".into(), arguments: arguments.into() });
    let format = |open: &str, body: Body, join: Option<&str>, close: &str| CallFormat {
        open: open.into(),
        body,
        join: join.map(str::to_owned),
        close: close.into(),
    };
    let parameters = |between: &str, before_key: &str, before_value: &str, after_value: &str| Body::Parameters {
        between: between.into(),
        before_key: before_key.into(),
        before_value: before_value.into(),
        after_value: after_value.into(),
    };
    let named = Body::Named { between: "[ARGS]".into() };
    let list = |marks: [&str; 5]| {
        let [begin, is, join, end, quote] = marks.map(str::to_owned);
        Body::List(ListMarks { begin, is, join, end, quote })
    };
    for (template, wanted, as_text, any_id) in [
        (
            HERMES,
            format("<tool_call>\n", object("arguments"), Some("\n</tool_call>\n<tool_call>\n"), "\n</tool_call>"),
            true,
            true,
        ),
        (
            XML,
            format(
                "<tool_call>\n<function=",
                parameters(">\n", "<parameter=", ">\n", "\n</parameter>\n"),
                Some("</function>\n</tool_call>\n<tool_call>\n<function="),
                "</function>\n</tool_call>",
            ),
            false,
            true,
        ),
        (LLAMA, format("", object("parameters"), None, ""), false, true),
        (LIST, format("[TOOL_CALLS][", object("arguments"), Some(", "), "]"), false, false),
        (NAMED, format("[TOOL_CALLS]", named, Some("[TOOL_CALLS]"), ""), true, true),
        (
            KEYS,
            format(
                "<tool_call>",
                parameters("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
                Some("</tool_call>\n<tool_call>"),
                "</tool_call>",
            ),
            false,
            true,
        ),
        (
            MARKED_LIST,
            format(
                "<|tool_call>call:",
                list(["{", ":", ",", "}", MARK]),
                Some("<tool_call|><|tool_call>call:"),
                "<tool_call|>",
            ),
            false,
            true,
        ),
        (
            PYTHON,
            format("<|tool_call_start|>[", list(["(", "=", ", ", ")", "'"]), Some(", "), "]<|tool_call_end|>"),
            false,
            true,
        ),
        (
            LINES,
            format("<function_calls>", list(["(", "=", ", ", ")", "\""]), Some("\n"), "</function_calls>"),
            false,
            true,
        ),
    ] {
        let found = habits(template).unwrap_or_else(|| panic!("{wanted:?}"));
        assert_eq!(found, CallHabits { format: wanted, arguments_as_text: as_text, any_id });
    }
    // One that takes no functions, one that writes calls in a way that is not read, and one that drops what they returned.
    let deaf = HERMES
        .replace("message.role == 'tool'", "false")
        .replace("message.role != 'assistant'", "message.role == 'user'");
    for template in [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        UNMARKED,
        &deaf.replace("{%- else %}", "{%- elif message.role == 'assistant' %}"),
    ] {
        assert_eq!(habits(template), None);
    }
}

#[test]
fn thoughts_are_found_where_a_template_renders_them_takes_them_away_or_begins_them() {
    let thoughts = |template: &str| thoughts_of(&|probe| render(template, probe)).unwrap();
    let of = |open: &str, close: &str| Some(Thoughts { open: open.into(), close: close.into() });
    assert_eq!(thoughts(XML), of("<think>", "</think>"));
    assert_eq!(thoughts(HERMES), None);
    let renders = "{% for m in messages %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}{% endfor %}";
    assert_eq!(thoughts(renders), of("[THINK]", "[/THINK]"));
    let strips = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}";
    assert_eq!(thoughts(strips), of("<think>", "</think>"));
    let channels = "{% for m in messages %}{{ m.content.split('<channel|>')[-1] }}{% endfor %}";
    assert_eq!(thoughts(channels), of("<|channel>thought", "<channel|>"));
    let begins = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}";
    assert_eq!(thoughts(begins), of("<think>", "</think>"));
}

fn callable() -> Vec<Callable> {
    let arguments = json!({
        "type": "object",
        "properties": {"place": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": false,
    });
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    [("weather", arguments), ("clock", none)].map(|(name, arguments)| Callable { name: name.into(), arguments }).into()
}

fn schema() -> Value {
    let form =
        |f: Callable| json!({"type": "object", "properties": {"name": {"const": f.name}, "arguments": f.arguments}});
    json!({"anyOf": callable().into_iter().map(form).collect::<Vec<_>>()})
}

/// A text of a format as a grammar has it.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

/// A grammar of the small vocabulary, whose first tokens are the bytes.
fn grammar(template: &str, begun: bool, parallel: bool) -> Grammar {
    let format = habits(template).unwrap().format;
    let native = NativeCalls { format, callable: callable(), parallel };
    let (lark, not_held) = native.lark(&schema(), 2, begun, &literal, &style(false));
    assert!(not_held.is_empty());
    let grammar = Grammars::small().unwrap().lark(lark.clone()).unwrap_or_else(|why| panic!("{why}\n{lark}"));
    if begun { grammar.after(&native.trigger()) } else { grammar }
}

/// The grammar of a call of function `f`, whose arguments have this schema, as Qwen3.5 writes it; and the places that it does not hold.
fn between_marks(arguments: &Value, literal: &dyn Fn(&str) -> String) -> (Grammar, Vec<String>) {
    one_call(XML, arguments, literal)
}

/// The grammar of a call of function `f`, whose arguments have this schema, as a template writes it; and the places that it does not hold.
fn one_call(template: &str, arguments: &Value, literal: &dyn Fn(&str) -> String) -> (Grammar, Vec<String>) {
    let callable = vec![Callable { name: "f".into(), arguments: arguments.clone() }];
    let native = NativeCalls { format: habits(template).unwrap().format, callable, parallel: false };
    let mut arguments = arguments.clone();
    reroot(&mut arguments, "#/properties/arguments");
    let form = json!({"type": "object", "properties": {"name": {"const": "f"}, "arguments": arguments}});
    let (lark, not_held) = native.lark(&form, 1, false, literal, &style(false));
    let grammar = Grammars::small().unwrap().lark(lark.clone()).unwrap_or_else(|why| panic!("{why}\n{lark}"));
    (grammar, not_held.iter().map(|way| way[2..].join("/")).collect())
}

/// The call of function `f` with these arguments, as Qwen3.5 writes it.
fn written(arguments: &[(&str, &str)]) -> String {
    let argument = |(key, value): &(&str, &str)| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let arguments: String = arguments.iter().map(argument).collect();
    format!("<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>")
}

#[test]
fn arguments_between_marks_are_kept_to_all_of_their_schema() {
    type Calls<'a> = &'a [&'a [(&'a str, &'a str)]];
    let one = |name: &str, schema: Value| json!({"properties": {name: schema}, "required": [name], "additionalProperties": false});
    let long = "x".repeat(1024);
    let cases: [(Value, Calls<'_>, Calls<'_>); 14] = [
        // Its names stand behind a reference.
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": one("city", json!({"$ref": "#/$defs/c"})), "c": {"type": "string", "enum": ["Rome"]}}}),
            &[&[("city", "Rome")]],
            &[&[], &[("city", "Oslo")], &[("town", "Rome")]],
        ),
        // Names that the schema does not list.
        (
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}),
            &[&[], &[("a", "x"), ("b", "1"), ("ab", "2")], &[("b", "1")]],
            &[&[("b", "x")], &[("b", "1"), ("a", "x")], &[("a", "x"), ("a", "1")]],
        ),
        (json!({"type": "object"}), &[&[], &[("x", "any thing"), ("y", "1")]], &[&[("x>y", "1")]]),
        (json!({"type": "object", "required": ["a"]}), &[&[("a", "1"), ("b", "2")]], &[&[], &[("b", "2")]]),
        // In the schema's order, each once, and none that is required is left out.
        (
            json!({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}, "required": ["b"]}),
            &[&[("b", "1")], &[("a", "x"), ("b", "1"), ("c", "[2]")]],
            &[&[], &[("a", "x")], &[("b", "1"), ("b", "2")], &[("b", "1"), ("a", "x")], &[("b", "1"), ("d", "x")]],
        ),
        // The library does not decode names in pointers.
        (one("a/b~c", json!({"type": "integer"})), &[&[("a/b~c", "1")]], &[&[("a/b~c", "x")]]),
        (one("%20\"", json!({"type": "boolean"})), &[&[("%20\"", "true")]], &[&[("%20\"", "1")]]),
        (
            one("$ref", json!({"anyOf": [{"type": "integer"}, {"$ref": "#"}]})),
            &[&[("$ref", "{\"$ref\": 1}")]],
            &[&[("$ref", "x")]],
        ),
        // No value fits the one, and so it is never there.
        (
            json!({"properties": {"a": {"type": "string", "enum": []}, "b": false, "c": {"type": "string", "enum": ["", "x"]}}, "additionalProperties": false}),
            &[&[], &[("c", "")], &[("c", "x")]],
            &[&[("a", "")], &[("b", "1")], &[("c", "y")]],
        ),
        (one("a", json!({"type": "string", "const": "x"})), &[&[("a", "x")]], &[&[("a", "y")]]),
        // A text is counted, and ends with the first mark.
        (
            one("a", json!({"type": "string", "minLength": 1, "maxLength": 3})),
            &[&[("a", "é\n€")]],
            &[&[("a", "")], &[("a", "four")], &[("a", "\n</parameter>")]],
        ),
        (one("a", json!({"type": "string", "maxLength": 1024})), &[&[("a", &long)]], &[&[("a", &format!("{long}x"))]]),
        (one("a", json!({"type": "string"})), &[&[("a", "</parameter>\n x")]], &[&[("a", "x\n</parameter>\nx")]]),
        // Only in quotes it can be kept to it.
        (
            one("a", json!({"type": "string", "pattern": "^[0-9]+$"})),
            &[&[("a", "\"12\"")]],
            &[&[("a", "12")], &[("a", "\"x\"")]],
        ),
    ];
    for (schema, good, bad) in cases {
        let (grammar, not_held) = between_marks(&schema, &literal);
        assert!(not_held.is_empty(), "{schema}: {not_held:?}");
        for call in good.iter().map(|arguments| written(arguments)) {
            assert_eq!(allowed(grammar.clone(), &call), (call.len(), true), "{schema}: {call}");
            // It is read as what the schema means.
            let reading = Reading {
                calls: Some((
                    habits(XML).unwrap().format,
                    vec![Callable { name: "f".into(), arguments: schema.clone() }],
                )),
                ..Reading::default()
            };
            let mut reader = Reader::new(&Arc::new(reading));
            let parts: Vec<Part> = call.chars().flat_map(|c| reader.push(&c.to_string())).collect();
            let arguments: String = parts[1..]
                .iter()
                .map(|part| if let Part::Arguments(more) = part { more.as_str() } else { panic!("{part:?}") })
                .collect();
            let read: Value = serde_json::from_str(&arguments).unwrap_or_else(|why| panic!("{why}: {arguments}"));
            assert!(
                Grammars::small().unwrap().json_schema(&schema, true).is_err() || kept(&schema, &read),
                "{schema}: {read}"
            );
        }
        for call in bad.iter().map(|arguments| written(arguments)) {
            assert_ne!(allowed(grammar.clone(), &call), (call.len(), true), "{schema}: {call}");
        }
    }
}

/// The arguments of the only call of an answer, letter by letter.
fn arguments_of(template: &str, schema: &Value, call: &str) -> Value {
    let callable = vec![Callable { name: "f".into(), arguments: schema.clone() }];
    let reading = Reading { calls: Some((habits(template).unwrap().format, callable)), ..Reading::default() };
    let mut reader = Reader::new(&Arc::new(reading));
    let mut parts: Vec<Part> = call.chars().flat_map(|c| reader.push(&c.to_string())).collect();
    parts.extend(reader.end());
    assert_eq!(parts[0], Part::Call("f".into()), "{call}");
    let text = |part: &Part| if let Part::Arguments(more) = part { more.clone() } else { panic!("{part:?}") };
    let arguments: String = parts[1..].iter().map(text).collect();
    serde_json::from_str(&arguments).unwrap_or_else(|why| panic!("{why}: {arguments}"))
}

#[test]
fn arguments_in_a_list_are_kept_to_all_of_their_schema_and_read_as_what_they_mean() {
    let marked = |inner: &str| format!("<|tool_call>call:f{{{}}}<tool_call|>", inner.replace('\'', MARK));
    let python = |inner: &str| format!("<|tool_call_start|>[f({inner})]<|tool_call_end|>");
    let deep = json!({
        "type": "object", "required": ["at"],
        "properties": {
            "at": {"type": "object", "properties": {"x": {"type": "number"}, "tag": {"enum": ["a", 1, null]}}, "additionalProperties": false},
            "all": {"type": "array", "items": {"$ref": "#/$defs/word"}},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}]},
        },
        "$defs": {"word": {"type": "string"}},
    });
    let free = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "additionalProperties": {"type": "integer"}});
    type Case<'a> = (&'a Value, &'a str, &'a str, Value);
    let good: [Case<'_>; 7] = [
        (&free, "", "", json!({})),
        (&free, "a:'x'", "a=\"x\"", json!({"a": "x"})),
        (&free, "b:1", "b=1", json!({"b": 1})),
        (
            &free,
            "a:'it is \"so\", {b}',b:-2,c:3",
            "a=\"it is \\\"so\\\", {b}\", b=-2, c=3",
            json!({"a": "it is \"so\", {b}", "b": -2, "c": 3}),
        ),
        (&free, "c:3,d:4", "c=3, d=4", json!({"c": 3, "d": 4})),
        (
            &deep,
            "at:{x:1.5,tag:'a'},all:['b','c,d'],maybe:null,either:[1,2]",
            "at={\"x\": 1.5, \"tag\": \"a\"}, all=[\"b\", \"c,d\"], maybe=null, either=[1, 2]",
            json!({"at": {"x": 1.5, "tag": "a"}, "all": ["b", "c,d"], "maybe": null, "either": [1, 2]}),
        ),
        (&deep, "at:{},all:[],either:true", "at={}, all=[], either=true", json!({"at": {}, "all": [], "either": true})),
    ];
    for (schema, in_marks, in_python, value) in good {
        for (template, call) in [(MARKED_LIST, marked(in_marks)), (PYTHON, python(in_python))] {
            let (grammar, not_held) = one_call(template, schema, &literal);
            assert!(not_held.is_empty(), "{schema}: {not_held:?}");
            assert_eq!(allowed(grammar, &call), (call.len(), true), "{call}");
            assert_eq!(arguments_of(template, schema, &call), value, "{call}");
        }
    }
    for (schema, in_marks, in_python) in [
        (&free, "b:1,a:'x'", "b=1, a=\"x\""),
        (&free, "a:1", "a=1"),
        (&free, "c:'x'", "c=\"x\""),
        (&deep, "", ""),
        (&deep, "all:[]", "all=[]"),
        (&deep, "at:{y:1}", "at={\"y\": 1}"),
        (&deep, "at:{tag:'b'}", "at={\"tag\": \"b\"}"),
        (&deep, "at:{},either:['x']", "at={}, either=[\"x\"]"),
    ] {
        for (template, call) in [(MARKED_LIST, marked(in_marks)), (PYTHON, python(in_python))] {
            assert_ne!(allowed(one_call(template, schema, &literal).0, &call), (call.len(), true), "{call}");
        }
    }
    // As models write it, too.
    let loose = python("at={'x': 1, 'tag': None}, all=('b', 'it\\'s'), either=True");
    let wanted = json!({"at": {"x": 1, "tag": null}, "all": ["b", "it's"], "either": true});
    assert_eq!(arguments_of(PYTHON, &deep, &loose), wanted);
    // What has no name belongs to no argument, and a comma may stand behind the last: the call ends where its list does.
    for (inner, arguments) in [("'Rome'", json!({})), ("a='x',", json!({"a": "x"})), ("a='x', 'y'", json!({"a": "x"}))]
    {
        assert_eq!(arguments_of(PYTHON, &free, &python(inner)), arguments, "{inner}");
    }
    // What a grammar of lists does not hold is told; any value may stand there.
    let schema = json!({"properties": {
        "a": {"type": "string", "pattern": "x"}, "b": {"type": "array", "items": {"not": {}}, "minItems": 1}, "c": {}}});
    let (grammar, mut not_held) = one_call(MARKED_LIST, &schema, &literal);
    not_held.sort();
    assert_eq!(not_held, ["properties/a/pattern", "properties/b/items", "properties/b/minItems"]);
    let call = marked("a:'y',b:[{k:[1,'z']}],c:{}");
    assert_eq!(allowed(grammar, &call), (call.len(), true));
    assert_eq!(arguments_of(MARKED_LIST, &schema, &call), json!({"a": "y", "b": [{"k": [1, "z"]}], "c": {}}));
    for (schema, told) in [
        (json!({"properties": {"a": {"enum": ["x"], "minLength": 9}}}), vec!["properties/a/minLength"]),
        (json!({"properties": {"a": {"enum": [["x"]], "type": "array"}}}), vec!["properties/a/enum"]),
        (json!({"properties": {"a": {"anyOf": [{"type": "null"}], "required": ["x"]}}}), vec!["properties/a/required"]),
        (
            json!({"properties": {"a": {"type": "object", "$ref": "#", "not": {}}}}),
            vec!["properties/a/$ref", "properties/a/not"],
        ),
        (json!({"properties": {"a": {"type": "string", "title": "A", "x-order": 1}}}), vec![]),
    ] {
        let mut not_held = one_call(MARKED_LIST, &schema, &literal).1;
        not_held.sort();
        assert_eq!(not_held, told, "{schema}");
    }
    // Names that patterns allow may be there, and what no value fits is not; a type that is named often is one.
    let schema = json!({"properties": {"a": false, "b": {"type": vec!["null"; 4000]}}, "patternProperties": {"^x": {}}, "additionalProperties": false});
    let grammar = one_call(MARKED_LIST, &schema, &literal).0;
    for (inner, good) in [("b:null,xy:1", true), ("xy:'z'", true), ("a:1", false)] {
        let call = marked(inner);
        assert_eq!(allowed(grammar.clone(), &call) == (call.len(), true), good, "{call}");
    }
}

/// Whether the grammar of a schema takes a value.
fn kept(schema: &Value, value: &Value) -> bool {
    let text = value.to_string().replace("\":", "\": ").replace(",\"", ", \"");
    allowed(Grammars::small().unwrap().json_schema(schema, false).unwrap(), &text).0 == text.len()
}

#[test]
fn what_is_not_held_between_marks_is_told() {
    let text = json!({"type": "string", "maxLength": 1025});
    let counted = json!({"type": "string", "minLength": 600});
    for (schema, told) in [
        (json!({"properties": {"a": text}}), vec!["properties/a"]),
        (json!({"additionalProperties": text}), vec!["additionalProperties"]),
        // The lengths of all texts together are bounded.
        (json!({"properties": {"a": counted, "b": counted}}), vec!["properties/b"]),
        (
            json!({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}], "minProperties": 1}),
            vec!["anyOf", "minProperties"],
        ),
        (
            json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"oneOf": [{}], "properties": {"c": text}}}}),
            vec!["$defs/a/b/oneOf", "$defs/a/b/properties/c"],
        ),
    ] {
        assert_eq!(between_marks(&schema, &literal).1, told, "{schema}");
    }
    // Copies are bounded: what is beyond is any text.
    let refers = (0..100).map(|i| (i.to_string(), json!({"$ref": "#/$defs/x"})));
    let schema = json!({"properties": refers.collect::<serde_json::Map<_, _>>(), "$defs": {"x": {"type": "integer", "description": "y".repeat(20_000)}}});
    let (grammar, not_held) = between_marks(&schema, &literal);
    assert!((50..100).contains(&not_held.len()) && not_held.contains(&"properties/99".into()), "{not_held:?}");
    let (good, bad) = (written(&[("0", "1"), ("99", "x")]), written(&[("0", "x")]));
    assert_eq!((allowed(grammar.clone(), &good), allowed(grammar, &bad).0 < bad.len()), ((good.len(), true), true));
}

/// A name or a value of a client's that looked like a control token became one.
#[test]
fn no_text_of_a_client_is_a_control_token() {
    let schema = json!({"properties": {"<|x|>": {"type": "string", "enum": ["<|x|>"]}}, "required": ["<|x|>"], "additionalProperties": false});
    let format_only = |text: &str| {
        assert!(!text.contains("<|x|>"), "{text}");
        literal(text)
    };
    let call = written(&[("<|x|>", "<|x|>")]);
    assert_eq!(allowed(between_marks(&schema, &format_only).0, &call), (call.len(), true));
}

/// A text before a control token ended nowhere, if the format has white space between them.
#[test]
fn a_text_ends_before_a_mark_that_is_a_control_token() {
    let token = |text: &str| match text.split_once("</parameter>") {
        Some((before, behind)) => format!("{} <[299]> {}", literal(before), literal(behind)),
        None => literal(text),
    };
    let (mut grammar, _) = between_marks(&json!({"properties": {"a": {"type": "string"}}, "required": ["a"]}), &token);
    for &byte in b"<tool_call>\n<function=f>\n<parameter=a>\nx\n" {
        grammar.accept(u32::from(byte), &[byte]).unwrap();
    }
    let mut logits = vec![0.0; 300];
    grammar.mask(&mut logits).unwrap();
    assert!(logits[299] == 0.0 && logits[usize::from(b'y')] == 0.0);
}

/// How much of a text the grammar allows, and whether it is complete behind it.
fn allowed(mut grammar: Grammar, text: &str) -> (usize, bool) {
    let mut complete = false;
    for (i, &byte) in text.as_bytes().iter().enumerate() {
        let mut logits = vec![0.0; 300];
        grammar.mask(&mut logits).unwrap();
        if complete || logits[usize::from(byte)] < 0.0 {
            return (i, complete);
        }
        complete = grammar.accept(u32::from(byte), &[byte]).unwrap();
    }
    (text.len(), complete)
}

#[test]
fn calls_are_kept_to_their_format_and_schemas() {
    let rome = r#"{"place": "Rome", "unit": "C", "days": 3}"#;
    for (template, good, bad) in [
        (
            HERMES,
            format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {rome}}}\n</tool_call>"),
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Rome\", \"unit\": \"K",
        ),
        (LLAMA, format!("{{\"name\": \"weather\", \"parameters\": {rome}}}"), "{\"name\": \"whether"),
        (
            XML,
            "<tool_call>\n<function=weather>\n<parameter=place>\nRo\nme\n</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>".into(),
            "<tool_call>\n<function=weather>\n<parameter=days>\nthree",
        ),
        (NAMED, format!("[TOOL_CALLS]weather[ARGS]{rome}"), "[TOOL_CALLS]clock[ARGS]{\"a"),
        (
            KEYS,
            "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>".into(),
            "<tool_call>weather\n<arg_key>time",
        ),
    ] {
        assert_eq!(allowed(grammar(template, false, false), &good), (good.len(), true), "{good}");
        assert!(allowed(grammar(template, false, false), bad).0 < bad.len(), "{bad}");
        // It has to be a call.
        assert_eq!(allowed(grammar(template, false, false), "Hello").0, 0, "{good}");
        // What the grammar lets through is read as it was meant.
        let reading = Reading { calls: Some((habits(template).unwrap().format, callable())), ..Reading::default() };
        let mut reader = Reader::new(&Arc::new(reading));
        let mut parts = reader.push(&good);
        parts.extend(reader.end());
        assert_eq!(parts[0], Part::Call("weather".into()), "{good}");
        let arguments: String = parts[1..].iter().map(|part| if let Part::Arguments(more) = part { more.as_str() } else { panic!("{part:?}") }).collect();
        let arguments: Value = serde_json::from_str(&arguments).unwrap();
        assert_eq!((arguments["days"].as_i64(), arguments["place"].as_str().unwrap().replace('\n', "")), (Some(3), "Rome".into()));
        // After any text, once it begins; and several, where they may be.
        if !template.contains("eom_id") {
            let late = format!("Let me see. {good}");
            assert_eq!(allowed(grammar(template, true, false), &late), (late.len(), true), "{late}");
            let bad = format!("Well. {bad}");
            assert!(allowed(grammar(template, true, false), &bad).0 < bad.len(), "{bad}");
            let two = format!("{good}{}{good}", if template == HERMES || template == XML || template == KEYS { "\n" } else { "" });
            assert_eq!(allowed(grammar(template, true, true), &two).0, two.len(), "{two}");
            assert!(allowed(grammar(template, true, false), &two).0 < two.len(), "{two}");
        }
    }
}

#[test]
fn a_grammar_holds_behind_thoughts() {
    let json = || Grammars::small().unwrap().json_schema(&json!({"const": 7}), true).unwrap();
    assert_eq!(allowed(json().after("</think>"), "Hm {</think>7"), (13, true));
    assert_eq!(allowed(json().after("</think>"), "Hm</think>8").0, 10);
    // The token that may begin them stands for a byte here.
    let may = || json().or_thinks(u32::from(b'<'), ">");
    assert_eq!(allowed(may(), "7"), (1, true));
    assert_eq!(allowed(may(), "<x>7"), (4, true));
    assert_eq!(allowed(may(), "<x>8").0, 3);
    assert_eq!(allowed(may(), "x").0, 0);
}
