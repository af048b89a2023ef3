"""How nodes get certificates: by a token once, then each by the one before, and by proof of a key that is known.

All is judged in one turn of the plane and stored before it is answered. From a request nothing is taken but the public
key: whose certificate it is, and what it says, is decided here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.cluster.actions import Note, PutNode
from llmgw.cluster.model import Node, NodeState
from llmgw.control import lines
from llmgw.control.keys import digest
from llmgw.control.own_identity import OwnIdentity
from llmgw.control.plane import Plane
from llmgw.control.serials import Serials
from llmgw.control.times import rfc3339
from llmgw.link.joining import Given, JoinRefused, JoinRequest, RecoverRequest, RenewRequest
from llmgw.pki.certificate import PeerIdentity, in_words, peer_identity
from llmgw.pki.chain import certificates_of
from llmgw.pki.issuer import Issuer, Signed
from llmgw.pki.names import PkiError
from llmgw.pki.roots import root_of
from llmgw.pki.signing_request import PublicKey, is_proof, key_hash, read_request, request_der
from llmgw.store.base import StoreError
from llmgw.store.identities import Certificate, CertificateSource, Token

SKEW_S = 300.0
"""So far another machine's clock may be from ours: certificates begin as much early."""
NONCE_S = 60.0
NONCES = 10_000
"""Proofs that may be under way at once; the oldest are given up."""


