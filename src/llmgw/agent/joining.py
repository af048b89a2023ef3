"""How a machine becomes a node: by a token, or by a request that is signed where the authority is.

The key is made here and stays here. The token's secret is sent only to a server that proved, by its certificate, that
it is of the authority which the token names.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.agent.discovery import machine_fingerprint
from llmgw.agent.identity import IdentityStore, NamedFiles, Pair
from llmgw.config import AgentConfig, load_agent, parse_agent
from llmgw.link.course import LinkError, ServerAddress, parse_server
from llmgw.link.enrolment import (
    AuthorityAnswer,
    Enrolment,
    EnrolmentError,
    Granted,
    clocks_differ,
    trusting,
    unverified,
)
from llmgw.pki.certificate import facts_of
from llmgw.pki.chain import Chain, certificates_of, read_chain
from llmgw.pki.diagnose import ADDRESS_MISMATCH, EXPIRED, HOSTNAME_MISMATCH, NOT_YET_VALID
from llmgw.pki.files import CERT_MODE, write_new
from llmgw.pki.join_token import JoinToken, authority_hash
from llmgw.pki.names import PkiError, check_id
from llmgw.pki.signing_request import pem_of_request, signing_request

DEFAULT_WORK_DIR = Path("/var/lib/llmgw-agent")
REQUEST = "request"
"""What a key is made for whose request is signed elsewhere."""
PAUSES_S = (1.0, 2.0, 4.0)
"""Between the rounds through the servers, where none answered."""

log = structlog.get_logger()


class JoinRefused(Exception):
    """The machine is no node now, or what it was before; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node keeps things. ``config``: None where the agent's file does not exist yet."""

    file: Path
    config: AgentConfig | None
    work_dir: Path

    @property
    def store(self) -> IdentityStore:
        return IdentityStore(self.work_dir / "identity")

    @property
    def named(self) -> NamedFiles:
        """The paths of the agent's file; beside it where it does not say."""
        if self.config is not None:
            return NamedFiles(self.config.tls.ca, self.config.tls.cert, self.config.tls.key)
        folder = self.file.absolute().parent
        return NamedFiles(folder / "ca.pem", folder / "agent.pem", folder / "agent-key.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What came of it. ``moved``: files that lay where the links are now. ``notes``: what people should know."""

    pair: Pair
    named: NamedFiles
    wrote: Path | None
    moved: Sequence[Path]
    notes: Sequence[str]


def place_of(file: Path, work_dir: Path | None) -> Place:
    """Raises ConfigError where the agent's file is there and unsound, JoinRefused where ``work_dir`` contradicts it."""
    if not file.exists():
        return Place(file=file, config=None, work_dir=(work_dir or DEFAULT_WORK_DIR).absolute())
    config = load_agent(file)
    stated = config.supervisor.work_dir
    if work_dir is not None and work_dir.absolute() != stated:
        raise JoinRefused(
            f"--work-dir {work_dir} contradicts {file}, whose supervisor.work_dir is {stated}: leave one of them out"
        )
    return Place(file=file, config=config, work_dir=stated)


async def join(token: JoinToken, servers: Sequence[str], place: Place, pauses_s: Sequence[float] = PAUSES_S) -> Joined:
    """Become the node that the token is for. ``servers``: dialled instead of the token's own addresses.

    Raises JoinRefused. The same token again, inside its life, is the same answer: nothing is lost with a reply.
    """
    config = place.config
    if config is not None and (id := config.node_id or socket.gethostname()) != token.node:
        raise JoinRefused(
            f"the token is for node {token.node!r}, but this one is {id!r} "
            f"({'`node_id` of ' + str(place.file) if config.node_id else 'its host name'}): "
            f"have a token made for it with `llmgw ctl node token {id}`"
        )
    stated = tuple(servers) or token.addresses
    try:
        addresses = [parse_server(server) for server in stated]
    except LinkError as error:
        raise JoinRefused(str(error)) from error
    purpose = f"token-{hashlib.sha256(token.id.encode()).hexdigest()[:16]}"
    try:
        key = await asyncio.to_thread(place.store.key_for, purpose, also_current=True)
        granted = await _ask_all(token, addresses, key, pauses_s)
        chain = read_chain(granted.certificate, granted.ca, node=token.node, key=key)
        if token.authority_hash not in map(authority_hash, chain.roots):
            raise JoinRefused("the authority that came back is not the one that the token names: nothing was kept")
        pair = await asyncio.to_thread(place.store.install, chain, key, purpose)
        moved = await asyncio.to_thread(place.store.link, place.named)
    except PkiError as error:
        raise JoinRefused(str(error)) from error
    return Joined(
        pair=pair,
        named=place.named,
        wrote=_write_config(place, stated, token.node, granted.labels),
        moved=moved,
        notes=_differences(place, stated, granted),
    )


def request(node: str, place: Place) -> str:
    """A signing request (PEM) for a key that is made here; the same key until ``accept``. Raises JoinRefused."""
    try:
        key = place.store.key_for(REQUEST)
        return pem_of_request(signing_request(key, check_id(node)))
    except PkiError as error:
        raise JoinRefused(str(error)) from error


def accept(text: str, place: Place) -> Joined:
    """Take the certificate for the key of ``request``: PEM of leaf, issuers and roots. Raises JoinRefused."""
    store = place.store
    try:
        if not store.has_key_for(REQUEST):
            raise JoinRefused(
                f"no key waits for a certificate in {store.directory}: it has one by now (from another run?), or was "
                "never made; `llmgw agent request --node ID` makes one, and prints what is to be signed"
            )
        everything = certificates_of(text, "what was given")
        roots = [each for each in everything if each.subject == each.issuer]
        if not roots or len(roots) == len(everything):
            missing = "the authority's certificate (ca.pem)" if not roots else "the node's certificate"
            raise JoinRefused(f"{missing} is missing: both are expected, one after the other")
        key = store.key_for(REQUEST)
        chain = _accepted([each for each in everything if each not in roots], roots, key)
        pair = store.install(chain, key, REQUEST)
        return Joined(pair=pair, named=place.named, wrote=None, moved=store.link(place.named), notes=())
    except PkiError as error:
        raise JoinRefused(str(error)) from error


def _accepted(
    own: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], key: ec.EllipticCurvePrivateKey
) -> Chain:
    node = facts_of(own[0]).common_name
    return read_chain(_pem(own), _pem(roots), node=node, key=key)


