"""Certificates as the admin API shows them, and what people should be warned of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.control import lines
from llmgw.control.book import Book
from llmgw.control.own_identity import OwnIdentity
from llmgw.control.plane import Plane
from llmgw.control.times import rfc3339
from llmgw.pki.certificate import facts_of
from llmgw.store.identities import Certificate

SOON_S = 30 * 86_400.0
SOON_PART = 1 / 4
"""A certificate is warned of when a quarter of its life is left, and a month before its end at the earliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateView:
    serial: str
    node: str
    role: str
    source: str
    state: str
    """``next``, ``current``, ``retired``, ``superseded``, ``revoked`` or, where it would be current, ``expired``."""
    issued_at: str
    not_after: str | None
    previous: str
    first_used_at: str | None
    ended_at: str | None
    why: str
    issuer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """``token`` is shown this once: only a hash of its secret is kept."""

    id: str
    node: str
    token: str
    expires_at: str
    addresses: tuple[str, ...]
    labels: Mapping[str, str]
    replace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedReplicaView:
    id: str
    model: str
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedView:
    node: str
    serials: tuple[str, ...]
    closed: bool
    """A stream was open by one of them, and is closed."""
    replicas: tuple[MovedReplicaView, ...]
    """What ran on the node, as it is now."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RootView:
    name: str
    key: str
    not_after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityView:
    """``roots``: the newest first. ``unmoved``: who has no certificate of the newest yet, and why that is known."""

    roots: tuple[RootView, ...]
    issuer: RootView | None
    issuer_trouble: str
    server_not_after: str
    server_key: str
    """Key of the root that the control plane's own certificate is of."""
    unmoved: Mapping[str, str]


def certificate_view(certificate: Certificate, now: float) -> CertificateView:
    expired = certificate.state not in lines.ENDED and 0.0 < certificate.not_after <= now
    return CertificateView(
        serial=certificate.serial,
        node=certificate.node,
        role=certificate.role,
        source=certificate.source,
        state="expired" if expired else certificate.state,
        issued_at=rfc3339(certificate.issued_at),
        not_after=rfc3339(certificate.not_after) if certificate.not_after else None,
        previous=certificate.previous,
        first_used_at=rfc3339(certificate.first_used_at) if certificate.first_used_at is not None else None,
        ended_at=rfc3339(certificate.ended_at) if certificate.ended_at is not None else None,
        why=certificate.why,
        issuer=certificate.issuer,
    )


def expiry_warning(book: Book, node: str, now: float) -> str | None:
    """What to say of the certificate that a node uses; None where it has long enough to go."""
    used = [each for each in book.of_node(node) if each.state == "current" and each.not_after]
    if not used:
        return None
    newest = max(used, key=lambda each: each.not_after)
    life_s, left_s = newest.not_after - newest.issued_at, newest.not_after - now
    if left_s >= min(SOON_S, life_s * SOON_PART):
        return None
    if newest.source == "file":
        do = f"issue another with `llmgw ctl cert issue-client {node} --force`, and copy it there"
    else:
        do = "its agent renews it by itself, and has not: its log says why"
    return f"its certificate {'expired' if left_s <= 0 else 'expires'} on {lines.moment(newest.not_after)}: {do}"


def authority_view(plane: Plane, own: OwnIdentity) -> AuthorityView:
    roots = tuple(
        RootView(name=facts.common_name, key=facts.key_id, not_after=rfc3339(facts.not_after.timestamp()))
        for facts in map(facts_of, own.identity.roots)
    )
    issuer = None
    if own.issuer is not None:
        facts = facts_of(own.issuer.certificate)
        not_after = rfc3339(facts.not_after.timestamp())
        issuer = RootView(name=facts.common_name, key=facts.key_id, not_after=not_after)
    return AuthorityView(
        roots=roots,
        issuer=issuer,
        issuer_trouble=own.trouble,
        server_not_after=rfc3339(own.identity.own.not_after.timestamp()),
        server_key=own.identity.authority.key_id,
        unmoved=unmoved(plane, own) if len(roots) > 1 else {},
    )


def unmoved(plane: Plane, own: OwnIdentity) -> dict[str, str]:
    """Nodes, and gateways of other machines, that would be locked out if the older authority were dropped now."""
    newest = facts_of(own.identity.roots[0])
    keys = {newest.key_id, *((own.issuer.key_id,) if own.issuer is not None else ())}
    names = {each.node for each in plane.book.certificates() if each.state == "current"} | plane.cluster.nodes.keys()
    left = {}
    for name in sorted(names):
        found = [each for each in plane.book.certificates() if each.node == name and each.state == "current"]
        if any(each.first_used_at is not None and each.issuer in keys for each in found):
            continue
        if found and all(each.role != "node" for each in found) and name == own.identity.own.common_name:
            continue  # The control plane's own, by which the gateway beside it dials in: it is renewed at the end.
        last = max(found, key=lambda each: each.issued_at, default=None)
        if last is None and plane.book.revocation("node", name) is not None:
            continue
        left[name] = "it has no certificate that is known here" if last is None else _last_words(last)
    return left


def _last_words(last: Certificate) -> str:
    until = f", until {lines.moment(last.not_after)}" if last.not_after else ""
    how = "issued as a file" if last.source == "file" else "renewed by its agent"
    return f"uses certificate {last.serial} of the older authority ({how}{until})"
