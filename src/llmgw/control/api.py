"""The admin API: what ``ctl`` and scripts talk to. Reads take the cluster as it is; writes go through the plane."""

from __future__ import annotations

import asyncio
import hmac
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmgw.cluster.engines import rollback_words
from llmgw.cluster.lifecycle import LEAVING
from llmgw.cluster.model import Gateway
from llmgw.control import views
from llmgw.control.api_certificates import add_certificates
from llmgw.control.api_operations import Strict, add_operations
from llmgw.control.certificate_operations import Identities
from llmgw.control.certificate_views import expiry_warning
from llmgw.control.crl_file import CrlFile
from llmgw.control.desk import Desk
from llmgw.control.drain_views import brake_view, drain_views
from llmgw.control.engine_views import EngineView, engine_views
from llmgw.control.errors import ApiError, not_found
from llmgw.control.keys import digest, new_key
from llmgw.control.logs import Logs, LogsUnavailable
from llmgw.control.metrics import exposition
from llmgw.control.names import model_named, node_named
from llmgw.control.plane import NotWritten, Plane
from llmgw.control.reload import Reloader
from llmgw.link.server import Peer
from llmgw.store.base import StoreError
from llmgw.version import VERSION


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the API speaks for."""

    plane: Plane
    desk: Desk
    logs: Logs
    reloader: Reloader
    admin_token_hash: str
    identities: Identities | None = None
    crl: CrlFile | None = None


BODY_LIMIT_BYTES = 1 << 20
FAULTS_SAID = 10
NUMBER = re.compile(r"[0-9]{1,4}")
BEARER = HTTPBearer(auto_error=False)


class ScaleBody(Strict):
    replicas: int = Field(ge=0, le=10_000)


class KeyBody(Strict):
    name: str = Field(min_length=1, max_length=100)
    models: tuple[str, ...] = ()


class KeyMade(BaseModel):
    id: str
    name: str
    key: str


def make_app(rooms: Rooms) -> FastAPI:
    app = FastAPI(title="llmgw admin API", version=VERSION, docs_url="/docs", redoc_url=None, redirect_slashes=False)
    app.add_middleware(BodyLimit)
    app.include_router(_public(rooms))
    app.include_router(_admin(rooms), dependencies=[Depends(_bearer(rooms.admin_token_hash))])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StoreError, _store_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _fault)
    return app


class BodyLimit:
    """Reads no more of a request's body than any request here needs: it is read before the token is looked at."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY_LIMIT_BYTES:
                raise HTTPException(413, f"the body is larger than {BODY_LIMIT_BYTES} bytes")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def _public(rooms: Rooms) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok\n"

    @router.get("/readyz")
    async def readyz() -> PlainTextResponse:
        trouble = rooms.plane.trouble
        return PlainTextResponse(f"{trouble}\n" if trouble else "ok\n", status_code=503 if trouble else 200)

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(exposition(rooms.plane, rooms.desk, rooms.crl), media_type=CONTENT_TYPE_LATEST)

    return router


def _admin(rooms: Rooms) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    _reads(router, rooms)
    _writes(router, rooms)
    serials = rooms.identities.serials if rooms.identities is not None else None
    add_operations(router, rooms.plane, rooms.reloader.path.parent, serials)
    if rooms.identities is not None:
        add_certificates(router, rooms.identities)
    _streams(router, rooms)
    return router


def _reads(router: APIRouter, rooms: Rooms) -> None:
    plane, desk = rooms.plane, rooms.desk

    @router.get("/status")
    async def status() -> views.StatusView:
        return _status(plane, desk)

    @router.get("/nodes")
    async def nodes() -> list[views.NodeView]:
        shown = views.node_views(plane.cluster, plane.now().monotonic_s)
        return [_with_expiry(plane, view) for view in shown]

    @router.get("/nodes/{name}")
    async def node(name: str) -> views.NodeView:
        found = node_named(plane.cluster, name)
        return _with_expiry(plane, views.node_view(found, plane.now().monotonic_s, views.held_on(plane.cluster, name)))

    @router.get("/models")
    async def models() -> list[views.ModelView]:
        return views.model_views(plane.cluster)

    @router.get("/models/{name:path}/why")
    async def why(name: str) -> views.WhyView:
        return views.why_view(plane.cluster, model_named(plane.cluster, name))

    @router.get("/replicas")
    async def replicas() -> list[views.ReplicaView]:
        cluster, now = plane.cluster, plane.now()
        return [views.replica_view(cluster, replica, now) for _, replica in sorted(cluster.replicas.items())]

    @router.get("/replicas/{name:path}")
    async def replica(name: str) -> views.ReplicaView:
        if (found := plane.cluster.replicas.get(name)) is None:
            raise not_found("replica", name, list(plane.cluster.replicas))
        return views.replica_view(plane.cluster, found, plane.now(), story=True)

    @router.get("/engines")
    async def engines() -> list[EngineView]:
        return engine_views(plane.cluster)

    @router.get("/keys")
    async def keys() -> list[views.KeyView]:
        return [views.key_view(key) for key in plane.keys.values()]


