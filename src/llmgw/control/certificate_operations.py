"""What operators do about identity: tokens that let nodes in, and certificates that are taken away.

Each judges and acts in one turn of the plane. What can't be done is refused with an ApiError, and nothing was changed.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llmgw.cluster.actions import Note
from llmgw.cluster.model import Cluster, NodeState, Replica
from llmgw.config.addresses import parse_server_url
from llmgw.control import lines
from llmgw.control.certificate_views import MovedReplicaView, RevokedView, TokenView
from llmgw.control.errors import ApiError, not_found
from llmgw.control.fold import Folded
from llmgw.control.joining import name_taken, way_in
from llmgw.control.keys import digest
from llmgw.control.own_identity import OwnIdentity
from llmgw.control.plane import Plane
from llmgw.control.serials import Serials
from llmgw.control.times import rfc3339
from llmgw.link.messages import Renew
from llmgw.link.server import Peer
from llmgw.pki.authority import check_node_id
from llmgw.pki.join_token import JoinToken
from llmgw.pki.names import PkiError
from llmgw.store.base import StoreError
from llmgw.store.identities import Certificate, Revocation, Token

LONGEST_TTL_S = 7 * 86_400.0
TOKENS_KEPT_S = 86_400.0
"""How long a token that is past its life is remembered, so that whoever comes late is told so."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_SERIAL = re.compile(r"[0-9a-f]{16,40}")


@dataclass(frozen=True, slots=True)
class Identities:
    """What these operations work on. ``peer_of``: the live session of a node."""

    plane: Plane
    serials: Serials
    own: OwnIdentity
    servers: tuple[str, ...]
    peer_of: Callable[[str], Peer | None]


async def mint_token(
    rooms: Identities, node: str, *, ttl_s: float, labels: Mapping[str, str], take_over: bool
) -> TokenView:
    """A token by which one machine joins as ``node``, once. Raises ApiError."""
    try:
        check_node_id(node)
    except PkiError as error:
        raise ApiError(422, "name", str(error)) from error
    _check_issuer(rooms.own)
    _check_addresses(rooms)
    secret, plane = secrets.token_urlsafe(32), rooms.plane

    async def act() -> Token:
        _check_name(rooms, node, take_over)
        now = plane.now().wall_s
        token = Token(
            id="".join(secrets.choice(_ALPHABET) for _ in range(10)),
            node=node,
            hash=digest(secret),
            created_at=now,
            expires_at=now + ttl_s,
            labels=dict(labels),
            replace=take_over,
        )
        plane.book.remove(*(each for each in plane.book.tokens() if each.expires_at < now - TOKENS_KEPT_S))
        plane.book.remove(*(each for each in plane.book.certificates() if lines.past_keeping(each, now)))
        plane.book.put(token)
        over = ", and takes its place" if take_over else ""
        words = f"token {token.id} lets one machine join as {node} for {ttl_s:g} s{over}"
        try:
            await plane.carry_out((Note("token.created", node, words),))
        except StoreError:
            plane.book.remove(token)  # Nobody is given its secret.
            raise
        return token

    token = await plane.ask(act)
    whole = JoinToken(
        authority_hash=rooms.own.identity.authority_hash,
        id=token.id,
        secret=secret,
        node=node,
        addresses=rooms.servers,
    )
    return TokenView(
        id=token.id,
        node=node,
        token=str(whole),
        expires_at=rfc3339(token.expires_at),
        addresses=rooms.servers,
        labels=token.labels,
        replace=take_over,
    )


def _check_issuer(own: OwnIdentity) -> None:
    if own.issuer is None:
        raise ApiError(409, "no_issuer", own.no_issuer_words())


