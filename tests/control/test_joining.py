"""Joining by token: who gets a certificate, who does not, and what each of them is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmgw.control.certificate_operations import revoke
from llmgw.control.errors import ApiError
from llmgw.control.operations import remove_node
from llmgw.link.joining import JoinRefused
from llmgw.link.server import Peer
from llmgw.link.session import Refusal
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of
from llmgw.pki.chain import read_chain
from llmgw.pki.signing_request import new_key, pem_of_key
from llmgw.store.base import Change, StoreError
from llmgw.store.identities import Token
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore
from tests.control.office import ADDRESS, DAY_S, Machine, Office, open_office, refused, shown


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(tmp_path) as opened:
        yield opened


async def test_a_machine_joins_and_is_let_in(office: Office) -> None:
    token = await office.token(labels={"rack": "a3"})
    machine = Machine("gpu-1", fingerprint="f")
    given = await office.join(token, machine)
    chain = read_chain(given.certificate, given.ca, node="gpu-1", key=machine.key)
    facts = chain.facts
    assert [str(uri) for uri in facts.uris] == ["llmgw://c/node/gpu-1"]
    assert (facts.not_after.timestamp() - office.time().wall_s, facts.issuer) == (DAY_S, "llmgw c issuer")
    assert (given.node, given.cluster, given.servers, given.labels) == (
        "gpu-1",
        "c",
        ("https://10.0.0.1:7443",),
        {"rack": "a3"},
    )
    assert office.states() == ["token next"]
    assert isinstance(office.dial(machine), Peer)
    assert office.states() == ["token current"]
    assert await office.events("certificate.entered") == []
    (words,) = await office.events("certificate.issued")
    assert words == f"gpu-1 joined by token {token.id} from {ADDRESS}: certificate {facts.serial}"


async def test_nothing_of_a_request_but_its_key_is_taken(office: Office) -> None:
    machine = Machine("gpu-1")
    liar = Machine("somebody-else", key=machine.key)
    given = await office.joining.join(office.request(await office.token(), machine, csr=liar.csr), ADDRESS)
    machine.take(given)
    assert machine.identity.common_name == "gpu-1"
    assert machine.identity.roles == {"node": "gpu-1"}


async def test_the_same_token_and_key_get_the_same_answer_and_no_other_key_does(office: Office) -> None:
    token, machine = await office.token(), Machine("gpu-1")
    first = await office.join(token, machine)
    assert await office.join(token, machine) == first
    office.time.move(800.0)
    assert await office.join(token, machine, clock_off_s=9999.0) == first, "it was judged already"
    with pytest.raises(JoinRefused) as caught:
        await office.join(token, Machine("gpu-1"), "10.0.0.66:5")
    assert refused(caught.value) == (403, "token_used")
    assert re.fullmatch(
        r"this token for gpu-1 was used on \S+ \S+ UTC from 10\.0\.0\.9:40000, with another key: "
        "a token lets one machine in, once",
        caught.value.message,
    )
    assert "llmgw ctl cert revoke gpu-1" in caught.value.hint
    office.time.move(101.0)
    with pytest.raises(JoinRefused) as caught:
        await office.join(token, machine)
    assert refused(caught.value) == (403, "token_expired")
    assert office.states() == ["token next"]


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "sqlite"])
async def test_of_two_machines_with_one_token_one_gets_in_two_hundred_times(tmp_path: Path, durable: bool) -> None:
    store = await SqliteStore.open(tmp_path / "db" / "llmgw.db") if durable else MemoryStore()
    async with open_office(tmp_path, store=store) as office:
        for number in range(200):
            name = f"n{number}"
            token = await office.token(name)
            rivals = [Machine(name), Machine(name)]
            answers = await asyncio.gather(*(office.join(token, rival) for rival in rivals), return_exceptions=True)
            lost = [answer for answer in answers if isinstance(answer, JoinRefused)]
            assert [each.code for each in lost] == ["token_used"]
            assert len(answers) - len(lost) == 1
            assert office.states(name) == ["token next"]
    if isinstance(store, SqliteStore):
        saved = await store.load()
        await store.close()
        assert len(saved.certificates) == 200


async def test_the_database_decides_a_race_that_the_control_plane_did_not_see(tmp_path: Path) -> None:
    """As if another control plane had let somebody in by it a moment ago."""
    async with open_office(tmp_path) as office:
        token = await office.token()
        await office.floor.settled()
        stored = next(each for each in (await office.plane.store.load()).tokens if each.id == token.id)
        assert await office.plane.store.claim_token(office.plane.epoch, replace(stored, used_key="theirs"), Change())
        with pytest.raises(JoinRefused) as caught:
            await office.join(token, Machine("gpu-1"))
        assert caught.value.code == "token_used"
        assert office.states() == []


@pytest.mark.parametrize(
    ("changes", "status", "code", "words"),
    [
        ({"secret": "x"}, 403, "token_unknown", "this control plane knows no such token"),
        ({"id": "x"}, 403, "token_unknown", "this control plane knows no such token"),
        ({"node": "gpu-2"}, 403, "token_node", "this token is for 'gpu-1', and 'gpu-2' wants to join by it"),
        ({"csr": "x"}, 400, "csr", "this is no signing request in PEM form"),
        ({"csr": pem_of_key(new_key()).decode()}, 400, "csr", "this is a private key, and it must not leave"),
        ({"csr": Machine("x", ec.generate_private_key(ec.SECP521R1())).csr}, 400, "csr", "a key of another kind"),
        ({"time": "soon"}, 403, "clock", "'soon' is no time: RFC 3339 was expected"),
    ],
)
async def test_requests_that_are_refused(
    office: Office, changes: dict[str, str], status: int, code: str, words: str
) -> None:
    token = await office.token()
    with pytest.raises(JoinRefused) as caught:
        await office.join(token, Machine("gpu-1"), **changes)
    assert (refused(caught.value), words in caught.value.message) == ((status, code), True)
    assert shown(caught.value)["type"] == "invalid_request_error"
    assert office.states() == []
    await office.join(token, Machine("gpu-1"))  # and nothing was used up


@pytest.mark.parametrize(
    ("minutes", "words"),
    [
        (-4.0, None),
        (4.9, None),
        (-6.0, "your clock is 6 min behind the control plane's (yours says 1970-01-12 13:40:40 UTC, the control "),
        (10.0, "your clock is 10 min ahead of the control plane's"),
        (30 * 1440.0, "your clock is 30 days ahead of the control plane's"),
    ],
)
async def test_a_clock_that_is_off(office: Office, minutes: float, words: str | None) -> None:
    token, machine = await office.token(), Machine("gpu-1")
    if words is None:
        await office.join(token, machine, clock_off_s=60 * minutes)
        return
    with pytest.raises(JoinRefused) as caught:
        await office.join(token, machine, clock_off_s=60 * minutes)
    assert refused(caught.value) == (403, "clock")
    assert words in caught.value.message
    assert caught.value.message.endswith("at most 5 min are tolerated")
    assert office.states() == []
    await office.join(token, machine)


async def test_a_token_that_expired_says_since_when(office: Office) -> None:
    token = await office.token(ttl_s=60.0)
    office.time.move(200.0)
    with pytest.raises(JoinRefused) as caught:
        await office.join(token, Machine("gpu-1"))
    assert refused(caught.value) == (403, "token_expired")
    assert caught.value.message.endswith(", 2 min 20 s ago")


async def test_without_an_issuing_key_there_is_no_token_and_no_joining(tmp_path: Path) -> None:
    async with open_office(tmp_path, issuer=False) as office:
        with pytest.raises(ApiError) as caught:
            await office.token()
        assert (caught.value.status, caught.value.code) == (409, "no_issuer")
        assert caught.value.message.startswith("this control plane holds no issuing key: ")
        assert f"llmgw ctl cert issue-issuer --dir PKI --out {office.pki}" in caught.value.message


async def test_an_issuing_key_of_another_authority_is_said_to_be_that(tmp_path: Path) -> None:
    async with open_office(tmp_path / "other") as other:
        foreign = [(other.pki / name).read_bytes() for name in ("issuer.pem", "issuer-key.pem")]
    async with open_office(tmp_path, issuer=False) as office:
        for name, data in zip(("issuer.pem", "issuer-key.pem"), foreign, strict=True):
            (office.pki / name).write_bytes(data)
        assert await office.own.look(facts_of(office.own.identity.roots[0]).not_before)
        with pytest.raises(ApiError, match=r"can't be used: .*issuer.pem is not of the authority in"):
            await office.token()


# -- names that somebody has


async def test_a_name_that_a_live_machine_has_is_not_given_away(office: Office) -> None:
    unused = await office.token()
    first = await office.joined()
    with pytest.raises(ApiError) as minting:
        await office.token()
    assert (minting.value.status, minting.value.code) == (409, "exists")
    assert minting.value.message == f"gpu-1 is a node of this cluster already, connected from {ADDRESS}"
    with pytest.raises(JoinRefused) as joining:
        await office.join(unused, Machine("gpu-1"), "10.0.0.77:1")
    assert refused(joining.value) == (409, "exists")
    assert ADDRESS in joining.value.message
    assert "you are at 10.0.0.77:1" in joining.value.message
    assert "llmgw ctl node token gpu-1 --replace" in joining.value.hint
    assert "llmgw ctl node remove gpu-1" in joining.value.hint
    assert office.live["gpu-1"].identity.serial == first.serial


async def test_a_machine_that_was_installed_anew_takes_its_name_back_with_replace(office: Office) -> None:
    old = await office.joined()
    office.hang_up("gpu-1")
    with pytest.raises(ApiError, match="is a node of this cluster already"):
        await office.token()
    machine = Machine("gpu-1", fingerprint="anew")
    await office.join(await office.token(take_over=True), machine)
    assert office.states() == ["token revoked", "token next"]
    assert isinstance(office.dial(machine, "10.0.0.78:1"), Peer)
    verdict = office.dial(old)
    assert not isinstance(verdict, Peer)
    assert verdict.code == "revoked"
    assert "its name was given to another machine, by token" in verdict.words
    assert list(office.plane.cluster.nodes) == ["gpu-1"]


async def test_the_stream_of_a_machine_that_lost_its_name_is_closed(office: Office) -> None:
    await office.joined()
    await office.join(await office.token(take_over=True), Machine("gpu-1", fingerprint="another"))
    ((node, words),) = office.closed
    assert node == "gpu-1"
    assert "its name was given to another machine" in words


async def test_a_node_that_was_removed_leaves_its_name_and_its_certificate_is_no_good(office: Office) -> None:
    old = await office.joined()
    office.hang_up("gpu-1")
    for _ in range(20):
        office.time.move(3.0)
        await office.floor.settled()
    await remove_node(office.plane, "gpu-1", office.serials)
    assert office.plane.cluster.nodes == {}
    refusal = office.dial(old)
    assert isinstance(refusal, Refusal)
    assert f"certificate {old.serial} of gpu-1 was revoked" in refusal.words
    assert "(its node was removed)" in refusal.words
    await office.floor.settled()
    assert office.plane.cluster.nodes == {}, "that it dials makes it no node again"
    machine = Machine("gpu-1", fingerprint="another")
    await office.join(await office.token(), machine)
    assert isinstance(office.dial(machine), Peer)
    await office.floor.settled()
    assert office.plane.cluster.nodes["gpu-1"].state == "ready"


async def test_a_revoked_node_comes_back_by_a_token_that_says_so(office: Office) -> None:
    await office.joined()
    await revoke(office.identities, "gpu-1", "stolen")
    assert office.plane.cluster.nodes["gpu-1"].state == "revoked"
    with pytest.raises(ApiError, match="is a node of this cluster already"):
        await office.token()
    machine = Machine("gpu-1")
    await office.join(await office.token(take_over=True), machine)
    assert isinstance(office.dial(machine), Peer)
    await office.floor.settled()
    assert office.plane.cluster.nodes["gpu-1"].state == "ready"


async def test_a_key_that_is_another_nodes_or_was_revoked_gets_nothing(office: Office) -> None:
    known = await office.joined("gpu-9")
    with pytest.raises(JoinRefused) as caught:
        await office.join(await office.token(), Machine("gpu-1", key=known.key))
    assert refused(caught.value) == (403, "copied_key")
    assert caught.value.message == f"the key of this request is that of certificate {known.serial} of gpu-9"
    await revoke(office.identities, known.serial, "stolen")
    with pytest.raises(JoinRefused, match="which was revoked"):
        await office.join(await office.token("gpu-9", take_over=True), Machine("gpu-9", key=known.key))


# -- what a token says


async def test_a_token_names_the_authority_that_the_servers_certificate_is_of(office: Office) -> None:
    token = await office.token()
    root = Authority.load(office.pki).certificate
    assert token.authority_hash == facts_of(root).spki
    assert token.addresses == ("https://10.0.0.1:7443",)
    assert office.joining.authority()["ca"].encode() == (office.pki / "ca.pem").read_bytes()
    der = root.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert len(der) == 91


async def test_its_secret_is_stored_nowhere(office: Office) -> None:
    token = await office.token()
    await office.floor.settled()
    saved = await office.plane.store.load()
    assert [each.id for each in saved.tokens] == [token.id]
    assert token.secret not in repr(saved)
    assert token.secret not in repr(token)


async def test_no_token_names_an_address_that_the_servers_certificate_lacks(office: Office) -> None:
    identities = office.identities
    office.identities = replace(identities, servers=("https://10.0.0.1:7443", "https://cp2.example:7443"))
    with pytest.raises(ApiError) as caught:
        await office.token()
    assert (caught.value.status, caught.value.code) == (409, "address")
    assert "https://cp2.example:7443 is advertised, and the server's certificate is not for 'cp2.example'" in str(
        caught.value
    )
    assert "--san 10.0.0.1 --san cp.example --san cp2.example --force" in caught.value.hint or (
        "--san cp.example --san 10.0.0.1 --san cp2.example --force" in caught.value.hint
    )
    office.identities = replace(identities, servers=())
    with pytest.raises(ApiError, match="no address is advertised"):
        await office.token()
    office.identities = replace(identities, servers=("https://CP.example:7443",))
    await office.token()


class Full(MemoryStore):
    """Takes nothing while ``full``: one time before it is written, one time after."""

    full = False
    after = False

    async def claim_token(self, epoch: int, token: Token, change: Change) -> bool:
        if self.full and not self.after:
            raise StoreError("the disk is full")
        won = await super().claim_token(epoch, token, change)
        if self.full:
            raise StoreError("the answer was lost")
        return won


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written, and the answer lost"])
async def test_a_store_that_fails_bricks_nobody(tmp_path: Path, after: bool) -> None:
    store = Full()
    async with open_office(tmp_path, store=store) as office:
        token, machine = await office.token(), Machine("gpu-1")
        store.full, store.after = True, after
        with pytest.raises(JoinRefused) as caught:
            await office.join(token, machine)
        assert refused(caught.value) == (503, "store_unavailable")
        store.full = False
        await office.join(token, machine)
        assert isinstance(office.dial(machine), Peer)
        with pytest.raises(JoinRefused, match="was used"):
            await office.join(token, Machine("gpu-1"))


async def test_what_is_known_survives_the_control_plane(tmp_path: Path) -> None:
    store = MemoryStore()
    async with open_office(tmp_path, store=store) as office:
        token, machine = await office.token(), Machine("gpu-1")
        first = await office.join(token, machine)
    async with open_office(tmp_path, store=store, time=office.time) as office:
        assert await office.join(token, machine) == first
        with pytest.raises(JoinRefused, match="was used"):
            await office.join(token, Machine("gpu-1"))
        assert isinstance(office.dial(machine), Peer)
        assert await office.events("certificate.entered") == []
