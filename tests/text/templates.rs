//! Chat templates: real ones in short form against what transformers makes of them, and hostile ones, which may fail but
//! not take the process, the machine or the afternoon with them.

use dynamicinfer::Error;
use dynamicinfer::child::Wanted;
use dynamicinfer::tokenizer::chat_template::{CHILD_ARGUMENT, Input, Message, Renderer, render_by, render_in_process};
use serde_json::json;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_dynamicinfer");

const LLAMA_2: &str = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

const LLAMA_3: &str = "{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + \
'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const ZEPHYR: &str = "{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}";

const MISTRAL: &str = "{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}";

fn input(template: &str, messages: &[(&str, &str)]) -> Input {
    Input {
        template: template.into(),
        messages: messages.iter().map(|(role, content)| json!(Message::new(role, content))).collect(),
        add_generation_prompt: true,
        bos_token: "<s>".into(),
        eos_token: "</s>".into(),
        other_tokens: [("pad_token".to_owned(), "<pad>".to_owned())].into(),
        // 2026-11-20 13:05:09 UTC.
        now: 1_795_179_909,
        extras: serde_json::Map::new(),
    }
}

/// Through the child, and the same without it.
fn rendered(input: &Input) -> String {
    let text = render_by(Path::new(PROGRAM), input, Path::new("m.gguf")).unwrap();
    assert_eq!(render_in_process(input, Path::new("m.gguf")).unwrap(), text);
    text
}

const DIALOGUE: [(&str, &str); 4] =
    [("system", "Be brief."), ("user", " Hi! "), ("assistant", "Hello."), ("user", "Who are you? ☃")];

#[test]
fn real_templates_make_the_prompts_of_transformers() {
    for (template, expected) in [
        (LLAMA_2, "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi! [/INST] Hello. </s><s>[INST] Who are you? ☃ [/INST]"),
        (
            LLAMA_3,
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user\
             <|end_header_id|>\n\nHi!<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nWho are you? ☃<|eot_id|><|start_header_id|>assistant\
             <|end_header_id|>\n\n",
        ),
        (
            CHATML,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi! <|im_end|>\n<|im_start|>assistant\n\
             Hello.<|im_end|>\n<|im_start|>user\nWho are you? ☃<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            ZEPHYR,
            "<|system|>\nBe brief.</s>\n<|user|>\n Hi! </s>\n<|assistant|>\nHello.</s>\n<|user|>\nWho are you? ☃</s>\n\
             <|assistant|>\n",
        ),
    ] {
        assert_eq!(rendered(&input(template, &DIALOGUE)), expected);
    }
    assert_eq!(
        rendered(&input(MISTRAL, &DIALOGUE[1..])),
        "<s>[INST]  Hi!  [/INST] Hello.</s>[INST] Who are you? ☃ [/INST]"
    );
}

#[test]
fn a_template_that_does_not_take_a_role_says_so() {
    let error = render_by(Path::new(PROGRAM), &input(MISTRAL, &DIALOGUE), Path::new("m.gguf")).unwrap_err();
    assert!(matches!(error, Error::Usage(_)));
    assert_eq!(
        error.to_string(),
        "the model's chat template does not take these messages: Only user and assistant roles are supported!"
    );
    let error = render_by(Path::new(PROGRAM), &input(LLAMA_2, &DIALOGUE[2..]), Path::new("m.gguf")).unwrap_err();
    assert!(error.to_string().ends_with("Conversation roles must alternate user/assistant/user/assistant/..."));
}

#[test]
fn the_dialect_is_that_of_transformers() {
    for (template, expected) in [
        ("{{ strftime_now('%d %b %Y') }}", "20 Nov 2026"),
        ("{{ none }} {{ true }} {{ 1 == 2 }} {{ missing }}|", "None True False |"),
        (
            "{{ 'aXbXc'.split('X')[-1] }} {{ 'Hi'.upper() }} {{ ' x'.lstrip() }} {{ 'abc'.startswith('ab') }}",
            "c HI x True",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% if tools %}T{% endif %}{{ x['y'] }}{{ x.get('z', 'default') }}", "1default"),
        ("{{ x | tojson }}", r#"{"y": 1, "b": ["<é>", null, true, 1.5], "e": {}}"#),
        ("{{ x.b | tojson(indent=2) }}", "[\n  \"<é>\",\n  null,\n  true,\n  1.5\n]"),
        ("{{ x | tojson(sort_keys=true, ensure_ascii=false) }}", r#"{"b": ["<é>", null, true, 1.5], "e": {}, "y": 1}"#),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }} {% endfor %}",
            "system user ",
        ),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ messages[-1].content[:3] }}", "<a>Who"),
        ("a\n  {% if true %}  \nb\n  {% endif %}\n", "a\n  \nb\n"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
    ] {
        let mut input = input(template, &DIALOGUE);
        let x = json!({"x": {"y": 1, "b": ["<é>", null, true, 1.5], "e": {}}, "messages": "never"});
        input.extras = x.as_object().unwrap().clone();
        assert_eq!(rendered(&input), expected, "{template}");
    }
}