def _check_addresses(rooms: Identities) -> None:
    """A node that dials an address that the server's certificate lacks would be told so only there."""
    if not rooms.servers:
        words = "no address is advertised, so that a token could not say where to dial"
        raise ApiError(409, "no_address", words, "name this control plane's addresses under `advertise` in server.yaml")
    names = rooms.own.identity.own.names
    for url in rooms.servers:
        host = parse_server_url(url).where.host
        if not any(_same_host(host, name) for name in names):
            words = f"{url} is advertised, and the server's certificate is not for {host!r}: a node that dials it "
            words += f"would refuse it. It is for: {', '.join(names) or 'no address at all'}"
            sans = " ".join(f"--san {name}" for name in (*names, host))
            hint = f"llmgw ctl cert issue-server --dir PKI {sans} --force, or take {url} out of `advertise`"
            raise ApiError(409, "address", words, hint)


def _same_host(host: str, name: str) -> bool:
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address(name)
    except ValueError:
        return host.lower() == name.lower()


def _check_name(rooms: Identities, node: str, take_over: bool) -> None:
    peer = rooms.peer_of(node)
    if (refusal := name_taken(rooms.plane, node, peer.address if peer else "", take_over)) is not None:
        raise ApiError(409, "exists", refusal, way_in(node))
    revocation = rooms.plane.book.revocation("node", node)
    if revocation is not None and not revocation.removed and not take_over:
        words = f"{node} was revoked on {lines.moment(revocation.at)}"
        raise ApiError(409, "revoked", words, lines.way_back(node))


async def revoke(rooms: Identities, name: str, why: str) -> RevokedView:
    """Let a node, or one certificate, in no more. Raises ApiError."""
    plane = rooms.plane

    async def act() -> tuple[str, tuple[Certificate, ...], bool]:
        book = plane.book
        if name in plane.cluster.nodes or book.of_node(name):
            return _revoke_node(rooms, name, why)
        serial = name.lower().replace(":", "").lstrip("0")
        if (known := book.certificate(serial)) is not None:
            return _revoke_one(rooms, known, why)
        if not _SERIAL.fullmatch(serial):
            nodes = sorted({*plane.cluster.nodes, *(each.node for each in book.certificates())})
            raise not_found("node or serial", name, nodes)
        book.put(Revocation(kind="serial", subject=serial, at=plane.now().wall_s, why=why))
        plane.note("certificate.revoked", "", f"certificate {serial}, never seen here, was revoked: {why}")
        return "", (), False

    before = {id: each for id, each in plane.cluster.replicas.items() if name in {at.node for at in each.placements}}
    node, gone, closed = await plane.ask(act)
    return _revoked_view(plane, node, gone, closed, before)


def _revoke_node(rooms: Identities, node: str, why: str) -> tuple[str, tuple[Certificate, ...], bool]:
    plane, now = rooms.plane, rooms.plane.now().wall_s
    gone = tuple(each for each in plane.book.of_node(node) if each.state != "revoked")
    plane.book.put(Revocation(kind="node", subject=node, at=now, why=why))
    plane.book.remove(*(token for token in plane.book.tokens() if token.node == node))
    closed = rooms.peer_of(node) is not None
    rooms.serials.revoke(gone, why)
    words = f"{node} was revoked ({why}): {', '.join(each.serial for each in gone) or 'no certificate was known'}"
    plane.note("node.revoked", node, words)
    found = plane.cluster.nodes.get(node)
    if found is not None and found.state is not NodeState.REVOKED:
        # Like its certificates: at once, whether or not it can be stored.
        taken = f"revoked by an operator: {why}"
        plane.take(Folded(replace(found, state=NodeState.REVOKED, since=now, why=taken), lasting=True))
    return node, gone, closed