def _writes(router: APIRouter, rooms: Rooms) -> None:
    plane = rooms.plane

    @router.put("/models/{name:path}/scale")
    async def scale(name: str, body: ScaleBody) -> views.ModelView:
        model = model_named(plane.cluster, name)

        async def act() -> None:
            await plane.set_scale(model, body.replicas)
            plane.note("model.scale", model, f"scaled to {body.replicas}")

        await plane.ask(act)
        return views.model_view(plane.cluster, model)

    @router.delete("/models/{name:path}/scale")
    async def unscale(name: str) -> views.ModelView:
        model = model_named(plane.cluster, name)

        async def act() -> None:
            await plane.set_scale(model, None)
            plane.note("model.scale", model, "back to what the file says")

        await plane.ask(act)
        return views.model_view(plane.cluster, model)

    @router.post("/keys", status_code=201)
    async def create_key(body: KeyBody) -> KeyMade:
        for name in body.models:
            model_named(plane.cluster, name)
        key, text = new_key(body.name, body.models, plane.now().wall_s)

        async def act() -> None:
            await plane.put_key(key)
            plane.note("key.created", key.id, f"key {key.name!r} created")

        await plane.ask(act)
        return KeyMade(id=key.id, name=key.name, key=text)

    @router.delete("/keys/{name}")
    async def revoke_key(name: str) -> views.KeyView:
        if (key := plane.keys.get(name)) is None:
            raise not_found("key", name, [f"{key.id} ({key.name})" for key in plane.keys.values()])
        if key.revoked_at is not None:
            return views.key_view(key)
        revoked = replace(key, revoked_at=plane.now().wall_s)

        async def act() -> None:
            await plane.put_key(revoked)
            plane.note("key.revoked", key.id, f"key {key.name!r} revoked")

        await plane.ask(act)
        return views.key_view(revoked)

    @router.post("/reload")
    async def reload() -> dict[str, list[str]]:
        return {"changed": list(await rooms.reloader.reload())}

    @router.post("/halt")
    async def halt() -> views.StatusView:
        """Stops every replica and starts nothing more until this control plane is started anew."""

        async def act() -> None:
            plane.halt()
            plane.note("control.halting", "", "every replica is being stopped: asked for by an operator")

        await plane.ask(act)
        return _status(plane, rooms.desk)

    @router.get("/backup")
    async def backup() -> FileResponse:
        folder = tempfile.TemporaryDirectory(prefix="llmgw-backup-")
        path = Path(folder.name) / "llmgw.db"
        try:
            await plane.store.backup(str(path))
        except BaseException:
            folder.cleanup()
            raise
        return FileResponse(path, filename="llmgw.db", background=BackgroundTask(folder.cleanup))


def _streams(router: APIRouter, rooms: Rooms) -> None:
    plane = rooms.plane

    @router.get("/events")
    async def events(
        after: str | None = None,
        subject: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0,
    ) -> list[views.EventView]:
        """The newest events, or those after an id; with ``wait_s`` it waits that long for the first one."""
        until = plane.now().monotonic_s + wait_s
        while True:
            news = plane.news
            found = await plane.store.events(after=after, subject=subject, limit=limit)
            left_s = until - plane.now().monotonic_s
            if found or left_s <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()
        return [views.event_view(event) for event in found]

    @router.get("/shards/{shard:path}/logs")
    async def shard_logs(
        shard: str, lines: Annotated[int, Query(ge=1, le=100_000)] = 100, follow: bool = False
    ) -> StreamingResponse:
        peer = _peer_of(rooms, shard)
        reading = rooms.logs.read(peer, shard, lines, follow)
        try:
            rest = await reading.__aenter__()
        except LogsUnavailable as error:
            raise ApiError(502, "logs_unavailable", f"the output of {shard} can't be read: {error}") from error

        async def body() -> AsyncIterator[str]:
            try:
                async for line in rest():
                    yield line + "\n"
            finally:
                await reading.__aexit__(None, None, None)

        return StreamingResponse(body(), media_type="text/plain; charset=utf-8")


def _with_expiry(plane: Plane, view: views.NodeView) -> views.NodeView:
    """The agent says by itself why its certificate was not renewed, where it can say anything."""
    if any("certificate" in words for words in view.warnings):
        return view
    words = expiry_warning(plane.book, view.id, plane.now().wall_s)
    return replace(view, warnings=(*view.warnings, words)) if words else view


