"""Runs the anthropic and ollama Python packages against daemons of their own, over TCP with a token.

    python3 -m venv venv && venv/bin/pip install anthropic ollama
    cargo build --release
    venv/bin/python tools/clients/anthropic_ollama.py target/release/dynamicinfer

The demo model answers in its own words. A tiny model with a chat template of Qwen3's form answers with calls and thoughts. Prints a table of
what passed and ends with 1 if anything failed; without a package its half is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import anthropic
except ImportError:
    anthropic = None
try:
    import ollama
except ImportError:
    ollama = None

ROOT = Path(__file__).resolve().parent.parent.parent
# As Qwen3 has it, in short.
TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{% else %}{{ m.role }}:{% if m.reasoning_content %} <think>{{ m.reasoning_content }}</think>{% endif %} {{ m.content }}\
{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>{% endfor %}<end>
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
FORECAST = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
ONCE = [{"role": "user", "content": "Once upon a time"}]
rows = []


def check(client, name, test):
    """Notes whether `test` gives something true."""
    try:
        said = "passed" if test() else "FAILED"
    except Exception as error:  # a client's own errors are many
        said = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
    rows.append((client, name, said))


def refused(kind, ask):
    """The error of this kind with which a request is refused."""
    try:
        ask()
    except kind as error:
        return error
    return None


class Daemon:
    """A daemon with a port and a token."""

    def __init__(self, program, home, model, *options):
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
        command = [program, "serve", str(model), "--listen", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "OPENAI_BASE_URL=" in line:
                self.url = line.split("=", 1)[1].strip().removesuffix("/v1")
            if "is ready" in line:
                break
        else:
            raise SystemExit(f"{program} serve {model} has ended")
        self.token = (home / ".local/state/dynamicinfer/token").read_text().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def anthropic_on_demo(daemon):
    client = anthropic.Anthropic(base_url=daemon.url, api_key=daemon.token, max_retries=0)
    ask = dict(model="demo", max_tokens=24, messages=ONCE, extra_body={"temperature": 0})
    whole = client.messages.create(**ask)
    text = whole.content[0].text
    check("anthropic", "message", lambda: len(text) > 20 and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24)

    def stream():
        with client.messages.stream(**ask) as events:
            said = "".join(events.text_stream)
            final = events.get_final_message()
        return said == text == final.content[0].text and final.usage.input_tokens == whole.usage.input_tokens

    check("anthropic", "stream", stream)
    count = dict(model="demo", messages=ONCE)
    check("anthropic", "count_tokens", lambda: client.messages.count_tokens(**count).input_tokens == whole.usage.input_tokens)
    cut = lambda: client.messages.create(**ask, stop_sequences=[text[10:15]])
    check("anthropic", "stop_sequences", lambda: (lambda m: (m.stop_reason, m.stop_sequence) == ("stop_sequence", text[10:15]))(cut()))
    back = [*ONCE, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And then"}]
    check("anthropic", "an answer sent back", lambda: client.messages.create(**{**ask, "messages": back}).content)
    formed = lambda: client.messages.create(**{**ask, "max_tokens": 60}, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    check("anthropic", "structured output", lambda: 0 <= json.loads(formed().content[0].text)["age"] <= 99)
    other = anthropic.Anthropic(base_url=daemon.url, api_key="wrong", max_retries=0)
    check("anthropic", "wrong token: 401", lambda: refused(anthropic.AuthenticationError, lambda: other.messages.create(**ask)))
    bearer = anthropic.Anthropic(base_url=daemon.url, auth_token=daemon.token, max_retries=0)
    check("anthropic", "token as bearer", lambda: bearer.messages.create(**ask).content[0].text == text)
    unknown = lambda: client.messages.create(**{**ask, "model": "claude"})
    check("anthropic", "other model: 404", lambda: refused(anthropic.NotFoundError, unknown))
    bad = lambda: client.messages.create(**{**ask, "max_tokens": 0})
    check("anthropic", "bad field: 400", lambda: "max_tokens" in str(refused(anthropic.BadRequestError, bad)))


def anthropic_on_calls(daemon):
    client = anthropic.Anthropic(base_url=daemon.url, api_key=daemon.token, max_retries=0)
    tools = [
        {"name": "weather", "description": "The forecast.", "input_schema": FORECAST},
        {"name": "clock", "input_schema": {"type": "object", "properties": {}, "required": []}},
    ]
    rain = [{"role": "user", "content": "Rain?"}]
    ask = dict(model="model", max_tokens=200, messages=rain, tools=tools, extra_body={"temperature": 0})
    one = dict(tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    made = client.messages.create(**ask, **one)
    call = made.content[0]
    check("anthropic", "one tool", lambda: made.stop_reason == "tool_use" and call.name == "weather" and 1 <= call.input["days"] <= 9)

    def stream():
        with client.messages.stream(**ask, **one) as events:
            kinds = [event.type for event in events]
            final = events.get_final_message()
        return final.content[0].input == call.input and "input_json" in kinds and kinds[-1] == "message_stop"

    check("anthropic", "one tool, streamed", stream)

    def several():
        for seed in range(60):
            messages = rain
            drawn = {"temperature": 1.5, "seed": seed}
            made = client.messages.create(**{**ask, "max_tokens": 300, "extra_body": drawn}, tool_choice={"type": "any"})
            if made.stop_reason == "tool_use" and len(made.content) > 1:
                results = [{"type": "tool_result", "tool_use_id": c.id, "content": "sun"} for c in made.content]
                turns = [*messages, {"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
                return client.messages.create(**{**ask, "messages": turns, "max_tokens": 4}).usage.output_tokens
        return False

    check("anthropic", "two tools, results", several)
    thinks = dict(model="model", max_tokens=1100, messages=rain, thinking={"type": "enabled", "budget_tokens": 1024})

    def thoughts():
        with client.messages.stream(**thinks) as events:
            said = "".join(event.thinking for event in events if event.type == "thinking")
            final = events.get_final_message()
        turns = [*rain, {"role": "assistant", "content": final.content}, {"role": "user", "content": "So?"}]
        again = client.messages.create(model="model", max_tokens=4, messages=turns)
        return said and final.content[0].thinking == said and again.usage.input_tokens < 100

    check("anthropic", "thinking", thoughts)


def ollama_on_demo(daemon):
    client = ollama.Client(host=daemon.url, headers={"Authorization": f"Bearer {daemon.token}"})
    options = {"temperature": 0, "num_predict": 24}
    ask = dict(model="demo", messages=ONCE, options=options)
    whole = client.chat(**ask)
    text = whole.message.content
    check("ollama", "chat", lambda: len(text) > 20 and whole.done_reason == "length" and whole.eval_count == 24 and whole.total_duration)
    check("ollama", "chat, streamed", lambda: "".join(part.message.content for part in client.chat(**ask, stream=True)) == text)
    check("ollama", "generate", lambda: client.generate("demo", "Once upon a time", options=options).response == text)
    pieces = lambda: client.generate("demo", "Once upon a time", options=options, stream=True)
    check("ollama", "generate, streamed", lambda: "".join(part.response for part in pieces()) == text)
    check("ollama", "raw", lambda: client.generate("demo", "Once upon a time", raw=True, options=options).eval_count == 24)
    formed = lambda: client.chat(**{**ask, "options": {**options, "num_predict": 60}}, format=SCHEMA).message.content
    check("ollama", "structured output", lambda: 0 <= json.loads(formed())["age"] <= 99)
    check("ollama", "list", lambda: [model.model for model in client.list().models] == ["demo"])
    check("ollama", "ps", lambda: client.ps().models[0].size > 1 << 20)
    check("ollama", "show", lambda: "completion" in client.show("demo").capabilities)
    vectors = lambda: client.embed("demo", ["A cat sat.", "The king."]).embeddings
    check("ollama", "embed", lambda: all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors()) and len(vectors()) == 2)
    check("ollama", "embeddings", lambda: list(client.embeddings("demo", "The king.").embedding) == list(vectors()[1]))
    back = [*ONCE, whole.message, {"role": "user", "content": "And then"}]
    check("ollama", "an answer sent back", lambda: client.chat(**{**ask, "messages": back}).message.content)
    unknown = lambda: client.chat(**{**ask, "model": "llama3"})
    check("ollama", "other model: 404", lambda: refused(ollama.ResponseError, unknown).status_code == 404)
    images = lambda: client.generate("demo", "x", images=[b"x"])
    check("ollama", "images: 400", lambda: "images" in refused(ollama.ResponseError, images).error)
    without = ollama.Client(host=daemon.url)
    check("ollama", "no token: 401", lambda: refused(ollama.ResponseError, without.ps).status_code == 401)


def ollama_on_calls(daemon):
    client = ollama.Client(host=daemon.url, headers={"Authorization": f"Bearer {daemon.token}"})

    def weather(place: str, days: int) -> str:
        """The forecast.

        Args:
            place: a town
            days: how many
        """
        return f"{place}: {days} days of sun"

    tool = {"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": FORECAST}}

    def ask(seed, **more):
        messages = [{"role": "user", "content": "Rain?"}]
        options = {"temperature": 1.5, "seed": seed, "num_predict": 200}
        # With a form an answer is a number or a call: this model never begins one by itself.
        return messages, client.chat("model", messages, tools=[tool], format={"type": "integer"}, options=options, **more)

    def calls(at_least):
        for seed in range(200):
            messages, made = ask(seed)
            made_calls = made.message.tool_calls or []
            if len(made_calls) >= at_least and made.done_reason == "stop":
                streamed = [c for part in ask(seed, stream=True)[1] for c in part.message.tool_calls or []]
                results = [{"role": "tool", "tool_name": "weather", "content": weather(**c.function.arguments)} for c in made_calls]
                again = client.chat("model", [*messages, made.message, *results], options={"num_predict": 4})
                same = [c.function.arguments for c in streamed] == [c.function.arguments for c in made_calls]
                return same and again.eval_count <= 4
        return False

    plain = dict(messages=[{"role": "user", "content": "Rain?"}], options={"num_predict": 4})
    more = lambda: client.chat("model", tools=[weather], **plain).prompt_eval_count - client.chat("model", **plain).prompt_eval_count
    check("ollama", "a Python function as tool", lambda: more() > 50)
    check("ollama", "one tool, streamed, result", lambda: calls(1))
    check("ollama", "two tools, results", lambda: calls(2))
    check("ollama", "result of a call that the client made up", lambda: result_sent_back(client))
    thinks = dict(model="model", messages=[{"role": "user", "content": "Hi"}], think=True, options={"temperature": 0, "num_predict": 20})
    whole = client.chat(**thinks)
    said = lambda: "".join(part.message.thinking or "" for part in client.chat(**thinks, stream=True))
    check("ollama", "think", lambda: whole.message.thinking and said() == whole.message.thinking)
    check("ollama", "show: tools, thinking", lambda: {"tools", "thinking"} <= set(client.show("model").capabilities))


def result_sent_back(client):
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="weather", arguments={"place": "Rome", "days": 2}))
    messages = [
        {"role": "user", "content": "Rain?"},
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    return client.chat("model", messages, options={"num_predict": 4}).eval_count <= 4


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = folder / "model"
        model.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "tests/fixtures/models/qwen2" / name, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        with Daemon(program, folder / "demo", "demo") as daemon:
            for package, test in ((anthropic, anthropic_on_demo), (ollama, ollama_on_demo)):
                if package:
                    test(daemon)
        with Daemon(program, folder / "calls", model, "--ctx-size", "4096") as daemon:
            for package, test in ((anthropic, anthropic_on_calls), (ollama, ollama_on_calls)):
                if package:
                    test(daemon)
    for client, name, said in rows:
        print(f"| {client} | {name} | {said} |")
    failed = sum(said != "passed" for _, _, said in rows)
    skipped = [name for name, package in (("anthropic", anthropic), ("ollama", ollama)) if not package]
    print(f"{len(rows) - failed} of {len(rows)} passed" + (f"; not installed: {', '.join(skipped)}" if skipped else ""))
    sys.exit(failed > 0)


main()