class JoinOffice:
    """Implements ``llmgw.link.joining.Joining``. ``address_of``: where a node is connected from; empty: it is not."""

    def __init__(
        self,
        plane: Plane,
        serials: Serials,
        own: OwnIdentity,
        *,
        lifetime_s: float,
        servers: tuple[str, ...],
        address_of: Callable[[str], str],
    ) -> None:
        self._plane = plane
        self._serials = serials
        self._own = own
        self._lifetime_s = lifetime_s
        self._servers = servers
        self._address_of = address_of
        self._nonces: dict[str, tuple[str, float]] = {}

    def authority(self) -> dict[str, str]:
        return {"ca": self._own.roots_pem(), "time": rfc3339(self._plane.now().wall_s)}

    # -- by token

    async def join(self, request: JoinRequest, address: str) -> Given:
        return await self._asked(lambda: self._join(request, address))

    async def _join(self, request: JoinRequest, address: str) -> Given:
        token = self._token(request)
        key, key_id = _key(request.csr)
        if token.used_key == key_id and self._plane.now().wall_s < token.expires_at:
            return self._given(token.answer, token.node, dict(token.labels))
        issuer = self._issuer()
        self._check_unused(token, request, key_id)
        self._check_clock(request.time)
        self._check_name(token, request, address)
        signed = self._sign(issuer, token.node, key)
        now = self._plane.now().wall_s
        new = self._record(signed, token.node, "token", key_id, issuer, machine=request.fingerprint)
        before = self._plane.book.of_node(token.node)
        why = f"its name was given to another machine, by token {token.id} from {address}"
        gone = lines.revoked(before, why, now) if token.replace else ()
        used = replace(token, used_key=key_id, used_at=now, used_from=address, answer=signed.chain)
        if not await self._plane.claim_token(used, (*gone, new)):
            raise _token_used(self._plane.book.token(token.id) or token)
        await self._joined(used, signed, gone)
        return self._given(signed.chain, token.node, dict(token.labels))

    def _token(self, request: JoinRequest) -> Token:
        token = self._plane.book.token(request.id)
        if token is None or not hmac.compare_digest(token.hash, digest(request.secret)):
            words = "this control plane knows no such token: it was not made here, or it is long past its life"
            raise JoinRefused(403, "token_unknown", words, f"llmgw ctl node token {request.node[:64]} makes another")
        if token.node != request.node:
            words = f"this token is for {token.node!r}, and {request.node[:64]!r} wants to join by it"
            hint = f"join as {token.node} (`--node {token.node}`), or have a token made for the other name"
            raise JoinRefused(403, "token_node", words, hint)
        return token

    def _check_unused(self, token: Token, request: JoinRequest, key_id: str) -> None:
        if token.used_key and token.used_key != key_id:
            raise _token_used(token)
        if (now := self._plane.now().wall_s) >= token.expires_at:
            ago = _span(now - token.expires_at)
            words = f"this token for {token.node} expired on {lines.moment(token.expires_at)}, {ago} ago"
            raise JoinRefused(403, "token_expired", words, f"llmgw ctl node token {token.node} makes another")
        for known in self._plane.book.with_key(key_id):
            if known.node != token.node or known.state == "revoked":
                words = f"the key of this request is that of certificate {known.serial} of {known.node}"
                words += ", which was revoked" if known.state == "revoked" else ""
                raise JoinRefused(403, "copied_key", words, "make a new key on this machine, and join with that")

    def _check_name(self, token: Token, request: JoinRequest, address: str) -> None:
        refusal = name_taken(self._plane, token.node, self._address_of(token.node), token.replace)
        if refusal is not None:
            raise JoinRefused(409, "exists", f"{refusal}; you are at {address}", way_in(token.node))

    async def _joined(self, token: Token, signed: Signed, gone: tuple[Certificate, ...]) -> None:
        plane, node = self._plane, token.node
        if (revocation := plane.book.revocation("node", node)) is not None and not revocation.removed:
            # What was issued to it until now stays out; what it gets from now on does not.
            plane.book.put(replace(revocation, removed=True, at=plane.now().wall_s))
        words = f"{node} joined by token {token.id} from {token.used_from}: certificate {signed.serial}"
        notes = [Note("certificate.issued", node, words)]
        if gone:
            serials = ", ".join(each.serial for each in gone)
            notes.append(Note("certificate.revoked", node, f"its name was given to another machine: {serials}"))
            self._serials.revoked()
        found = plane.cluster.nodes.get(node)
        back = (PutNode(_anew(found, plane.now().wall_s)),) if found and found.state is NodeState.REVOKED else ()
        await plane.carry_out((*back, *notes))

    # -- by the certificate before

    async def renew(self, peer: PeerIdentity, request: RenewRequest, address: str) -> Given:
        return await self._asked(lambda: self._renew(peer, request, address))

    async def _renew(self, peer: PeerIdentity, request: RenewRequest, address: str) -> Given:
        node = self._node_of(peer)
        if (refusal := self._serials.allow_renewal(peer, address)) is not None:
            raise JoinRefused(403, self._refusal_code(peer.serial), refusal)
        if peer.not_after.timestamp() <= self._plane.now().wall_s:
            words = f"your certificate expired on {in_words(peer.not_after)}"
            raise JoinRefused(403, "expired", words, "prove its key at /v1/recover, or join with a token")
        return await self._succeed(peer.serial, node, request.csr, request.time, "renewal")

    # -- by proof of a key

    def nonce(self, serial: str) -> str:
        now_s = self._plane.now().monotonic_s
        self._nonces = {nonce: kept for nonce, kept in self._nonces.items() if kept[1] > now_s}
        while len(self._nonces) >= NONCES:
            del self._nonces[next(iter(self._nonces))]
        nonce = secrets.token_urlsafe(32)
        self._nonces[nonce] = (serial, now_s + NONCE_S)
        return nonce

    async def recover(self, request: RecoverRequest, address: str) -> Given:
        return await self._asked(lambda: self._recover(request, address))

    async def _recover(self, request: RecoverRequest, address: str) -> Given:
        certificate, peer = self._own_certificate(request.certificate)
        node = self._node_of(peer)
        serial, until_s = self._nonces.pop(request.nonce, ("", 0.0))
        if serial != peer.serial or until_s <= self._plane.now().monotonic_s:
            words = f"the nonce is not one that was given for certificate {peer.serial} within the last {NONCE_S:g} s"
            raise JoinRefused(403, "nonce", words, "ask /v1/recover/nonce for another")
        known = self._plane.book.certificate(peer.serial)
        if known is None:
            words = f"certificate {peer.serial} of {node} expired, and this control plane has never seen it"
            raise JoinRefused(403, "unknown", words, f"llmgw ctl node token {node} lets it in anew")
        if not is_proof(certificate, _signature(request.signature), request.nonce.encode() + _der(request.csr)):
            words = f"the signature does not prove that you have the key of certificate {peer.serial}"
            raise JoinRefused(403, "proof", words, "it is made over the nonce and the signing request (DER)")
        if (refusal := self._serials.allow_renewal(peer, address)) is not None:
            raise JoinRefused(403, self._refusal_code(peer.serial), refusal)
        if known.source in lines.LASTING:
            words = f"certificate {peer.serial} of {node} was issued as a file, and is renewed as one"
            raise JoinRefused(403, "file_flow", words, f"llmgw ctl cert issue-client {node} --force")
        if known.recoveries >= lines.RECOVERIES:
            words = f"{node} has proved the key of an expired certificate {lines.RECOVERIES} times in a row already"
            raise JoinRefused(403, "recovery_limit", words, lines.way_back(node))
        return await self._succeed(peer.serial, node, request.csr, request.time, "recovery")

    def _own_certificate(self, pem: str) -> tuple[x509.Certificate, PeerIdentity]:
        """One that this cluster's authority issued: whether it expired is not looked at."""
        try:
            certificate, *between = certificates_of(pem, "the certificate")
        except PkiError as error:
            raise JoinRefused(400, "certificate", str(error)) from error
        issuer = self._own.issuer
        if issuer is not None:
            between.append(issuer.certificate)
        peer = peer_identity(certificate.public_bytes(Encoding.DER))
        known = self._plane.book.certificate(peer.serial)
        is_known = known is not None and known.key_hash == peer.key_hash and known.node == peer.common_name
        if root_of(certificate, between, self._own.identity.roots) is None and not is_known:
            words = f"certificate {peer.serial} ({peer.common_name!r}) is not of this cluster's authority"
            raise JoinRefused(403, "foreign", words)
        return certificate, peer

    # -- what all of them share

    async def _asked(self, act: Callable[[], Awaitable[Given]]) -> Given:
        try:
            return await self._plane.ask(act)
        except StoreError as error:
            words = f"nothing can be stored just now, so no certificate is given: {error}"
            raise JoinRefused(
                503, "store_unavailable", words, "try again; the control plane's log says more"
            ) from error

    async def _succeed(self, serial: str, node: str, csr: str, time: str, source: CertificateSource) -> Given:
        issuer = self._issuer()
        self._check_clock(time)
        key, key_id = _key(csr)
        book, now = self._plane.book, self._plane.now().wall_s
        taken = next((each for each in book.with_key(key_id) if each.node != node), None)
        if taken is not None:
            words = f"the key of this request is that of certificate {taken.serial} of {taken.node}"
            raise JoinRefused(403, "copied_key", words, "make a new key on this machine")
        previous = book.certificate(serial)
        assert previous is not None
        signed = self._sign(issuer, node, key)
        new = self._record(signed, node, source, key_id, issuer, machine=previous.machine)
        book.put(*lines.successor(previous, book.line(previous), new, now))
        book.remove(*(each for each in book.of_node(node) if lines.past_keeping(each, now)))
        how = "renewed" if source == "renewal" else "expired, and was renewed by proof of its key"
        words = f"certificate {serial} {how}: {signed.serial} until {in_words(signed.not_after)}"
        self._plane.note("certificate.issued" if source == "renewal" else "certificate.recovered", node, words)
        return self._given(signed.chain, node, {})

    def _node_of(self, peer: PeerIdentity) -> str:
        node = peer.roles.get("node", "")
        if peer.cluster != self._plane.cluster.name:
            theirs = f"for cluster {peer.cluster!r}" if peer.cluster else "without an llmgw:// name"
            words = f"your certificate ({peer.common_name!r}) is {theirs}; this is {self._plane.cluster.name!r}"
            raise JoinRefused(403, "identity", words)
        if not node or node != peer.common_name:
            words = f"your certificate ({peer.common_name!r}) is not a node's: only nodes renew theirs here"
            raise JoinRefused(403, "role", words)
        return node

    def _issuer(self) -> Issuer:
        if self._own.issuer is None:
            raise JoinRefused(409, "no_issuer", self._own.no_issuer_words())
        return self._own.issuer

    def _sign(self, issuer: Issuer, node: str, key: PublicKey) -> Signed:
        try:
            now = datetime.fromtimestamp(self._plane.now().wall_s, UTC)
            return issuer.sign_node(node, key, self._lifetime_s, now)
        except PkiError as error:
            raise JoinRefused(409, "no_issuer", str(error)) from error

    def _record(
        self, signed: Signed, node: str, source: CertificateSource, key_id: str, issuer: Issuer, *, machine: str
    ) -> Certificate:
        return Certificate(
            serial=signed.serial,
            node=node,
            source=source,
            state="next",
            issued_at=self._plane.now().wall_s,
            not_after=signed.not_after.timestamp(),
            key_hash=key_id,
            issuer=issuer.key_id,
            machine=machine[:128],
        )

    def _given(self, chain: str, node: str, labels: dict[str, str]) -> Given:
        return Given(
            certificate=chain,
            ca=self._own.roots_pem(),
            node=node,
            cluster=self._plane.cluster.name,
            servers=self._servers,
            labels=labels,
        )

    def _check_clock(self, time: str) -> None:
        if (words := clock_refusal(time, self._plane.now().wall_s)) is not None:
            raise JoinRefused(403, "clock", words, "set the clock (`timedatectl`), then try again")

    def _refusal_code(self, serial: str) -> str:
        known = self._plane.book.certificate(serial)
        copied = known is not None and "on two machines" in known.why
        return "copied_key" if copied else "revoked"


