"""dynamicinfer under Ray Serve: replicas that each run one `dynamicinfer serve`, and a front that streams through Ray's HTTP.

    pip install "ray[serve]>=2.60"
    RAY_worker_niceness=0 ray start --head                     # or replicas are 15 nicer than what started Ray, and so are their daemons
    serve run dynamicinfer_serve:app model=demo               # then POST http://127.0.0.1:8000/v1/chat/completions

Arguments (NAME=VALUE): model, program (the path of dynamicinfer), options (of `serve`, one text), least and most (replicas), target (answers
of a replica from which on Ray starts another), cores and gpus of a replica, token_file (a bearer token a line; without it everybody who
reaches the port may ask). docs/serve.md says when this is worth having; tools/ray_check.py tries this file.

A request that no replica has begun to answer is given to another one when its replica dies, is full or has no model. A stream that has
begun ends with an error event and without [DONE]. Requests with one X-Session-Id go to one replica while it lives and has room.
"""

import asyncio
import hashlib
import json
import os
import random
import shlex
import subprocess
import tempfile
from pathlib import Path

import aiohttp
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# What is handed on; /v1/x, which steers a daemon, is not.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/tokenize", "/detokenize")
# Answers that another replica may give better.
ELSEWHERE = (429, 503)
ATTEMPTS = 4
LARGEST_BODY = 32 << 20
# Ends the daemon when its replica is gone, however it went: its end of the pipe is closed then.
TIED = '"$@" <&- & daemon=$!; read -r _; kill "$daemon"; wait "$daemon"'