def _pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


# -- over the network


async def _ask_all(
    token: JoinToken, servers: Sequence[ServerAddress], key: ec.EllipticCurvePrivateKey, pauses_s: Sequence[float]
) -> Granted:
    """The first answer that counts. Rounds go on while no server answers at all."""
    for pause_s in (*pauses_s, None):
        words = []
        for server in servers:
            try:
                return await _ask(token, server, key)
            except EnrolmentError as error:
                if error.code:
                    raise JoinRefused(str(error)) from error
                words.append(str(error))
        if pause_s is None:
            break
        log.warning("no control plane answers yet", why="; ".join(words), retry_in_s=pause_s)
        await asyncio.sleep(pause_s)
    raise JoinRefused(
        f"{'; '.join(words)}. The key that was made here is kept: run the same command again while the token lives"
    )


async def _ask(token: JoinToken, server: ServerAddress, key: ec.EllipticCurvePrivateKey) -> Granted:
    answer = await Enrolment(server, unverified()).authority()
    root = next((root for root in answer.roots if authority_hash(root) == token.authority_hash), None)
    if root is None:
        raise EnrolmentError(_another_authority(token, server, answer), code="authority")
    difference = clocks_differ(answer.time, datetime.now(UTC))
    enrolment = Enrolment(server, trusting(_pem([root]).decode()))
    try:
        return await enrolment.join(
            id=token.id,
            secret=token.secret,
            node=token.node,
            csr=pem_of_request(signing_request(key, token.node)),
            fingerprint=machine_fingerprint(),
        )
    except EnrolmentError as error:
        raise _with_reasons(error, server, difference) from error


