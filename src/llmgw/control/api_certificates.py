"""The part of the admin API that is about identity: tokens, certificates, and the authority."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from llmgw.control import certificate_operations as operations
from llmgw.control.api_operations import Strict
from llmgw.control.certificate_operations import LONGEST_TTL_S, CertificateAsked, Identities
from llmgw.control.certificate_views import (
    AuthorityView,
    CertificateView,
    RevokedView,
    TokenView,
    authority_view,
    certificate_view,
)
from llmgw.control.errors import not_found

LABEL = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"
Label = Annotated[str, StringConstraints(pattern=rf"^{LABEL}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{0,100}$")]


class TokenBody(Strict):
    ttl_s: float = Field(default=900.0, ge=1, le=LONGEST_TTL_S, allow_inf_nan=False)
    labels: dict[Label, LabelValue] = Field(default_factory=dict, max_length=50)
    replace: bool = False


class RevokeBody(Strict):
    why: str = Field(default="revoked by an operator", min_length=1, max_length=300)


def add_certificates(router: APIRouter, rooms: Identities) -> None:
    plane = rooms.plane

    @router.post("/nodes/{name}/token", status_code=201)
    async def mint_token(name: str, body: TokenBody | None = None) -> TokenView:
        """A string by which one machine joins as this node, once. It is shown this once."""
        body = body or TokenBody()
        return await operations.mint_token(rooms, name, ttl_s=body.ttl_s, labels=body.labels, take_over=body.replace)

    @router.get("/certificates")
    async def certificates(node: str | None = None) -> list[CertificateView]:
        now = plane.now().wall_s
        found = [each for each in plane.book.certificates() if node in (None, each.node)]
        return [certificate_view(each, now) for each in sorted(found, key=lambda each: (each.node, each.issued_at))]

    @router.get("/certificates/{name}")
    async def certificate(name: str) -> list[CertificateView]:
        """One by its serial, or all of a node."""
        book, now = plane.book, plane.now().wall_s
        by_serial = book.certificate(name.lower())
        found = [by_serial] if by_serial is not None else [each for each in book.certificates() if each.node == name]
        if not found:
            raise not_found("node or serial", name, sorted({each.node for each in book.certificates()}))
        return [certificate_view(each, now) for each in found]

    @router.post("/certificates/{name}/revoke")
    async def revoke(name: str, body: RevokeBody | None = None) -> RevokedView:
        """By a node's name all of its certificates, by a serial that one."""
        return await operations.revoke(rooms, name, (body or RevokeBody()).why)

    @router.post("/certificates/{name}/renew")
    async def renew(name: str) -> CertificateAsked:
        """Asks a node to renew its certificate now."""
        return operations.ask_to_renew(rooms, name)

    @router.get("/authority")
    async def authority() -> AuthorityView:
        return authority_view(plane, rooms.own)
