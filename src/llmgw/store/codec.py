"""Rows as JSON text, and back.

A row of an older llmgw that lacks a field loads with that field's default; a field that is not known is ignored.
What could not be read back is refused before it is written.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, ValidationError

from llmgw.cluster.model import Drain, EngineHistory, Node, Replica
from llmgw.store.base import ApiKey, Event, StoreError
from llmgw.store.bounds import with_bounded_story
from llmgw.store.identities import Certificate, Revocation, Token

T = TypeVar("T")

LIVE_FIELDS = frozenset({"session", "vitals", "heard_at_s", "shards", "caught_up", "silent"})
"""Fields of a node that belong to its session: agents tell them anew, so they are not stored."""


CLOCK_FIELDS = frozenset({"drained_from_s", "drained_by_s", "whole_by_s"})
"""Fields of a replica that are times of one control plane's own clock: they mean nothing to the next one."""


class Codec(Generic[T]):
    """Encodes values of one type as JSON text. ``noun`` names it in errors; ``without`` is not stored."""

    def __init__(self, of: type[T], noun: str, *, without: frozenset[str] = frozenset()) -> None:
        self._of = of
        self._noun = noun
        self._without = without

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        # Built at the first use: it takes a tenth of a second, and importing a module should take none.
        return TypeAdapter(self._of)

    def encode(self, row: str, value: T) -> str:
        """JSON text of ``value``; ``row`` is its id. Raises StoreError where it would not come back."""
        try:
            text = self._adapter.dump_json(value, exclude=set(self._without), warnings="error").decode()
            self._adapter.validate_json(text)
        except (PydanticSerializationError, ValidationError, UnicodeError) as error:
            raise StoreError(
                f"{self._noun} {row!r} can't be stored, and nothing of this step was written: {_first_line(error)}"
            ) from error
        return text

    def decode(self, row: str, text: str) -> T:
        """The value in ``text``. Raises StoreError naming the row."""
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            raise StoreError(
                f"the stored {self._noun} {row!r} can't be read: {_first_line(error)}. "
                "Nothing was changed. Run the llmgw that wrote it, or restore a backup (docs/backup.md)"
            ) from error


def _first_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"]) or "the whole"
    return f"{where}: {fault['msg']}, found {fault['input']!r:.80}"


NODES = Codec(Node, "node", without=LIVE_FIELDS)
REPLICAS = Codec(Replica, "replica", without=CLOCK_FIELDS)
DRAINS = Codec(Drain, "drain")
ENGINES = Codec(EngineHistory, "engine")
EVENTS = Codec(Event, "event")
KEYS = Codec(ApiKey, "key")
CERTIFICATES = Codec(Certificate, "certificate")
TOKENS = Codec(Token, "token")
REVOCATIONS = Codec(Revocation, "revocation")


def encode_node(node: Node) -> str:
    return NODES.encode(node.id, node)


def encode_replica(replica: Replica) -> str:
    return REPLICAS.encode(replica.id, with_bounded_story(replica))


def encode_drain(drain: Drain) -> str:
    return DRAINS.encode(drain.node, drain)


def encode_engine(history: EngineHistory) -> str:
    return ENGINES.encode(history.name, history)


def encode_event(event: Event) -> str:
    return EVENTS.encode(event.id, event)


def encode_key(key: ApiKey) -> str:
    return KEYS.encode(key.id, key)


def encode_certificate(certificate: Certificate) -> str:
    return CERTIFICATES.encode(certificate.serial, certificate)


def encode_token(token: Token) -> str:
    return TOKENS.encode(token.id, token)


def encode_revocation(revocation: Revocation) -> str:
    return REVOCATIONS.encode(revocation.id, revocation)


def without_clock(replica: Replica) -> Replica:
    """The replica as it comes back from a store."""
    return with_bounded_story(replace(replica, drained_from_s=0.0, drained_by_s=0.0, whole_by_s=0.0))


def without_session(node: Node) -> Node:
    """The node as it comes back from a store."""
    live: dict[str, Any] = {field.name: field.default for field in fields(Node) if field.name in LIVE_FIELDS}
    return replace(node, **live)