def _revoke_one(rooms: Identities, known: Certificate, why: str) -> tuple[str, tuple[Certificate, ...], bool]:
    if known.serial == rooms.own.identity.own.serial:
        words = f"{known.serial} is this control plane's own certificate: no node would dial it any more"
        hint = "issue another first (`llmgw ctl cert issue-server --force`), then revoke this one"
        raise ApiError(409, "own_certificate", words, hint)
    peer = rooms.peer_of(known.node)
    closed = peer is not None and peer.identity.serial == known.serial
    if known.state == "revoked":
        return known.node, (), False
    # Whoever had its key may have renewed it already: what waits to take over from it is no better.
    waiting = [each for each in rooms.plane.book.line(known) if each.state == "next" and each.previous == known.serial]
    gone = (known, *waiting)
    rooms.serials.revoke(gone, why)
    words = f"certificate {known.serial} was revoked: {why}"
    if waiting:
        words += f"; and what was to replace it: {', '.join(each.serial for each in waiting)}"
    rooms.plane.note("certificate.revoked", known.node, words)
    return known.node, gone, closed


def _revoked_view(
    plane: Plane, node: str, gone: tuple[Certificate, ...], closed: bool, before: Mapping[str, Replica]
) -> RevokedView:
    replicas = tuple(_moved(plane.cluster, replica) for _, replica in sorted(before.items())) if node else ()
    what = f"{node} is" if gone and node else "nothing more is"
    words = f"{what} let in by {', '.join(each.serial for each in gone) or 'that serial'} no more"
    if node:
        words = f"{node}: {len(gone)} certificate{'s' if len(gone) != 1 else ''} revoked"
        words += "; its stream is closed" if closed else "; it was not connected by any of them"
    return RevokedView(
        node=node, serials=tuple(each.serial for each in gone), closed=closed, replicas=replicas, words=words
    )


def _moved(cluster: Cluster, was: Replica) -> MovedReplicaView:
    """What became of a replica: as it is now, or what is there in its place."""
    if (found := cluster.replicas.get(was.id)) is not None:
        return MovedReplicaView(id=was.id, model=was.model, state=str(found.state), why=found.why)
    others = [
        f"{each.id} is {each.state}" + (f" ({each.why})" if each.why else "")
        for _, each in sorted(cluster.replicas.items())
        if each.model == was.model
    ]
    why = f"of {was.model} there is now: {'; '.join(others) or 'no replica'}"
    return MovedReplicaView(id=was.id, model=was.model, state="gone", why=why)


async def forget(plane: Plane, serials: Serials, node: str, words: str) -> None:
    """Remove a node with its identity: what it was issued is refused from now on, its name is free.

    Raises StoreError where that can't be stored; nothing was changed then.
    """
    book, now = plane.book, plane.now().wall_s
    certificates, tokens = book.of_node(node), [token for token in book.tokens() if token.node == node]
    before = book.revocation("node", node)
    removed = Revocation(kind="node", subject=node, at=now, why="removed", removed=True)
    serials.revoke(tuple(certificates), "its node was removed")
    book.put(removed)
    book.remove(*tokens)
    try:
        await plane.remove_node(node, words)
    except StoreError:
        book.remove(removed)
        book.put(*certificates, *tokens, *([before] if before is not None else []))
        raise


def ask_to_renew(rooms: Identities, node: str) -> CertificateAsked:
    """Have a node renew its certificate now. Raises ApiError."""
    _check_issuer(rooms.own)
    peer = rooms.peer_of(node)
    if peer is None:
        known = sorted(rooms.plane.cluster.nodes)
        if node not in rooms.plane.cluster.nodes:
            raise not_found("node", node, known)
        raise ApiError(409, "node_disconnected", f"{node} is not connected", f"llmgw ctl node {node}")
    peer.send(Renew())
    serial = peer.identity.serial
    certificate, words = rooms.plane.book.certificate(serial), f"{node} was asked to replace certificate {serial}"
    if certificate is not None and certificate.source in lines.LASTING:
        words += (
            "; it was issued as a file, so that its agent can do so only where it keeps it itself (`agent accept`): "
            f"else `llmgw ctl cert issue-client {node} --force`"
        )
    return CertificateAsked(node=node, serial=serial, words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateAsked:
    """The certificate that a node was asked to replace."""

    node: str
    serial: str
    words: str
