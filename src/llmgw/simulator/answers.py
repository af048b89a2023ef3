"""The shapes of the simulated engine's answers, those of llama-server."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmgw.simulator.requests import Generation
from llmgw.simulator.work import Stats
from llmgw.version import VERSION

FINGERPRINT = f"llmgw-sim-{VERSION}"
DONE = b"data: [DONE]\n\n"


def error(message: str, *, status: int, type: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "code": status}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Shape:
    """One generation's answer, whole or in chunks."""

    def __init__(self, asked: Generation, *, id: str, model: str) -> None:
        self._asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        streamed = "chat.completion.chunk" if asked.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{id}",
            "object": streamed if asked.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, text: str, reason: str, completion_tokens: int) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice], "usage": usage(self._asked.prompt_tokens, completion_tokens)}

    def opening(self) -> bytes | None:
        """A chat's first chunk names the role; a completion has none."""
        return self._chunk({"role": "assistant", "content": None}, None) if self._asked.chat else None

    def piece(self, token: str) -> bytes:
        return self._chunk({"content": token} if self._asked.chat else token, None)

    def closing(self, reason: str) -> bytes:
        return self._chunk({} if self._asked.chat else "", reason)

    def counted(self, completion_tokens: int) -> bytes:
        """The chunk that carries the usage, where the client asked for it."""
        body = {**self._head, "choices": [], "usage": usage(self._asked.prompt_tokens, completion_tokens)}
        return _event(body)

    def _chunk(self, delta: object, reason: str | None) -> bytes:
        said = {"delta": delta} if self._asked.chat else {"text": delta}
        return _event({**self._head, "choices": [{"index": 0, **said, "finish_reason": reason}]})


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def models(name: str, aliases: Sequence[str], context: int | None) -> dict[str, Any]:
    entry = {
        "id": name,
        "aliases": list(aliases),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llmgw-sim",
        "meta": {"n_ctx": context},
    }
    return {"object": "list", "data": [entry]}


def embeddings(vectors: Sequence[Sequence[float]], *, as_base64: bool, model: str, tokens: int) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": at, "embedding": _packed(vector) if as_base64 else list(vector)}
        for at, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def ranking(scores: Sequence[float], *, top: int | None, model: str, tokens: int) -> dict[str, Any]:
    ranked = sorted(enumerate(scores), key=lambda item: -item[1])[:top]
    results = [{"index": at, "relevance_score": score} for at, score in ranked]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "results": results, "usage": usage}


def metrics(stats: Stats) -> str:
    """Prometheus text."""
    rows = (
        ("llmgw_sim_requests_total", "counter", "Requests for work, begun.", stats.requests),
        ("llmgw_sim_requests_cancelled_total", "counter", "Requests whose client had gone.", stats.cancelled),
        ("llmgw_sim_requests_active", "gauge", "Requests being worked on or waiting.", stats.active),
        ("llmgw_sim_requests_running", "gauge", "Requests being worked on.", stats.active - stats.waiting),
        ("llmgw_sim_requests_waiting", "gauge", "Requests waiting for a slot.", stats.waiting),
        ("llmgw_sim_prompt_tokens_total", "counter", "Tokens of prompts taken in.", stats.prompt_tokens),
        ("llmgw_sim_tokens_total", "counter", "Tokens given out.", stats.tokens),
    )
    return "".join(f"# HELP {name} {words}\n# TYPE {name} {kind}\n{name} {n}\n" for name, kind, words, n in rows)
