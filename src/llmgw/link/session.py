"""The server's side of the session rules, without I/O: who is welcomed, who is refused, whose frames still count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from llmgw.link.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Heartbeat,
    Hello,
    LogLines,
    Observed,
    RefusalCode,
    Role,
    RoutesAck,
    TrafficReport,
    Welcome,
)
from llmgw.pki.certificate import PeerIdentity, in_words
from llmgw.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """A verified certificate, and who shows it. ``machine`` and ``instance`` are what the peer says of itself."""

    role: Role
    id: str
    identity: PeerIdentity
    address: str
    machine: str
    instance: str

    @property
    def serial(self) -> str:
        return self.identity.serial


AllowSerial = Callable[[Presented], str | None]
"""Why a certificate is refused, in words; None: allowed."""

SerialUsed = Callable[[Presented], None]
"""Told once whoever shows a certificate is welcomed."""

SessionFrame = Observed | Heartbeat | RoutesAck | TrafficReport | LogLines


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One welcomed peer. ``number`` counts from 1 within the leader's epoch and is never used again."""

    role: Role
    id: str
    number: int
    address: str
    fingerprint: str
    instance: str
    serial: str
    presented: Presented | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Send ``welcome``; close ``displaced``, the same machine's older session, with ``displaced_words``."""

    session: Session
    welcome: Welcome
    displaced: Session | None = None
    displaced_words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """``words`` goes to the peer; ``event`` is what the operator reads on this side. Nothing has changed."""

    code: RefusalCode
    words: str
    event: str


