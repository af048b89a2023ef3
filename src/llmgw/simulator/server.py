"""The simulated engine's HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import ipaddress
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from llmgw.simulator import answers, text
from llmgw.simulator.faults import BadFault, FaultKind, parse_late
from llmgw.simulator.options import Options
from llmgw.simulator.ranks import NoSuchRank
from llmgw.simulator.rendezvous import Gone
from llmgw.simulator.requests import (
    BadRequest,
    Generation,
    read_chat,
    read_completion,
    read_dimensions,
    read_inputs,
    read_json,
)
from llmgw.simulator.work import Work

BODY_LIMIT_BYTES = 64 * 1024 * 1024
MOST_DIMENSIONS = 4096

_PUBLIC = frozenset({"/health", "/v1/health"})

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes and their handlers. Requests are refused as ``Loading model`` until ``open``."""

    def __init__(self, options: Options, work: Work) -> None:
        self._options = options
        self._work = work
        self._loading = True
        self._ids = itertools.count(1)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._gate])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/embeddings", self._embeddings),
                web.post("/v1/rerank", self._rerank),
                web.get("/metrics", self._metrics),
                web.get("/sim/stats", self._stats),
                web.post("/sim/fault", self._fault),
            ]
        )
        return app

    def open(self) -> None:
        """The model is loaded. Raises BadFault where the fault that was asked for can't be had."""
        self._loading = False
        self._work.strike(self._options.fault)

    @web.middleware
    async def _gate(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Order matters: /sim is for this machine only, a missing key shows before a missing model."""
        try:
            if request.path.startswith("/sim/"):
                _require_loopback(request)
            elif request.path not in _PUBLIC:
                self._require_key(request)
            if self._loading and not request.path.startswith("/sim/"):
                raise BadRequest("Loading model", status=503, type="unavailable_error")
            return await handler(request)
        except Gone:
            # This process is about to end as well; its client sees what it would see of one that was killed.
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        except BadRequest as refused:
            body = answers.error(str(refused), status=refused.status, type=refused.type)
            return web.json_response(body, status=refused.status)
        except web.HTTPException as failed:
            message = "File Not Found" if failed.status == 404 else failed.reason
            body = answers.error(message, status=failed.status, type=_type_of(failed.status))
            return web.json_response(body, status=failed.status)

    def _require_key(self, request: web.Request) -> None:
        wanted = self._options.api_key
        if not wanted:
            return
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
            raise BadRequest("Invalid API Key", status=401, type="authentication_error")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        fault = self._work.fault
        if fault is not None and fault.kind is FaultKind.HEALTH_500:
            raise BadRequest("simulated fault: health-500", status=500, type="server_error")
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        options = self._options
        return web.json_response(answers.models(options.model, options.aliases, options.context))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        return await self._generate(request, read_chat(body))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        return await self._generate(request, read_completion(body))

    async def _generate(self, request: web.Request, asked: Generation) -> web.StreamResponse:
        self._require_room(asked.prompt_tokens)
        said, reason = text.tokens(asked.prompt, asked.max_tokens, asked.stop, asked.ignore_eos)
        shape = answers.Shape(asked, id=f"{next(self._ids):08d}", model=self._options.model)
        async with self._work.request(asked.prompt_tokens):
            if asked.stream:
                return await self._stream(request, asked, shape, said, reason)
            text_said = "".join([token async for token in self._work.paced(said)])
        return web.json_response(shape.whole(text_said, reason, len(said)))

    async def _stream(
        self, request: web.Request, asked: Generation, shape: answers.Shape, said: list[str], reason: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        opening = shape.opening()
        if opening is not None:
            await response.write(opening)
        async for token in self._work.paced(said):
            await response.write(shape.piece(token))
        await response.write(shape.closing(reason))
        if asked.include_usage:
            await response.write(shape.counted(len(said)))
        await response.write(answers.DONE)
        await response.write_eof()
        return response

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        inputs = read_inputs(body, "input")
        length = read_dimensions(body, text.VECTOR_LENGTH, MOST_DIMENSIONS)
        encoding = body.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise BadRequest("Expected 'encoding_format' to be float or base64")
        tokens = sum(text.count_tokens(item) for item in inputs)
        async with self._work.request(tokens):
            await self._work.compute()
            vectors = [text.vector(item, length) for item in inputs]
        model = self._options.model
        answer = answers.embeddings(vectors, as_base64=encoding == "base64", model=model, tokens=tokens)
        return web.json_response(answer)

    async def _rerank(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        query = body.get("query")
        if not isinstance(query, str):
            raise BadRequest("Expected 'query' to be a string")
        documents = read_inputs(body, "documents")
        top = body.get("top_n")
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise BadRequest("Expected 'top_n' to be a whole number, from 1")
        tokens = sum(text.count_tokens(item) for item in (query, *documents))
        async with self._work.request(tokens):
            await self._work.compute()
            scores = [text.score(query, document) for document in documents]
        return web.json_response(answers.ranking(scores, top=top, model=self._options.model, tokens=tokens))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = read_json(await request.read())
        asked = body.get("model", self._options.model)
        served = (self._options.model, *self._options.aliases)
        if asked not in served:
            words = f"The model {asked!r} is not served here; this engine serves {', '.join(served)}"
            raise BadRequest(words, status=404, type="not_found_error")
        return body

    def _require_room(self, prompt_tokens: int) -> None:
        context = self._options.context
        if context is not None and prompt_tokens >= context:
            raise BadRequest(
                f"the request exceeds the available context size ({prompt_tokens} tokens, {context} available)",
                type="exceed_context_size_error",
            )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body = answers.metrics(self._work.stats).encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        fault = self._work.fault
        stats = {**dataclasses.asdict(self._work.stats), "fault": str(fault) if fault else None}
        return web.json_response({**stats, "ranks": list(self._work.ranks.shown())})

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        """``{"kind": "KIND[:ARG]"}``, or ``{"kind": null}`` to behave again; with ``"rank": N`` for another rank."""
        body = read_json(await request.read())
        kind, rank = body.get("kind"), body.get("rank", 0)
        if "kind" not in body or not isinstance(kind, str | None):
            raise BadRequest('Expected {"kind": "KIND[:ARG]"}, or {"kind": null} to behave again')
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise BadRequest("Expected 'rank' to be a whole number, from 0")
        try:
            fault = parse_late(kind, rank) if kind is not None else None
            if rank == 0:
                self._work.strike(fault)
            else:
                await self._work.ranks.strike(rank, kind)
        except (BadFault, NoSuchRank) as error:
            raise BadRequest(str(error)) from None
        return await self._stats(request)


def _require_loopback(request: web.Request) -> None:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not peer or not ipaddress.ip_address(peer[0]).is_loopback:
        raise BadRequest(
            f"{request.path} is for this machine's own processes only", status=403, type="permission_error"
        )


def _type_of(status: int) -> str:
    return "not_found_error" if status == 404 else "invalid_request_error"
