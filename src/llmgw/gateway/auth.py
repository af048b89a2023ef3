"""Who asks: API keys, compared by their hashes."""

from __future__ import annotations

import hashlib

from llmgw.gateway.errors import ApiError
from llmgw.gateway.table import Table
from llmgw.link.messages import RoutesKey

ACCEPTED = "'Authorization: Bearer sk-...' or 'x-api-key: sk-...'"


def authenticate(token: bytes, table: Table) -> RoutesKey:
    """The key that was sent, as the table knows it. Raises ApiError (401)."""
    if not token:
        raise _refused(f"no API key was sent: send one as {ACCEPTED}")
    key = table.seen.get(token)
    if key is not None:
        return key
    key = table.keys.get(hashlib.sha256(token).hexdigest())
    if key is None:
        raise _refused(
            "the API key is not valid here: it was mistyped, or revoked. "
            "An operator makes one with 'llmgw ctl key create'"
        )
    table.seen[token] = key
    return key


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