class Registry:
    """The sessions of one leader epoch: at most one for each role and id."""

    def __init__(
        self,
        *,
        cluster: str,
        epoch: int,
        heartbeat_s: float = 5.0,
        servers: tuple[str, ...] = (),
        allow_serial: AllowSerial | None = None,
        serial_used: SerialUsed | None = None,
        protocol: int = PROTOCOL,
        oldest_protocol: int = OLDEST_PROTOCOL,
    ) -> None:
        self.cluster = cluster
        self.epoch = epoch
        self.dropped: Counter[str] = Counter()
        """Frames that changed nothing, by why: ``stale-session``, ``stale-epoch``, ``wrong-role``."""
        self._heartbeat_s = heartbeat_s
        self._servers = servers
        self._allow_serial = allow_serial
        self._serial_used = serial_used
        self._protocol = protocol
        self._oldest = oldest_protocol
        self._live: dict[tuple[str, str], Session] = {}
        self._last_number = 0

    def beat_every(self, heartbeat_s: float) -> None:
        """What whoever is welcomed from now on is asked to beat at."""
        self._heartbeat_s = heartbeat_s

    def live(self, role: str, id: str) -> Session | None:
        return self._live.get((role, id))

    def admit(self, hello: Hello, identity: PeerIdentity, address: str, now: datetime) -> Admitted | Refusal:
        """Judge a peer's first frame. ``identity`` is from its verified certificate, ``address`` its host:port."""
        presented = _presented(hello, identity, address)
        refusal = (
            self._wrong_cluster(identity, address)
            or self._wrong_role(hello, identity, address)
            or self._wrong_name(hello, identity, address)
            or self.protocol_refusal(hello.protocol, hello.oldest_protocol, _who(hello, address), hello.version)
            or self._expired(hello, identity, address, now)
            or self._not_allowed(presented)
            or self._second_machine(hello, address)
        )
        return refusal or self._welcome(hello, presented)

    def protocol_refusal(self, theirs: int, their_oldest: int, who: str, version: str = "") -> Refusal | None:
        """None where the two ranges of protocol versions overlap."""
        if theirs >= self._oldest and their_oldest <= self._protocol:
            return None
        ours = f"protocol {_range(self._oldest, self._protocol)} (llmgw v{VERSION})"
        other = f"protocol {_range(their_oldest, theirs)}" + (f" (llmgw v{version})" if version else "")
        if theirs < self._oldest:
            advice = "upgrade the peer"
        else:
            advice = "upgrade the control plane (control planes first, then gateways, then agents)"
        return Refusal(
            code="protocol",
            words=f"this control plane speaks {ours}, you speak {other}: {advice}",
            event=f"{who} speaks {other}, this control plane speaks {ours}: {advice}",
        )

    def takes(self, session: Session, frame: SessionFrame) -> bool:
        """Whether a frame that came in ``session`` still counts; one that does not is counted in ``dropped``."""
        why = self._stale(session, frame)
        if why is None:
            return True
        self.dropped[why] += 1
        return False

    def serial_refusal(self, session: Session) -> Refusal | None:
        """Why the session's certificate is no longer allowed: asked at every heartbeat."""
        return self._not_allowed(session.presented) if session.presented is not None else None

    def end(self, session: Session) -> bool:
        """The session's connection has closed. False where a newer one had taken its place."""
        key = (session.role, session.id)
        if self._live.get(key) is not session:
            return False
        del self._live[key]
        return True

    # -- rules

    def _wrong_cluster(self, identity: PeerIdentity, address: str) -> Refusal | None:
        if identity.cluster == self.cluster:
            return None
        theirs = f"for cluster {identity.cluster!r}" if identity.cluster else "without an llmgw:// name"
        return Refusal(
            code="identity",
            words=f"your certificate ({identity.common_name!r}) is {theirs}; this is cluster {self.cluster!r}: "
            "have one issued by this cluster's authority",
            event=f"{address} showed a certificate ({identity.common_name!r}) {theirs}; this is {self.cluster!r}",
        )

    def _wrong_role(self, hello: Hello, identity: PeerIdentity, address: str) -> Refusal | None:
        if hello.role in identity.roles:
            return None
        roles = " and ".join(identity.roles)
        return Refusal(
            code="role",
            words=f"you dial in as a {hello.role} ({hello.id!r}), but your certificate ({identity.common_name!r}) "
            f"is that of a {roles}: give each its own certificate",
            event=f"{address} dials in as a {hello.role} ({hello.id!r}) with the certificate of a {roles} "
            f"({identity.common_name!r})",
        )

    def _wrong_name(self, hello: Hello, identity: PeerIdentity, address: str) -> Refusal | None:
        named = identity.common_name if hello.role == "node" else identity.roles[hello.role]
        if hello.id == named == identity.roles[hello.role]:
            return None
        if hello.role == "node":
            advice = f"use the certificate of {hello.id!r} (`llmgw ctl cert issue-client {hello.id}`), or set "
            advice += f"`node_id: {named}`"
        else:
            advice = f"use that name, or issue a certificate with `--name {hello.id}`"
        return Refusal(
            code="identity",
            words=f"your certificate is for {named!r}, but you claim to be {hello.id!r}: {advice}",
            event=f"{address} claims to be {hello.id!r}, but its certificate is for {named!r}: one of the two is "
            "wrong on that machine (the name it goes by, or its `tls:` files)",
        )

    def _expired(self, hello: Hello, identity: PeerIdentity, address: str, now: datetime) -> Refusal | None:
        if identity.not_after > now:
            return None
        when = f"expired on {in_words(identity.not_after)} (the control plane's clock says {in_words(now)})"
        return Refusal(
            code="identity",
            words=f"your certificate {when}: `llmgw ctl cert issue-client {hello.id} --force` makes a new one",
            event=f"the certificate of {_who(hello, address)} {when}",
        )

    def _not_allowed(self, presented: Presented) -> Refusal | None:
        why = self._allow_serial(presented) if self._allow_serial else None
        if why is None:
            return None
        return Refusal(code="revoked", words=why, event=f"{presented.id} at {presented.address}: {why}")

    def _second_machine(self, hello: Hello, address: str) -> Refusal | None:
        old = self.live(hello.role, hello.id)
        if old is None or _same_machine(old, hello):
            return None
        return Refusal(
            code="duplicate",
            words=f"{hello.id!r} is connected already, from another machine at {old.address} (you are at {address}): "
            "two machines can't share a name and certificate; give this one its own (`llmgw ctl node token NAME`, and "
            "`llmgw agent join` here), or stop the other",
            event=f"a second machine at {address} claims to be {hello.id!r}, which is connected from {old.address}: "
            "refused; two machines share a name and certificate (a copied image or disk?): give one of them its own "
            "with `llmgw ctl node token NAME` and `llmgw agent join`. Once a certificate that both have is renewed, "
            "the older one counts as copied, and neither is let in",
        )

    def _welcome(self, hello: Hello, presented: Presented) -> Admitted:
        displaced = self.live(hello.role, hello.id)
        self._last_number += 1
        session = Session(
            role=hello.role,
            id=hello.id,
            number=self._last_number,
            address=presented.address,
            fingerprint=hello.fingerprint,
            instance=hello.instance,
            serial=presented.serial,
            presented=presented,
        )
        if self._serial_used is not None:
            self._serial_used(presented)
        self._live[(hello.role, hello.id)] = session
        welcome = Welcome(
            epoch=self.epoch,
            session=session.number,
            protocol=min(self._protocol, hello.protocol),
            cluster=self.cluster,
            version=VERSION,
            heartbeat_s=self._heartbeat_s,
            servers=self._servers,
        )
        words = _displaced(displaced, session) if displaced else ""
        return Admitted(session=session, welcome=welcome, displaced=displaced, displaced_words=words)

    def _stale(self, session: Session, frame: SessionFrame) -> str | None:
        if self._live.get((session.role, session.id)) is not session:
            return "stale-session"
        if isinstance(frame, RoutesAck | TrafficReport) and session.role != "gateway":
            return "wrong-role"
        if isinstance(frame, LogLines):
            return None
        if frame.epoch != self.epoch:
            return "stale-epoch"
        return None if frame.session == session.number else "stale-session"


def _presented(hello: Hello, identity: PeerIdentity, address: str) -> Presented:
    return Presented(
        role=hello.role,
        id=hello.id,
        identity=identity,
        address=address,
        machine=hello.fingerprint,
        instance=hello.instance,
    )


def _same_machine(old: Session, hello: Hello) -> bool:
    if old.fingerprint and old.fingerprint == hello.fingerprint:
        return True
    return bool(old.instance) and old.instance == hello.instance


def _displaced(old: Session, new: Session) -> str:
    if old.instance == new.instance:
        return f"the same process connected again, from {new.address}"
    return (
        f"another process of the same machine connected as {new.id!r}, from {new.address}: "
        "where both are meant to run, they need names and certificates of their own"
    )


def _who(hello: Hello, address: str) -> str:
    return f"{hello.role} {hello.id!r} at {address}"


def _range(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"