@serve.deployment
class Replica:
    """One daemon on a socket of its own."""

    def __init__(self, model, program, options):
        self.dir = tempfile.TemporaryDirectory(prefix="dynamicinfer-ray-")
        self.socket = str(Path(self.dir.name) / "socket")
        command = [program, "serve", model, "--socket", self.socket, *shlex.split(options)]
        self.daemon = subprocess.Popen(["sh", "-c", TIED, "sh", *command], stdin=subprocess.PIPE)
        self.http = None
        self.name = serve.get_replica_context().replica_id.unique_id

    def session(self):
        """The client of the daemon; made where the event loop runs."""
        if self.http is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self.http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.socket, limit=0), timeout=timeout)
        return self.http

    async def ready(self):
        """Waits until the model answers."""
        while True:
            if self.daemon.poll() is not None:
                raise RuntimeError(f"the daemon has ended with {self.daemon.returncode}")
            try:
                async with self.session().get("http://daemon/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.05)

    async def check_health(self):
        """Ray replaces a replica whose daemon cannot work any more."""
        if self.daemon.poll() is not None:
            raise RuntimeError(f"the daemon has ended with {self.daemon.returncode}")

    async def answer(self, method, path, headers, body):
        """First status and headers, then the bytes as the daemon sends them."""
        await self.ready()
        async with self.session().request(method, f"http://daemon{path}", data=body or None, headers=headers) as got:
            told = {name: value for name, value in got.headers.items() if name.lower() in ("content-type", "retry-after", "x-request-id")}
            yield json.dumps([got.status, {**told, "x-replica": self.name}]).encode()
            async for piece in got.content.iter_any():
                yield piece


class BySession(RequestRouter):
    """The replica that a session hashes to, since its daemon keeps the session's keys; without a session the emptier of two.

    Every front comes to the same answer without asking anybody, and a replica that comes or goes moves its own share of the sessions only.
    (Ray's multiplexing learns where a name has been from its controller, seconds later: until then the next requests go anywhere.)
    """

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        """Replicas in the order in which they are asked whether they have room."""
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            session = pending_request.metadata.session_id
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def weight(replica):
            return hashlib.sha256(f"{session}\n{replica.replica_id.unique_id}".encode()).digest()

        order = sorted(candidate_replicas, key=weight, reverse=True)
        # The first is asked three times, since one that is slow to answer is not one that is full; Ray waits longer each time.
        return [[replica] for replica in [order[0], order[0], *order]]


@serve.deployment
class Front:
    """Checks who asks, and gives each request to a replica."""

    def __init__(self, replicas, token_file):
        self.replicas = replicas
        lines = Path(token_file).read_text().splitlines() if token_file else []
        self.tokens = {f"Bearer {line.strip()}" for line in lines if line.strip()}
        self.retried = 0

    async def __call__(self, request: Request):
        path = request.url.path
        if path == "/health":
            return JSONResponse({"retried": self.retried})
        if self.tokens and request.headers.get("authorization") not in self.tokens:
            return refusal(401, "the bearer token is missing or wrong")
        if not path.startswith(PATHS):
            return refusal(404, "there is nothing here")
        body = await request.body()
        if len(body) > LARGEST_BODY:
            return refusal(413, f"the body has more than {LARGEST_BODY} bytes")
        headers = {"content-type": request.headers.get("content-type", "application/json"), "x-real-ip": request.client.host}
        handle = self.replicas.options(stream=True, session_id=request.headers.get("x-session-id", ""))
        why = "no replica answers"
        for attempt in range(ATTEMPTS):
            pieces = handle.answer.remote(request.method, path, headers, body)
            try:
                status, told = json.loads(await anext(pieces))
                streams = told.get("Content-Type", told.get("content-type", "")).startswith("text/event-stream")
                # Of what is no stream nothing is sent before all of it is here: until then another replica may answer.
                whole = None if streams else b"".join([piece async for piece in pieces])
            except Exception as error:  # whatever ended the replica
                why = f"{type(error).__name__} before the answer began"
                self.retried += 1
                await asyncio.sleep(0.1 * attempt)
                continue
            if status in ELSEWHERE and attempt + 1 < ATTEMPTS:
                pieces.cancel()
                self.retried += 1
                await asyncio.sleep(0.2 * (attempt + 1))
                continue
            if not streams:
                return Response(whole, status_code=status, headers=told)
            return StreamingResponse(handed_on(pieces), status_code=status, headers=told)
        return refusal(503, why)


def refusal(status, message):
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse({"error": {"message": message, "type": kind}}, status_code=status, headers=headers)


async def handed_on(pieces):
    """A stream's bytes. Where it breaks off, it says so."""
    try:
        async for piece in pieces:
            yield piece
    except asyncio.CancelledError:
        pieces.cancel()
        raise
    except Exception as error:
        message = f"the replica is gone in the middle of the answer ({type(error).__name__})"
        yield b"\n\ndata: " + json.dumps({"error": {"message": message, "type": "server_error"}}).encode() + b"\n\n"


def app(args):
    """The application, for `serve run` and `serve deploy`."""
    program = args.get("program") or os.environ.get("DYNAMICINFER", "dynamicinfer")
    scaling = {
        "min_replicas": int(args.get("least", 1)),
        "max_replicas": int(args.get("most", 2)),
        "target_ongoing_requests": float(args.get("target", 4)),
        "upscale_delay_s": float(args.get("up_after", 10)),
        "downscale_delay_s": float(args.get("down_after", 300)),
        "metrics_interval_s": 1.0,
        "look_back_period_s": 3.0,
    }
    replicas = Replica.options(
        autoscaling_config=scaling,
        request_router_config=RequestRouterConfig(request_router_class=BySession),
        # As many as the daemon takes: serve.parallel and a part of serve.queue. Above this they wait in Ray, where another replica may
        # take them.
        max_ongoing_requests=16,
        # Answers that are under way are waited for when a replica goes.
        graceful_shutdown_timeout_s=120,
        health_check_period_s=2,
        health_check_timeout_s=10,
        ray_actor_options={"num_cpus": float(args.get("cores", 1)), "num_gpus": float(args.get("gpus", 0))},
    ).bind(args.get("model", "demo"), program, args.get("options", ""))
    front = Front.options(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1})
    return front.bind(replicas, args.get("token_file", ""))
