#!/usr/bin/env python3
"""Records what clients send: their request bodies, as tests/serve/recorded.rs sends them to a daemon.

    python3 -m venv venv && venv/bin/pip install openai openai-agents langchain-openai 'pydantic-ai-slim[openai]' instructor litellm
    npm install --prefix node ai @ai-sdk/openai-compatible zod @openai/codex @qwen-code/qwen-code opencode-ai
    venv/bin/python tools/clients/record.py [--node node] [CLIENT ...]

Each client that is installed holds the same conversations with a server that answers by script: a chat, a stream, a call of a function and its
result, an answer of a form. Every body that the server gets becomes a file in tests/fixtures/clients, with long texts cut to a few words and
without the client's own prompts. Prints a table of clients, conversations and requests; ends with 1 if a client gave up.
"""
import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "tests" / "fixtures" / "clients"
MODEL = "gpt-4o-mini"
SAID = "It will be sunny."
# Characters of a text that are kept: prompts of clients are theirs.
KEPT = 60
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def made_up(schema, root=None):
    """A value that fits a JSON schema of the kind that clients make."""
    root = root if root is not None else schema
    if "$ref" in schema:
        found = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return made_up(found, root)
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return made_up(schema[word][0], root)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        wanted = schema.get("required", schema.get("properties", {}))
        return {name: made_up(part, root) for name, part in schema.get("properties", {}).items() if name in wanted}
    if kind == "array":
        return [made_up(schema.get("items", {"type": "string"}), root)]
    return {"integer": 3, "number": 1.5, "boolean": True, "null": None}.get(kind, "Rome")


def wanted_form(body):
    """The JSON schema of the answer that a body asks for, if any."""
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_object":
        return {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
    return form.get("schema") or (form.get("json_schema") or {}).get("schema")


def functions(body):
    """Name and schema of the functions that a body offers, those about the weather first."""
    tools = [tool.get("function", tool) for tool in body.get("tools") or [] if tool.get("type") == "function"]
    found = [(tool["name"], tool.get("parameters") or {}) for tool in tools]
    return sorted(found, key=lambda tool: "weather" not in tool[0])


def answered(body):
    """Whether the conversation has the result of a call."""
    said = body.get("messages") or body.get("input") or []
    return any(isinstance(m, dict) and (m.get("role") == "tool" or m.get("type") == "function_call_output") for m in said)


def answer(body):
    """The script: a call where a function is offered that has not been called, then text. ("call", name, arguments) or ("text", text)."""
    tools = functions(body)
    if tools and body.get("tool_choice") != "none" and (not answered(body) or body.get("tool_choice") == "required"):
        name, schema = tools[-1 if answered(body) else 0]
        return "call", name, json.dumps(made_up(schema) or {})
    schema = wanted_form(body)
    return "text", json.dumps(made_up(schema)) if schema else SAID


USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
USED = {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}}


