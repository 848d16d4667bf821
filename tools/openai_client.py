"""Runs the openai Python package, and LangChain if it is there, against a daemon's Unix socket.

    python3 -m venv venv && venv/bin/pip install openai langchain-openai
    dynamicinfer serve demo --socket /tmp/d.sock &
    venv/bin/python tools/openai_client.py /tmp/d.sock

Prints one line per check and ends with 1 if one failed; without the package it says so and ends with 0.
"""

import json
import sys

try:
    import openai
except ImportError:
    print("skipped: the openai package is not installed (pip install openai)")
    sys.exit(0)
try:
    import httpx2 as httpx  # what openai is built on since 3.51
except ImportError:
    import httpx

http = httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1]))
client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
ASK = dict(model="demo", messages=[{"role": "user", "content": "Once upon a time"}], temperature=0, max_tokens=24)
failed = 0


def check(name, good, shown=""):
    global failed
    failed += not good
    print(("ok      " if good else "FAILED  ") + name, "" if good else shown)


def refused(kind, **request):
    try:
        client.chat.completions.create(**{**ASK, **request})
    except kind as error:
        return error
    return None


check("models", [m.id for m in client.models.list()] == ["demo"])
whole = client.chat.completions.create(**ASK)
text = whole.choices[0].message.content
check("chat", len(text) > 20 and whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24)
chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
check("stream", streamed == text, streamed)
check("usage chunk", chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices)
check("usage: null before it", all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1]))
back = [*ASK["messages"], whole.choices[0].message.model_dump(), {"role": "user", "content": "And then"}]
check("an answer sent back", client.chat.completions.create(**{**ASK, "messages": back}).choices)
back[1]["reasoning_content"] = "A story."
kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
check("thoughts, template", client.chat.completions.create(**{**ASK, "messages": back}, extra_body=kwargs).choices)
stop = text[10:15]
cut = client.chat.completions.create(**ASK, stop=[stop])
check("stop", cut.choices[0].message.content == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop")
seeded = lambda: client.chat.completions.create(**{**ASK, "temperature": 1.5}, seed=7).choices[0].message.content
check("seed", seeded() == seeded())
logprobs = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices[0].logprobs.content
check("logprobs", "".join(t.token for t in logprobs) == text and all(len(t.top_logprobs) == 3 for t in logprobs))
check("n", len(client.chat.completions.create(**{**ASK, "temperature": 1}, n=3).choices) == 3)
schema = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
structured = client.chat.completions.create(
    **ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
)
check("json schema", 0 <= json.loads(structured.choices[0].message.content)["age"] <= 99)
check("completions", client.completions.create(model="demo", prompt="Once", max_tokens=4).usage.completion_tokens == 4)
check("other model: 404", refused(openai.NotFoundError, model="gpt-9").code == "model_not_found")
check("bad field: 400", refused(openai.BadRequestError, n=99).param == "n")
long = [{"role": "user", "content": "word " * 3000}]
check("too long: 400", refused(openai.BadRequestError, messages=long).code == "context_length_exceeded")
forecast = {"name": "forecast", "parameters": {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}}
CALL = {**ASK, "max_tokens": 100, "tools": [{"type": "function", "function": forecast}], "tool_choice": "required"}
made = client.chat.completions.create(**CALL, reasoning_effort="low").choices[0]
called = made.message.tool_calls[0]
arguments = json.loads(called.function.arguments)
check("tool call", made.finish_reason == "tool_calls" and called.function.name == "forecast" and arguments["days"] > 0)
pieces = [c.choices[0].delta.tool_calls for c in client.chat.completions.create(**CALL, stream=True) if c.choices]
pieces = [piece for calls in pieces for piece in calls or []]
check("tool call, streamed", json.loads("".join(p.function.arguments or "" for p in pieces)) == arguments)
odd = {"name": "odd", "parameters": {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?!a)"}}}}
odd = [*CALL["tools"], {"type": "function", "function": odd}]
raw = client.chat.completions.with_raw_response.create(**{**CALL, "tools": odd, "tool_choice": "auto"})
place = "/tools/1/function/parameters/properties/x/pattern"
check("a pattern beyond grammars", raw.headers["x-dynamicinfer-unenforced"] == place, raw.headers)
odd[1]["function"]["strict"] = True
check("the same, strict: 400", refused(openai.BadRequestError, tools=odd).code == "unsupported_schema")
form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
both = client.chat.completions.create(**{**CALL, "tool_choice": "auto"}, response_format=form).choices[0].message
check("tools beside a form", both.tool_calls or 0 <= json.loads(both.content)["age"] <= 99, both)
result = {"role": "tool", "tool_call_id": called.id, "content": "sunny"}
turns = [*ASK["messages"], made.message.model_dump(), result]
check("tool result", client.chat.completions.create(**{**CALL, "messages": turns, "tool_choice": "auto"}).choices)
NEW = dict(model="demo", input="Once upon a time", temperature=0, max_output_tokens=24)
response = client.responses.create(**NEW)
check("responses", response.output_text == text and response.status == "incomplete", response.output_text)
events = list(client.responses.create(**NEW, stream=True))
streamed = "".join(e.delta for e in events if e.type == "response.output_text.delta")
check("responses, streamed", streamed == text and events[-1].response.usage.output_tokens == 24, streamed)
vectors = client.embeddings.create(model="demo", input=["A cat sat.", "The king."]).data
check("embeddings", all(abs(sum(x * x for x in v.embedding) - 1) < 1e-3 for v in vectors) and len(vectors) == 2)
running = client.chat.completions.create(**{**ASK, "max_tokens": 400}, stream=True, extra_body={"ignore_eos": True})
next(iter(running))
running.close()
check("cancel", client.chat.completions.create(**ASK).choices[0].message.content == text)

try:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="demo", base_url="http://localhost/v1", api_key="none", http_client=http, temperature=0, max_tokens=24
    )
    check("langchain invoke", model.invoke("Once upon a time").content == text)
    check("langchain stream", "".join(c.content for c in model.stream("Once upon a time")) == text)
except ImportError:
    print("skipped: langchain (pip install langchain-openai)")
print(f"openai {openai.__version__}: {failed} failed")
sys.exit(failed > 0)