/// transformers passes `tools` and `documents` as None where there are none, and special tokens as their texts: here they were undefined,
/// and published templates wrote other prompts.
#[test]
fn the_variables_are_those_of_transformers() {
    let template = "{{ tools is none }} {{ documents }} {{ tools is defined and not tools }} {{ pad_token }} {{ sep_token is defined }}";
    assert_eq!(rendered(&input(template, &DIALOGUE)), "True None True <pad> False");
    let mut with = input("{{ tools|length }}{{ messages|length }}", &DIALOGUE);
    with.extras.insert("tools".into(), json!([1, 2]));
    assert_eq!(rendered(&with), "24");
}

/// A template from a file with Windows' line ends wrote them into the prompt, and `{%-` left half of one.
#[test]
fn line_ends_of_a_templates_file_are_line_feeds() {
    let template =
        "{% for m in messages %}\n  {%- if m.role == 'user' %}\n{{ m.content }}\n\n  {% endif %}\n{% endfor %}\nend\n";
    let expected = rendered(&input(template, &DIALOGUE));
    assert!(expected.contains('\n'));
    for end in ["\r\n", "\r"] {
        assert_eq!(rendered(&input(&template.replace('\n', end), &DIALOGUE)), expected);
    }
}

/// A process that the system killed for want of memory was "takes more than 2s", and the request was told that it was wrong.
#[test]
fn a_killed_process_is_not_the_templates_fault() {
    let dir = tempfile::tempdir().unwrap();
    let ended_by = |signal: &str| {
        let program = dir.path().join(signal);
        std::fs::write(&program, format!("#!/bin/sh\nkill -{signal} $$\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        render_by(&program, &input(CHATML, &DIALOGUE), Path::new("m.gguf")).unwrap_err()
    };
    for signal in ["KILL", "TERM"] {
        let error = ended_by(signal);
        assert!(matches!(&error, Error::Memory(why) if why.contains("was killed by signal")), "{error}");
    }
    for (signal, why) in [("XCPU", "takes more than 2s"), ("SEGV", "of memory"), ("ABRT", "of memory")] {
        let error = ended_by(signal);
        assert!(matches!(&error, Error::BadFile(bad) if bad.reason.contains(why)), "{error}");
    }
}

/// What a hostile template ends with, in time, and the process that asked lives.
fn ends_with_error(template: &str) -> String {
    let start = Instant::now();
    let result = render_by(Path::new(PROGRAM), &input(template, &DIALOGUE), Path::new("m.gguf"));
    let took = start.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    match result {
        Err(error @ Error::BadFile(_)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_templates_end_as_errors() {
    const MEMORY: &str = "rendering takes more than 512 MiB of memory, or nests too deeply";
    const TIME: &str = "rendering takes more than 2s";
    const DEPTH: &str = "template exceeds maximum recursion limits";
    let double = |times: usize, start: &str, step: &str| {
        format!("{{% set ns = namespace(s={start}) %}}{}{{{{ ns.s | length }}}}", step.repeat(times))
    };
    let string = double(40, "'0123456789'", "{% set ns.s = ns.s ~ ns.s %}");
    let list = double(40, "[1, 2, 3, 4]", "{% set ns.s = ns.s + ns.s %}");
    let replace = double(12, "'aaaaaaaaaa'", "{% set ns.s = ns.s | replace('a', 'aaaaaaaaaa') %}");
    let cases: Vec<(String, &[&str])> = vec![
        (format!("{}{}", "{% if true %}".repeat(50_000), "{% endif %}".repeat(50_000)), &["at most 65536 are taken"]),
        (format!("{}x{}", "{% if true %}".repeat(2500), "{% endif %}".repeat(2500)), &[DEPTH]),
        (format!("{{{{ {}1{} }}}}", "(".repeat(30_000), ")".repeat(30_000)), &[DEPTH]),
        (format!("{{{{ {}1{} }}}}", "[".repeat(30_000), "]".repeat(30_000)), &[DEPTH]),
        (format!("{{{{ {}{} }}}}", "x[".repeat(10_000), ":]".repeat(10_000)), &[DEPTH]),
        ("{% raw %}".repeat(6000), &["unexpected end of raw block"]),
        (string, &[MEMORY, TIME]),
        (list, &[MEMORY, TIME]),
        (replace, &[MEMORY, TIME]),
        ("{{ 'a\\nb' | indent(4000000000) }}".to_owned(), &["indent takes a width of at most 1048576"]),
        ("{{ [1] | tojson(indent=4000000000) }}".to_owned(), &["tojson takes an indent of at most 16"]),
        ("{{ 'A' * 2000000000 }}".to_owned(), &["repeated string is too large"]),
        ("{% for i in range(4000000000) %}x{% endfor %}".to_owned(), &["range has too many elements"]),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}".to_owned(),
            &["engine ran out of fuel"],
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(), &["recursion limit exceeded"]),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}".to_owned(), &["undefined value"]),
        ("{{ messages.__init__.__globals__['os'].system('id') }}".to_owned(), &["undefined value"]),
        ("{{ missing.field }}".to_owned(), &["undefined value"]),
        ("{% include '/etc/passwd' %}".to_owned(), &["template not found"]),
        ("{{ 1 | nothing_like_it }}".to_owned(), &["unknown filter"]),
        ("{% if %}".to_owned(), &["syntax error"]),
        ("{{ 'x' * 20000000 }}".to_owned(), &["the rendered text has more than 16777216 bytes"]),
    ];
    for (template, expected) in cases {
        let start: String = template.chars().take(60).collect();
        let message = ends_with_error(&template);
        assert!(message.starts_with("m.gguf: chat template: "), "{start}: {message}");
        assert!(expected.iter().any(|e| message.contains(e)), "{start}: {message}");
    }
}

/// Deep expressions that overflow the stack of an ordinary thread: here they have the stack they need.
#[test]
fn deep_expressions_within_the_source_limit_are_no_overflow() {
    // Its value is nested, not its source.
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}";
    let list = "[".repeat(100_000) + &"]".repeat(100_000);
    for (template, expected) in [
        (format!("{{{{ {}1 }}}}", "1+".repeat(7000)), "7001"),
        (format!("{{{{ {}1 }}}}", "1+".repeat(32_000)), "32001"),
        (format!("{{{{ {}true }}}}", "not ".repeat(16_000)), "True"),
        (nested.to_owned(), &list),
    ] {
        assert_eq!(render_by(Path::new(PROGRAM), &input(&template, &[]), Path::new("m.gguf")).unwrap(), expected);
    }
}

/// The peak is the child's, as the kernel counts it: a doubling string may not take more than its limit.
#[test]
fn a_bomb_takes_no_more_memory_than_its_limit() {
    let template = "{% set ns = namespace(s='0123456789') %}".to_owned() + &"{% set ns.s = ns.s ~ ns.s %}".repeat(40);
    let mut child = Command::new(PROGRAM)
        .arg(CHILD_ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let request = serde_json::to_vec(&input(&template, &DIALOGUE)).unwrap();
    child.stdin.take().unwrap().write_all(&request).unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success(), "{status}");
    let peak_kib = children_peak_kib();
    assert!(peak_kib < 700 << 10, "{peak_kib} KiB");
}

/// The largest resident size that any child of this process had.
fn children_peak_kib() -> u64 {
    // getrusage(RUSAGE_CHILDREN) through the shell's own accounting would be another process; /proc has no such figure,
    // so ask the C library, which every Rust program links.
    #[repr(C)]
    struct Usage {
        times: [i64; 4],
        max_rss_kib: i64,
        rest: [i64; 13],
    }
    unsafe extern "C" {
        fn getrusage(who: i32, usage: *mut Usage) -> i32;
    }
    const CHILDREN: i32 = -1;
    let mut usage = Usage { times: [0; 4], max_rss_kib: 0, rest: [0; 13] };
    // SAFETY: `Usage` is laid out as 64-bit Linux's struct rusage, 144 bytes, and the call only writes to it.
    assert_eq!(unsafe { getrusage(CHILDREN, &mut usage) }, 0);
    usage.max_rss_kib as u64
}

#[test]
fn a_child_that_gets_nonsense_or_cannot_start_is_an_error() {
    let mut child =
        Command::new(PROGRAM).arg(CHILD_ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"not JSON").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    let render = |program| render_by(Path::new(program), &input(CHATML, &DIALOGUE), Path::new("m.gguf")).unwrap_err();
    assert!(matches!(render("/nowhere/program"), Error::Io { action: "start", .. }));
    assert!(render("/bin/false").to_string().contains("the rendering process failed with exit status: 1"));
}

#[test]
fn a_long_conversation_is_no_bomb() {
    let messages: Vec<(&str, &str)> =
        (0..5000).map(|i| (["user", "assistant"][i % 2], "Tell me more about it.")).collect();
    let text = rendered(&input(LLAMA_2, &messages));
    assert_eq!(text.matches("[INST]").count(), 2500);
    let long = "x".repeat(4_000_000);
    assert!(rendered(&input(CHATML, &[("user", &long)])).len() > 4_000_000);
}

/// A template was rendered to its end for a client that had gone meanwhile.
#[test]
fn a_text_that_is_no_longer_wanted_is_not_rendered_to_its_end() {
    let loops = "{% for i in range(700) %}{% for j in range(600) %}{% endfor %}{% endfor %}done";
    let input = Input { template: loops.into(), ..Input::default() };
    let renderer = Renderer::new(PROGRAM.into());
    let asker = std::sync::Arc::new(());
    let wanted = Wanted::by(&asker);
    assert_eq!(renderer.render(&input, Path::new("t"), &wanted).unwrap(), "done");
    drop(asker);
    let ended = renderer.render(&input, Path::new("t"), &wanted);
    assert!(matches!(ended, Err(Error::Memory(_))), "{ended:?}");
}
