"""Everything of a control plane that lets nodes in, in this process: an authority on disk, and time moved by hand."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.config.server import ServerTls
from llmgw.control.api import Rooms, make_app
from llmgw.control.certificate_operations import Identities, mint_token
from llmgw.control.crl_file import CrlFile
from llmgw.control.joining import JoinOffice
from llmgw.control.keys import digest
from llmgw.control.own_identity import OwnIdentity
from llmgw.control.serials import Serials
from llmgw.control.times import rfc3339
from llmgw.link.joining import Given, JoinRefused, JoinRequest, RecoverRequest, RenewRequest
from llmgw.link.messages import Hello
from llmgw.link.server import Peer
from llmgw.link.session import Admitted, Refusal, Registry
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import PeerIdentity, peer_identity
from llmgw.pki.issuer import issue_issuer
from llmgw.pki.join_token import JoinToken, parse_join_token
from llmgw.pki.signing_request import new_key, pem_of_request, proof_of_key, signing_request
from llmgw.store.base import Store
from llmgw.store.identities import Certificate
from tests.control.clock import Time
from tests.control.floor import ENGINE, TOKEN, ControlFloor, inventory, open_floor

ADDRESS = "10.0.0.9:40000"
SERVERS = ("https://10.0.0.1:7443",)
DAY_S = 86_400.0


@dataclass
class Machine:
    """One that wants to be a node: its keys, and the certificate that it uses."""

    name: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate: x509.Certificate | None = None
    fingerprint: str = ""
    instance: str = "process-1"

    @property
    def csr(self) -> str:
        return pem_of_request(signing_request(self.key, self.name))

    @property
    def identity(self) -> PeerIdentity:
        assert self.certificate is not None
        return peer_identity(self.certificate.public_bytes(Encoding.DER))

    @property
    def serial(self) -> str:
        return self.identity.serial

    def take(self, given: Given, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.certificate = x509.load_pem_x509_certificates(given.certificate.encode())[0]
        self.key = key or self.key

    def copied(self) -> Machine:
        return Machine(self.name, self.key, self.certificate, f"{self.fingerprint}-copy", "process-of-a-copy")


class Office:
    """``server.yaml`` advertises SERVERS, and the server's certificate is for them."""

    def __init__(self, floor: ControlFloor, time: Time, pki: Path, lifetime_s: float = DAY_S) -> None:
        self.floor, self.plane, self.time, self.pki = floor, floor.plane, time, pki
        tls = ServerTls(ca=pki / "ca.pem", cert=pki / "server.pem", key=pki / "server-key.pem", lifetime_s=lifetime_s)
        self.own = OwnIdentity(tls)
        self.serials = Serials(self.plane, self.own.issuing)
        self.registry = Registry(cluster="c", epoch=1, allow_serial=self.serials.allow, serial_used=self.serials.used)
        self.live: dict[str, Peer] = {}
        self.joining = JoinOffice(
            self.plane,
            self.serials,
            self.own,
            lifetime_s=lifetime_s,
            servers=SERVERS,
            address_of=lambda node: self.live[node].address if node in self.live else "",
        )
        self.identities = Identities(self.plane, self.serials, self.own, SERVERS, self.live.get)
        self.crl = CrlFile(self.plane, self.own, pki / "crl.pem")
        self.serials.on_revoked.append(self._close_refused)
        self.closed: list[tuple[str, str]] = []

    def _close_refused(self) -> None:
        for node, peer in list(self.live.items()):
            if (refusal := self.registry.serial_refusal(peer.entry)) is not None:
                self.hang_up(node, refusal.words)

    def hang_up(self, node: str, why: str = "gone") -> None:
        peer = self.live.pop(node)
        self.registry.end(peer.entry)
        self.floor.desk.on_closed(peer, why)
        self.closed.append((node, why))

    # -- what machines do

    async def token(self, node: str = "gpu-1", **options: Any) -> JoinToken:
        settings: dict[str, Any] = {"ttl_s": 900.0, "labels": {}, "take_over": False} | options
        return parse_join_token((await mint_token(self.identities, node, **settings)).token)

    def request(self, token: JoinToken, machine: Machine, *, clock_off_s: float = 0.0, **changes: str) -> JoinRequest:
        texts = {"id": token.id, "secret": token.secret, "node": machine.name, "csr": machine.csr}
        moment = rfc3339(self.time().wall_s + clock_off_s)
        return JoinRequest(**({**texts, "time": moment, "fingerprint": machine.fingerprint} | changes))

    async def join(self, token: JoinToken, machine: Machine, address: str = ADDRESS, **changes: Any) -> Given:
        given = await self.joining.join(self.request(token, machine, **changes), address)
        machine.take(given)
        return given

    async def joined(self, name: str = "gpu-1", **options: Any) -> Machine:
        """A machine that joined and is connected."""
        machine = Machine(name, fingerprint=f"machine-of-{name}")
        await self.join(await self.token(name, **options), machine)
        assert isinstance(self.dial(machine), Peer)
        await self.floor.settled()
        return machine

    def dial(self, machine: Machine, address: str = ADDRESS) -> Peer | Refusal:
        """What TLS would have checked is taken for granted."""
        hello = Hello(
            role="node",
            id=machine.name,
            fingerprint=machine.fingerprint,
            instance=machine.instance,
            inventory=inventory(machine.name),
            probed=True,
            engines=(ENGINE,),
            version="1",
        )
        now = datetime.fromtimestamp(self.time().wall_s, UTC)
        verdict = self.registry.admit(hello, machine.identity, address, now)
        if not isinstance(verdict, Admitted):
            return verdict
        peer = Peer(verdict.session, hello, machine.identity, self.time().wall_s)
        self.live[machine.name] = peer
        self.floor.desk.on_welcomed(peer)
        return peer

    async def renew(self, machine: Machine, *, clock_off_s: float = 0.0) -> Machine:
        """The machine with its next certificate, which it has not used yet; ``machine`` itself stays as it is."""
        key = new_key()
        csr = pem_of_request(signing_request(key, machine.name))
        request = RenewRequest(csr=csr, time=rfc3339(self.time().wall_s + clock_off_s))
        given = await self.joining.renew(machine.identity, request, ADDRESS)
        newer = Machine(machine.name, fingerprint=machine.fingerprint, instance=machine.instance)
        newer.take(given, key)
        return newer

    async def recover(self, machine: Machine, **changes: str) -> Machine:
        assert machine.certificate is not None
        key, nonce = new_key(), self.joining.nonce(machine.serial)
        csr = signing_request(key, machine.name)
        request = {
            "certificate": machine.certificate.public_bytes(Encoding.PEM).decode(),
            "csr": pem_of_request(csr),
            "nonce": nonce,
            "signature": base64.b64encode(proof_of_key(machine.key, nonce, csr)).decode(),
            "time": rfc3339(self.time().wall_s),
        }
        given = await self.joining.recover(RecoverRequest(**(request | changes)), ADDRESS)
        newer = Machine(machine.name, fingerprint=machine.fingerprint, instance=machine.instance)
        newer.take(given, key)
        return newer

    # -- what is seen of it

    def states(self, node: str = "gpu-1") -> list[str]:
        """From the first of a line on; of those that came after the same one, by state."""
        known = {each.serial: each for each in self.plane.book.of_node(node)}

        def place(certificate: Certificate) -> tuple[int, int]:
            depth, at = 0, certificate
            while at.previous in known:
                depth, at = depth + 1, known[at.previous]
            return depth, ("revoked", "superseded", "retired", "current", "next").index(certificate.state)

        return [f"{each.source} {each.state}" for each in sorted(known.values(), key=place)]

    async def events(self, kind: str) -> list[str]:
        await self.floor.settled()
        return [event.words for event in await self.plane.store.events(limit=10_000) if event.kind == kind]

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[httpx2.AsyncClient]:
        floor = self.floor
        rooms = Rooms(floor.plane, floor.desk, floor.logs, floor.reloader, digest(TOKEN), self.identities, self.crl)
        floor.app = make_app(rooms)
        async with floor.admin() as client:
            yield client


def make_pki(directory: Path, *, issuer: bool = True, now: float) -> Path:
    moment = datetime.fromtimestamp(now, UTC)
    authority = Authority.create(directory, "c", now=moment)
    authority.issue_server(["10.0.0.1", "cp.example"], directory, "cp", now=moment)
    if issuer:
        issue_issuer(authority, directory, now=moment)
    return directory


@asynccontextmanager
async def open_office(
    folder: Path,
    *,
    store: Store | None = None,
    issuer: bool = True,
    time: Time | None = None,
    lifetime_s: float = DAY_S,
) -> AsyncIterator[Office]:
    time = time or Time()
    pki = folder / "pki"
    if not pki.exists():
        make_pki(pki, issuer=issuer, now=time().wall_s)
    async with open_floor(folder, store, clock=time) as floor:
        yield Office(floor, time, pki)


def refused(error: JoinRefused) -> tuple[int, str]:
    return error.status, error.code


def shown(error: JoinRefused) -> Mapping[str, str]:
    found: Mapping[str, str] = error.body()["error"]
    return found
