"""A server with vLLM's routes and no model, which fails on request.

It starts exactly as the real one (`test_vllm_real.py`): as ``python -m vllm.entrypoints.openai.api_server`` from a
folder that `test_vllm.site` lays out. The first id of a prompt, the name of a weights file and ``--fake`` say how it
behaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

CORE, DIE, HANG, FAIL, UNTIL_SWAP, NAN = 249, 250, 251, 252, 253, 254
"""First ids of prompts. CORE to UNTIL_SWAP act after two tokens: a worker fails, and the server says it is ill; the
process dies; it hangs; it sends an error; it waits for new weights. NAN gives invalid logprobs."""


class State:
    def __init__(self, version: str) -> None:
        self.vllm = version
        self.weights = "default"
        self.served = ""
        self.arrived = ""
        self.reloads: list[str] = []
        self.adapters: dict[str, str] = {}
        self.peak = 0
        self.running = 0
        self.most_running = 0
        self.generated = 0
        self.changed = asyncio.Condition()
        self.go = asyncio.Event()
        self.go.set()
        self.requests: list[dict[str, Any]] = []
        self.connections: set[Any] = set()
        self.ill = False
        self.asleep: set[str] = set()
        self.loras = 4
        """Largest number of adapters at once."""
        self.fails: dict[str, int] = {}
        """Routes that answer with 500, after this number of calls."""
        self.hangs: set[str] = set()
        self.calls: list[str] = []

    async def wait_for_swap(self) -> None:
        """Wait until the weights change or there are two adapters."""
        began = self.weights
        async with self.changed:
            await self.changed.wait_for(lambda: self.weights != began or len(self.adapters) > 1)
        await self.go.wait()


STATE = web.AppKey("STATE", State)


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def generate(request: web.Request) -> web.StreamResponse:
    state: State = request.app[STATE]
    body = await request.json()
    state.requests.append(body)
    state.connections.add(request.transport)
    if body["model"] not in ("policy", *state.adapters):
        return error(404, f"The model `{body['model']}` does not exist.")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    state.running += 1
    state.most_running = max(state.most_running, state.running)
    try:
        await stream(state, body, response)
    finally:
        state.running -= 1
        async with state.changed:
            state.changed.notify_all()
    return response


async def stream(state: State, body: dict[str, Any], response: web.StreamResponse) -> None:
    first, count = body["token_ids"][0], body["sampling_params"]["max_tokens"]
    spans: list[dict[str, Any]] = []
    for n in range(count):
        await state.go.wait()
        if n == 2:
            if first == DIE:
                os._exit(7)
            if first == HANG:
                await asyncio.Event().wait()
            if first == CORE:
                state.ill = True
                print("(Worker pid=1) ERROR 11-21 23:58:25 [runner.py:1] RuntimeError: no offset", flush=True)
                print("(APIServer pid=2) ERROR 11-21 23:58:25 [llm.py:1] vllm.EngineDeadError: see above", flush=True)
                await response.write(b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n')
                return
            if first == FAIL:
                await response.write(b'data: {"error": {"message": "out of luck"}}\n\n')
                return
            if first == UNTIL_SWAP:
                await state.wait_for_swap()
        if not spans or spans[-1]["version"] != state.weights:
            spans.append({"version": state.weights, "start": n, "end": n})
        spans[-1]["end"] = n + 1
        state.generated += 1
        logprob = {"token_id": n, "logprob": -9999.0 if first == NAN else -0.125}
        choice = {
            "token_ids": [n],
            "logprobs": {"content": [logprob]},
            "finish_reason": "length" if n + 1 == count else None,
            "weight_versions": spans if n + 1 == count else None,
        }
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")


async def collective_rpc(request: web.Request) -> web.Response:
    state: State = request.app[STATE]
    body = await request.json()
    if body["method"] == "receive_policy":
        return web.json_response({"results": [await asyncio.to_thread(receive, state, *body["args"])]})
    if body["method"] == "load_received":
        assert not state.go.is_set(), "weights change while requests run"
        arrived, state.arrived = state.arrived, ""
        state.served = arrived or state.served
        return web.json_response({"results": [{} if arrived else {"error": "nothing has arrived"}]})
    assert body["method"] == "reload_policy" and "weights" not in state.asleep
    folder = Path(body["args"][0])
    name = next(folder.glob("*.safetensors")).resolve(strict=True).name
    assert not state.go.is_set(), "weights change while requests run"
    state.reloads.append(name)
    if name.startswith("die"):
        os._exit(9)
    if name.startswith("hang"):
        await asyncio.Event().wait()
    if name.startswith("refuse"):
        state.served = "half of " + name
        return web.json_response({"results": [{}, {"error": "shape mismatch"}]})
    state.served = name
    return web.json_response({"results": [{}, {}]})


def receive(state: State, offer: str, receivers: int, seconds: float, checksum: str) -> dict[str, str]:
    """Receive weights as the worker's extension does."""
    from coderepairrl.sync import wire  # it loads torch

    state.arrived = ""
    try:
        _, state.arrived = wire.receive(Path(offer), 1, receivers, seconds)
    except (OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"checksum": state.arrived}