def _peer_of(rooms: Rooms, shard: str) -> Peer:
    replica_id, _, rank = shard.rpartition("/")
    replica = rooms.plane.cluster.replicas.get(replica_id)
    if replica is None or not NUMBER.fullmatch(rank):
        known = [
            found.shard_id(n) for found in rooms.plane.cluster.replicas.values() for n in range(len(found.placements))
        ]
        raise not_found("shard", shard, known)
    placements = replica.placements or replica.previous
    if placements and int(rank) >= len(placements):
        words = f"{replica.id} has no rank {rank}: its ranks are 0 to {len(placements) - 1}"
        raise ApiError(404, "no_such_rank", words, f"llmgw ctl logs {replica.id}/0")
    if not placements:
        raise ApiError(
            404, "shard_not_placed", f"{shard} is not placed: {replica.why}", f"llmgw ctl why {replica.model}"
        )
    node = placements[int(rank)].node
    if (desk := rooms.desk.nodes.get(node)) is None:
        raise ApiError(
            503, "node_disconnected", f"{shard} is on {node}, which is not connected", f"llmgw ctl node {node}"
        )
    return desk.peer


def _status(plane: Plane, desk: Desk) -> views.StatusView:
    cluster = plane.cluster
    models = views.model_views(cluster)
    return views.StatusView(
        cluster=cluster.name,
        version=VERSION,
        epoch=plane.epoch,
        trouble=plane.trouble,
        halting=cluster.halting,
        table_version=desk.table_version,
        nodes=dict(Counter(str(node.state) for node in cluster.nodes.values())),
        replicas=dict(Counter(str(replica.state) for replica in cluster.replicas.values())),
        models_ready=sum(1 for model in models if model.ready),
        models=len(models),
        gateways=tuple(_gateway(plane, desk, gateway) for _, gateway in sorted(cluster.gateways.items())),
        brake=brake_view(cluster.brake),
        drains=drain_views(cluster),
        rolled_back={name: rollback_words(each) for name, each in sorted(cluster.engines.items()) if each.rolled_back},
        lacking={model.name: model.replicas - model.ready for model in models if model.ready < model.replicas},
    )


def _gateway(plane: Plane, desk: Desk, gateway: Gateway) -> views.GatewayView:
    here = desk.gateways.get(gateway.id)
    left_s = gateway.heard_at_s + plane.cluster.lease_s - plane.now().monotonic_s
    return views.GatewayView(
        id=gateway.id,
        address=here.peer.address if here else "",
        version=here.peer.hello.version if here else "",
        table_sent=here.sent if here else 0,
        table_acked=here.acked if here else 0,
        connected=gateway.connected,
        may_send_for_s=None if gateway.connected else max(0.0, round(left_s, 1)),
        in_flight=sum(
            traffic.in_flight
            for replica, traffic in gateway.traffic.items()
            if replica in plane.cluster.replicas and plane.cluster.replicas[replica].state in LEAVING
        ),
    )


def _bearer(token_hash: str) -> Callable[..., Awaitable[None]]:
    async def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if credentials is None:
            raise ApiError(401, "no_token", "this needs the admin token", "give it with --token or LLMGW_TOKEN")
        if not hmac.compare_digest(digest(credentials.credentials), token_hash):
            raise ApiError(
                401, "wrong_token", "that admin token is not this control plane's", "see its admin-token file"
            )

    return check


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


async def _store_error(_: Request, error: Exception) -> JSONResponse:
    code, what = (
        ("not_written", "taken up") if isinstance(error, NotWritten) else ("store_unavailable", "nothing was changed")
    )
    body = ApiError(503, code, f"{what}: {error}", "see the control plane's log")
    return JSONResponse(body.body(), status_code=503)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, "http", words, "see /docs").body(), status_code=error.status_code)


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = "; ".join(_fault_in_words(fault) for fault in error.errors()[:FAULTS_SAID])
    return JSONResponse(ApiError(422, "malformed", faults, "see /docs").body(), status_code=422)


def _fault_in_words(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault.get('ctx', {}).get('error', fault['msg'])}"
    return f"{'.'.join(str(part) for part in fault['loc'][1:]) or 'the body'}: {fault['msg']}"


async def _fault(_: Request, error: Exception) -> JSONResponse:
    # What happened stands in the log, with its traceback: the server writes it there once this is answered.
    words = f"a fault of llmgw's own: {type(error).__name__}"
    return JSONResponse(ApiError(500, "fault", words, "see the control plane's log").body(), status_code=500)