def _another_authority(token: JoinToken, server: ServerAddress, answer: AuthorityAnswer) -> str:
    found = ", ".join(f"{facts_of(root).common_name!r} ({authority_hash(root)[:16]}…)" for root in answer.roots)
    return (
        f"{server.url} has another authority than the token names ({token.authority_hash[:16]}…): it has {found}. This "
        "is another cluster's control plane, its authority was made anew since, or somebody answers in its place. "
        "The token's secret was not sent"
    )


def _with_reasons(error: EnrolmentError, server: ServerAddress, difference: str) -> EnrolmentError:
    """A server that could not be verified: which of the usual causes it is. Trying again helps against none."""
    code = error.reason.verify_code if error.reason is not None else None
    if code in (EXPIRED, NOT_YET_VALID):
        words = f"{error}: {difference or 'its certificate has to be renewed on the control plane'}"
        return EnrolmentError(f"{words}. The token's secret was not sent", code="clock")
    if code in (HOSTNAME_MISMATCH, ADDRESS_MISMATCH):
        return EnrolmentError(f"{error}. The token's secret was not sent to it")
    if code is not None:
        return EnrolmentError(
            f"{error}: it is not of the authority that the token names. The token's secret was not sent",
            code="authority",
        )
    if error.code == "clock" and difference:
        return EnrolmentError(f"{error}; {difference}", code=error.code)
    return error


# -- the agent's file


def _write_config(place: Place, servers: Sequence[str], node: str, labels: Mapping[str, str]) -> Path | None:
    """The least that an agent needs; None where there is a file already, which is left as it is."""
    if place.config is not None:
        return None
    text = config_text(place, servers, node, labels)
    parse_agent(text, str(place.file))
    try:
        place.file.parent.mkdir(parents=True, exist_ok=True)
        write_new(place.file, text.encode(), CERT_MODE)
    except FileExistsError:
        return None
    except OSError as error:
        raise JoinRefused(
            f"the certificate is in place, but {place.file} can't be written: {error.strerror or error}; "
            "mend that, and run the same command again"
        ) from error
    return place.file


def config_text(place: Place, servers: Sequence[str], node: str, labels: Mapping[str, str]) -> str:
    """``agent.yaml`` with what can't be found out on the machine, and nothing else. JSON's strings are YAML's too."""
    named = place.named
    tls = {"ca": str(named.ca), "cert": str(named.cert), "key": str(named.key)}
    lines = [
        f"# The agent of {node}, written by `llmgw agent join`. What is not said here is found out on the machine.",
        f"server: {json.dumps(list(servers))}",
        "tls:",
        *(f"  {name}: {json.dumps(path)}" for name, path in tls.items()),
    ]
    if node != socket.gethostname():
        lines.append(f"node_id: {json.dumps(node)}")
    if labels:
        lines += ["labels:", *(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(labels.items()))]
    if place.work_dir != DEFAULT_WORK_DIR:
        lines += ["supervisor:", f"  work_dir: {json.dumps(str(place.work_dir))}"]
    return "\n".join(lines) + "\n"


def _differences(place: Place, servers: Sequence[str], granted: Granted) -> list[str]:
    """What a file that was there already says otherwise; it is the operator's, and stays as it is."""
    config = place.config
    if config is None:
        return []
    notes = []
    if not set(servers) & set(config.servers):
        notes.append(
            f"{place.file} names {', '.join(config.servers)} as `server`, and this joined at {', '.join(servers)}: "
            "the agent dials what the file says"
        )
    if missing := {key: value for key, value in granted.labels.items() if config.labels.get(key) != value}:
        said = ", ".join(f"{key}={value}" for key, value in sorted(missing.items()))
        notes.append(f"the token gives the labels {said}, which {place.file} does not have: add them under `labels`")
    return notes