def clock_refusal(theirs: str, ours_s: float) -> str | None:
    """Why a machine whose clock says ``theirs`` (RFC 3339) gets no certificate; None: it is near enough to ours."""
    try:
        moment = datetime.fromisoformat(theirs)
    except ValueError:
        return f"{theirs[:40]!r} is no time: RFC 3339 was expected, such as {rfc3339(ours_s)}"
    at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if abs(at_s - ours_s) <= SKEW_S:
        return None
    which = "ahead of" if at_s > ours_s else "behind"
    return (
        f"your clock is {_span(abs(at_s - ours_s))} {which} the control plane's (yours says {lines.moment(at_s)}, "
        f"the control plane's {lines.moment(ours_s)}): at most {_span(SKEW_S)} are tolerated"
    )


def name_taken(plane: Plane, node: str, address: str, replace: bool) -> str | None:
    """Why nobody may join as ``node`` without taking the name from the machine that has it; None: nobody has it."""
    found = plane.cluster.nodes.get(node)
    if found is None or replace:
        return None
    if address:
        return f"{node} is a node of this cluster already, connected from {address}"
    return f"{node} is a node of this cluster already ({found.state}; it was last connected from {found.address})"


def way_in(node: str) -> str:
    return (
        f"`llmgw ctl node token {node} --replace` lets another machine take its place and revokes its certificates; "
        f"`llmgw ctl node remove {node}` forgets one that is gone; or join by another name"
    )


