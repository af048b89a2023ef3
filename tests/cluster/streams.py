"""Clients of the gateway, each in a thread, with what they saw."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.cluster.lab import Lab


@dataclass
class Stream:
    """One streamed chat. ``begun`` is set at its first token."""

    tokens: int = 0
    done: bool = False
    error: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def join(self, within_s: float = 60.0) -> None:
        assert self.thread is not None
        self.thread.join(within_s)
        assert not self.thread.is_alive(), f"a stream hangs after {self.tokens} tokens"


def start_streams(lab: Lab, key: str, count: int, tokens: int, model: str = "sim", **asked: Any) -> list[Stream]:
    """Returns once every stream has had its first token. ``asked``: more of what the request asks for."""
    streams = [Stream() for _ in range(count)]
    for stream in streams:
        stream.thread = threading.Thread(
            target=run_stream, args=(stream, lab.endpoint, key, tokens, model), kwargs=asked, daemon=True
        )
        stream.thread.start()
    for stream in streams:
        assert stream.begun.wait(60), f"a stream did not begin: {stream.error}"
    return streams


def ask(lab: Lab, key: str, timeout_s: float = 60.0, model: str = "sim") -> httpx2.Response:
    """One chat that is not streamed."""
    with httpx2.Client(timeout=timeout_s, trust_env=False) as client:
        return client.post(f"{lab.endpoint}/chat/completions", headers=_headers(key), json=_body(model, 5))


def run_stream(stream: Stream, endpoint: str, key: str, tokens: int, model: str, **asked: Any) -> None:
    body = {**_body(model, tokens), "stream": True, **asked}
    try:
        with (
            httpx2.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{endpoint}/chat/completions", headers=_headers(key), json=body) as answer,
        ):
            if answer.status_code != 200:
                stream.error = answer.read().decode()
                return
            for line in answer.iter_lines():
                _take(stream, line)
    except httpx2.HTTPError as error:
        stream.error = repr(error)
    finally:
        stream.begun.set()


def _take(stream: Stream, line: str) -> None:
    if line == "data: [DONE]":
        stream.done = True
    elif line.startswith("data: "):
        chunk = json.loads(line[6:])
        if "error" in chunk:
            stream.error = str(chunk["error"])
        elif chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            stream.tokens += 1
            stream.begun.set()


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _body(model: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
