"""Which routes there are, and the answers that the gateway gives by itself."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

import msgspec

from llmgw.cluster.model import Route
from llmgw.gateway.errors import ApiError
from llmgw.gateway.request import Api, Request
from llmgw.gateway.table import Table, allowed
from llmgw.link.messages import RoutesKey

PROXIED = (
    Api(b"/v1/chat/completions", b"POST", proxied=True, streams=True),
    Api(b"/v1/completions", b"POST", proxied=True, streams=True),
    Api(b"/v1/embeddings", b"POST", proxied=True),
)
MODELS = Api(b"/v1/models", b"GET", proxied=False)
MODEL = Api(b"/v1/models/", b"GET", proxied=False)

BY_PATH = {api.path: api for api in (*PROXIED, MODELS)}
_EXISTING = "POST /v1/chat/completions, POST /v1/completions, POST /v1/embeddings, GET /v1/models, GET /v1/models/{id}"


def find(method: bytes, path: bytes) -> Api:
    """Raises ApiError: 404 for a path that is not there, 405 for a wrong method."""
    api = BY_PATH.get(path)
    if api is None:
        if path.startswith(MODEL.path) and len(path) > len(MODEL.path):
            api = MODEL
        else:
            shown = path.decode("utf-8", "replace")
            raise ApiError(404, f"there is no route {shown!r} here; there are: {_EXISTING}", code="unknown_url")
    if method != api.method:
        allow = api.method.decode()
        raise ApiError(
            405,
            f"{method.decode()} is not a method of {path.decode('utf-8', 'replace')!r}: use {allow}",
            code="method_not_allowed",
            allow=f"{allow}, OPTIONS",
        )
    return api


def preflight_lines(request: Request) -> bytes:
    """Headers of the answer to a CORS preflight: what a browser wants to send is what it may send."""
    return b"access-control-allow-methods: GET, POST, OPTIONS\r\naccess-control-allow-headers: %b\r\n%b" % (
        request.preflight_headers or b"*",
        b"access-control-max-age: 86400\r\nvary: access-control-request-headers\r\n",
    )


def models_body(table: Table, key: RoutesKey) -> bytes:
    """All names that this key may ask for, aliases included."""
    entries = [_entry(name, route) for name, route in _served(table, key)]
    return msgspec.json.encode({"object": "list", "data": entries})


def model_body(table: Table, key: RoutesKey, path: bytes) -> bytes:
    """One of them, by the path that names it. Raises ApiError (404)."""
    name = unquote_to_bytes(path[len(MODEL.path) :]).decode("utf-8", "replace")
    route = table.routes.get(name)
    if route is None or not allowed(key, route):
        raise no_such_model(name, table, key)
    return msgspec.json.encode(_entry(name, route))


def no_such_model(name: str, table: Table, key: RoutesKey) -> ApiError:
    served = ", ".join(name for name, _ in _served(table, key)) or "none"
    return ApiError(
        404, f"there is no model {name!r} here; models served: {served}", code="model_not_found", param="model"
    )


def not_allowed(name: str, key: RoutesKey) -> ApiError:
    return ApiError(
        403,
        f"this API key may not use the model {name!r}; it may use: {', '.join(key.models)}",
        type="permission_error",
        code="model_not_allowed",
        param="model",
    )


def _served(table: Table, key: RoutesKey) -> Iterator[tuple[str, Route]]:
    for name, route in sorted(table.routes.items()):
        if allowed(key, route):
            yield name, route


def _entry(name: str, route: Route) -> dict[str, object]:
    # When a model was made is not known here; clients require an integer.
    entry: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "llmgw"}
    if name != route.model:
        entry["root"] = route.model
    return entry