def _anew(node: Node, now: float) -> Node:
    return replace(node, state=NodeState.JOINING, since=now, why="let in again by token", session=None)


def _key(csr: str) -> tuple[PublicKey, str]:
    try:
        key = read_request(csr)
    except PkiError as error:
        raise JoinRefused(400, "csr", str(error)) from error
    return key, key_hash(key)


def _der(csr: str) -> bytes:
    try:
        return request_der(csr)
    except PkiError as error:
        raise JoinRefused(400, "csr", str(error)) from error


def _signature(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise JoinRefused(400, "malformed", "`signature` is no base64") from error


def _token_used(token: Token) -> JoinRefused:
    when = f" on {lines.moment(token.used_at)} from {token.used_from}" if token.used_at is not None else ""
    words = f"this token for {token.node} was used{when}, with another key: a token lets one machine in, once"
    hint = (
        f"if that was not you, revoke it at once: `llmgw ctl cert revoke {token.node}`; "
        f"llmgw ctl node token {token.node} --replace makes another"
    )
    return JoinRefused(403, "token_used", words, hint)


def _span(seconds: float) -> str:
    """``6 min``, ``6 min 12 s``, ``30 days``: as exact as anybody needs it."""
    for name, length_s in (("days", 86_400.0), ("hours", 3_600.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {name}"
    minutes, rest = divmod(round(seconds), 60)
    parts = [f"{minutes} min" if minutes else "", f"{rest} s" if rest or not minutes else ""]
    return " ".join(part for part in parts if part)