async def change(request: web.Request) -> web.Response:
    state: State = request.app[STATE]
    body = await request.json() if request.can_read_body else {}
    path = request.path
    state.calls.append(f"{path}?{request.query_string}".rstrip("?"))
    state.fails[path] = state.fails.get(path, -1) - 1
    if state.fails[path] == -1:
        return error(500, "CUDA out of memory")
    if path in state.hangs:
        await asyncio.sleep(5.0)
    if path == "/sleep":
        assert request.query["mode"] == "keep" and request.query["level"] == "1"
        state.asleep = {"weights", "kv_cache"}
        state.go.clear()
    elif path == "/wake_up":
        assert state.asleep, "it is awake"
        state.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        if not state.asleep:
            state.go.set()
        return web.json_response({"status": "sleeping" if state.asleep else "awake"})
    elif path == "/pause":
        assert request.query["mode"] == "keep"
        state.go.clear()
    elif path == "/resume":
        assert not state.asleep, "it sleeps"
        state.go.set()
    elif path == "/update_weight_version":
        state.weights = body["new_version"]
    elif path == "/v1/load_lora_adapter":
        if body["lora_name"] in state.adapters:
            return error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        state.adapters[body["lora_name"]] = body["lora_path"]
        state.peak = max(state.peak, len(state.adapters))
    elif path == "/v1/unload_lora_adapter" and state.adapters.pop(body["lora_name"], None) is None:
        return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
    async with state.changed:
        state.changed.notify_all()
    return web.json_response({"success": True})


async def answer(request: web.Request) -> web.Response:
    state: State = request.app[STATE]
    if request.path == "/health" and state.ill:
        return web.Response(status=503)
    if request.path == "/metrics":
        return web.Response(
            text=f'# HELP x\nvllm:num_requests_running{{engine="0"}} {state.running}.0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {state.generated}.0\n'
        )
    answers: dict[str, Any] = {
        "/health": {},
        "/version": {"version": state.vllm},
        "/get_world_size": {"world_size": 1},
        "/server_info": {
            "vllm_config": {"lora_config": {"max_lora_rank": 8, "max_loras": state.loras} if state.loras else None}
        },
        "/openapi.json": {"paths": {route: {} for route in ROUTES}},
        "/v1/models": {
            "data": [
                {"id": "policy", "max_model_len": 512},
                *({"id": name, "root": path, "parent": "policy"} for name, path in state.adapters.items()),
            ]
        },
    }
    return web.json_response(answers[request.path])


CHANGES = ("/pause", "/resume", "/update_weight_version", "/reset_prefix_cache", "/v1/load_lora_adapter",
           "/v1/unload_lora_adapter", "/sleep", "/wake_up")  # fmt: skip
ROUTES = ("/inference/v1/generate", "/collective_rpc", *CHANGES)


def make_app(version: str = "0.32.0") -> web.Application:
    app = web.Application()
    app[STATE] = State(version)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/collective_rpc", collective_rpc)
    for route in CHANGES:
        app.router.add_post(route, change)
    for route in ("/health", "/metrics", "/version", "/openapi.json", "/v1/models", "/get_world_size", "/server_info"):
        app.router.add_get(route, answer)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--fake", default="", choices=["", "die", "hang", "family"])
    parser.add_argument("--note", type=Path)
    options, _ = parser.parse_known_args()
    if options.fake == "die":
        sys.exit("RuntimeError: no memory for the keys")
    if options.fake == "hang":
        print("Loading weights: 1 of 100", flush=True)
        time.sleep(1000)
    if options.fake == "family":  # as vLLM has workers
        worker = subprocess.Popen(["sleep", "1000"])
        left = tempfile.mkstemp()[1]  # as vLLM leaves sockets
        options.note.write_text(f"{os.getppid()} {os.getpid()} {worker.pid} {options.uds} {left}")
    web.run_app(make_app(), path=options.uds, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