def chat(body):
    """The events of a chat, or its whole object."""
    kind, *what = answer(body)
    head = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
    if kind == "call":
        call = {"id": "call_1", "type": "function", "function": {"name": what[0], "arguments": what[1]}}
        message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **call}]}
    else:
        message, reason = {"role": "assistant", "content": what[0]}, "stop"
        delta = message
    if not body.get("stream"):
        return {**head, "object": "chat.completion", "usage": USAGE,
                "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}]}
    chunk = lambda delta, reason: {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    return [chunk(delta, None), chunk({}, reason), {**head, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}, "[DONE]"]


def response(body):
    """The events of a response, or its whole object."""
    kind, *what = answer(body)
    if kind == "call":
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": what[0], "arguments": what[1], "status": "completed"}
        begun = {**item, "arguments": "", "status": "in_progress"}
        middle = [("response.function_call_arguments.delta", {"delta": what[1]}), ("response.function_call_arguments.done", {"arguments": what[1]})]
    else:
        part = {"type": "output_text", "text": what[0], "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        begun = {**item, "content": [], "status": "in_progress"}
        at = {"content_index": 0}
        middle = [("response.content_part.added", {**at, "part": {**part, "text": ""}}), ("response.output_text.delta", {**at, "delta": what[0]}),
                  ("response.output_text.done", {**at, "text": what[0]}), ("response.content_part.done", {**at, "part": part})]
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed", "output": [item], "usage": USED,
             "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None, "instructions": None,
             "metadata": {}, "temperature": 1.0, "top_p": 1.0}
    if not body.get("stream"):
        return whole
    started = {**whole, "status": "in_progress", "output": [], "usage": None}
    place = {"output_index": 0, "item_id": item["id"]}
    events = [("response.created", {"response": started}), ("response.output_item.added", {"output_index": 0, "item": begun}),
              *[(name, {**place, **more}) for name, more in middle],
              ("response.output_item.done", {"output_index": 0, "item": item}), ("response.completed", {"response": whole})]
    return [{"type": name, "sequence_number": i, **more} for i, (name, more) in enumerate(events)]


class Script(BaseHTTPRequestHandler):
    """Answers by script and notes the bodies. A client that goes away is no error."""

    taken = []
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, data, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "script"}]}
        self.reply(json.dumps(models).encode())

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw)
        except ValueError:
            return self.reply(b"{}")
        path = self.path.split("?")[0]
        if not path.endswith(("/chat/completions", "/responses")):
            return self.reply(b"{}")
        Script.taken.append((path[path.index("/v1"):] if "/v1" in path else "/v1" + path, body))
        said = (chat if path.endswith("completions") else response)(body)
        if isinstance(said, dict):
            return self.reply(json.dumps(said).encode())
        named = lambda e: f"event: {e['type']}\n" if isinstance(e, dict) and "type" in e else ""
        lines = "".join(f"{named(e)}data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in said)
        return self.reply(lines.encode(), "text/event-stream")


# Clients: each a function from the base URL to the conversations that it had.

def weather(place: str, days: int) -> str:
    """The forecast for a place."""
    return f"{place}: {days} days of sun"


def with_openai(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Rain?"}])
    parameters = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                  "required": ["place", "days"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    client.chat.completions.create(**ask)
    yield "chat"
    list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    yield "stream"
    made = client.chat.completions.create(**ask, tools=[tool]).choices[0].message
    result = {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "sun"}
    client.chat.completions.create(**{**ask, "messages": [*ask["messages"], made.model_dump(), result]}, tools=[tool])
    yield "call and result, model_dump"
    from pydantic import BaseModel

    class Forecast(BaseModel):
        place: str
        days: int

    assert client.chat.completions.parse(**ask, response_format=Forecast).choices[0].message.parsed.days == 3
    assert client.responses.parse(model=MODEL, input="Rain?", text_format=Forecast).output_parsed.days == 3
    yield "form"
    with client.responses.stream(model=MODEL, input="Rain?", reasoning={"effort": "low", "summary": "auto"}) as events:
        assert SAID in events.until_done().get_final_response().output_text
    yield "response, stream"


def with_agents(url):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    # One for each run: its connections belong to the run's event loop.
    client = lambda: openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    tool = agents.function_tool(weather)
    from pydantic import BaseModel

    class Forecast(BaseModel):
        place: str
        days: int

    for name, model in (("responses", agents.OpenAIResponsesModel), ("chat", agents.OpenAIChatCompletionsModel)):
        def agent(**more):
            return agents.Agent(name="Agent", instructions="Be brief.", model=model(model=MODEL, openai_client=client()), **more)

        assert SAID in agents.Runner.run_sync(agent(tools=[tool]), "Rain?").final_output
        yield f"{name}: loop with a tool"
        assert agents.Runner.run_sync(agent(output_type=Forecast), "Rain?").final_output.days == 3
        yield f"{name}: form"

        async def streamed():
            run = agents.Runner.run_streamed(agent(tools=[tool]), "Rain?")
            return [event async for event in run.stream_events()]

        assert asyncio.run(streamed())
        yield f"{name}: loop, stream"


def with_langchain(url):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Forecast(BaseModel):
        """A forecast."""
        place: str
        days: int

    for name, responses in (("chat", False), ("responses", True)):
        model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", use_responses_api=responses, max_retries=0)
        assert model.invoke("Rain?").text
        list(model.stream("Rain?"))
        yield f"{name}: chat, stream"
        said = [HumanMessage("Rain?")]
        calling = model.bind_tools([tool(weather)])
        made = calling.invoke(said)
        said += [made, ToolMessage("sun", tool_call_id=made.tool_calls[0]["id"])]
        assert calling.invoke(said).text
        yield f"{name}: call and result"
        assert model.with_structured_output(Forecast).invoke("Rain?").days == 3
        yield f"{name}: form"


def with_pydantic_ai(url):
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    class Forecast(BaseModel):
        place: str
        days: int

    for name, kind in (("chat", models.OpenAIChatModel), ("responses", models.OpenAIResponsesModel)):
        model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
        assert SAID in Agent(model, tools=[weather], instructions="Be brief.").run_sync("Rain?").output
        yield f"{name}: loop with a tool"
        assert Agent(model, output_type=Forecast).run_sync("Rain?").output.days == 3
        yield f"{name}: form"


def with_instructor(url):
    import instructor
    import openai
    from pydantic import BaseModel

    class Forecast(BaseModel):
        place: str
        days: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        ask = dict(model=MODEL, response_model=Forecast, messages=[{"role": "user", "content": "Rain?"}])
        assert client.chat.completions.create(**ask).days == 3
        yield mode.name.lower()


def with_litellm(url):
    import litellm

    ask = dict(model=f"openai/{MODEL}", api_base=url, api_key="none", messages=[{"role": "user", "content": "Rain?"}])
    litellm.completion(**ask)
    yield "chat"
    list(litellm.completion(**ask, stream=True))
    yield "stream"


def program(node, name, *arguments, files=(), **environment):
    """Runs a program of Node's in an empty folder that is its home, too."""
    with tempfile.TemporaryDirectory() as home:
        for path, text in files:
            Path(home, path).parent.mkdir(parents=True, exist_ok=True)
            Path(home, path).write_text(text)
        own = {"PATH": os.environ["PATH"], "HOME": home, "NO_COLOR": "1", **environment}
        command = [str(node / "node_modules" / ".bin" / name), *arguments]
        done = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    said = done.stdout + done.stderr
    if SAID not in said:
        raise RuntimeError(f"{name}: {said[-300:]}")


def with_ai_sdk(url, node):
    script = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText, tool, stepCountIs } from 'ai';
import { z } from 'zod';
const model = createOpenAICompatible({ name: 'local', baseURL: process.env.BASE, apiKey: 'none' })('gpt-4o-mini');
const weather = tool({ description: 'The forecast for a place.', inputSchema: z.object({ place: z.string(), days: z.number().int() }),
  execute: async ({ place, days }) => `${place}: ${days} days of sun` });
console.log((await generateText({ model, prompt: 'Rain?', tools: { weather }, stopWhen: stepCountIs(3) })).text);
const stream = streamText({ model, prompt: 'Rain?' });
for await (const piece of stream.textStream) process.stdout.write(piece);
"""
    path = node / "record.mjs"
    path.write_text(script)
    done = subprocess.run(["node", path], env={**os.environ, "BASE": url}, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count(SAID) == 2, done.stderr[-300:]
    yield "loop with a tool, stream"


def with_codex(url, node):
    settings = f'model = "{MODEL}"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\nbase_url = "{url}"\nwire_api = "responses"\n'
    program(node, "codex", "exec", "--skip-git-repo-check", "Rain?", files=[(".codex/config.toml", settings)])
    yield "exec"


def with_qwen_code(url, node):
    program(node, "qwen", "-p", "Rain?", OPENAI_BASE_URL=url, OPENAI_API_KEY="none", OPENAI_MODEL=MODEL)
    yield "prompt"


def with_opencode(url, node):
    models = {"local": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": url, "apiKey": "none"}, "models": {MODEL: {}}}}
    program(node, "opencode", "run", "--model", f"local/{MODEL}", "Rain?", files=[("opencode.json", json.dumps({"provider": models}))])
    yield "run"


PYTHON = {"openai": with_openai, "openai-agents": with_agents, "langchain-openai": with_langchain, "pydantic-ai-slim": with_pydantic_ai,
          "instructor": with_instructor, "litellm": with_litellm}
NODE = {"ai": with_ai_sdk, "@openai/codex": with_codex, "@qwen-code/qwen-code": with_qwen_code, "opencode-ai": with_opencode}


def shortened(value):
    """A body without the client's own texts: a long one becomes a few words."""
    if isinstance(value, dict):
        return {key: shortened(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    if isinstance(value, str) and re.search(UUID, value):
        return re.sub(UUID, "00000000-0000-4000-8000-000000000000", value)
    if isinstance(value, str) and (len(value) > KEPT or "/" in value and "://" not in value and " " in value):
        return f"A text of {len(value)} characters."
    return value


def node_version(node, name):
    """The version of a package of Node's; `None` if it is not installed."""
    path = node / "node_modules" / name / "package.json"
    return json.loads(path.read_text())["version"] if path.exists() else None


def record(name, found, run):
    """Runs a client and writes its bodies. (requests, why it gave up)"""
    Script.taken, had, why = [], [], ""
    try:
        had.extend(run())
    except Exception as error:  # a client's own errors are many
        why = f"{type(error).__name__}: {str(error)[:300]}"
    bodies, seen = [], set()
    for path, body in Script.taken:
        short = {"path": path, "body": shortened(body)}
        text = json.dumps(short, sort_keys=True)
        if text not in seen:
            seen.add(text)
            bodies.append(short)
    if bodies:
        file = OUT / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
        file.write_text(json.dumps({"client": name, "version": found, "requests": bodies}, indent=1, ensure_ascii=False) + "\n")
    print(f"| {name} {found} | {', '.join(had)} | {len(bodies)} | {why} |", flush=True)
    return why


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("clients", nargs="*", help="these alone")
    arguments.add_argument("--node", type=Path, default=Path("node"), help="the folder of `npm install --prefix`")
    given = arguments.parse_args()
    ThreadingHTTPServer.handle_error = lambda *_: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    OUT.mkdir(parents=True, exist_ok=True)
    print("| client | conversations | requests | gave up |\n|---|---|---|---|")
    failed = False
    for name, run in {**PYTHON, **NODE}.items():
        if given.clients and name not in given.clients:
            continue
        if name in PYTHON:
            try:
                found = version(name)
            except PackageNotFoundError:
                continue
            failed |= bool(record(name, found, lambda run=run: run(url)))
        elif found := node_version(given.node, name):
            failed |= bool(record(name, found, lambda run=run: run(url, given.node.resolve())))
    sys.exit(failed)


if __name__ == "__main__":
    main()
