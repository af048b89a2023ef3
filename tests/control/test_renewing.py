"""Certificates over time: renewed one from another, proved, copied, revoked."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmgw.control.certificate_operations import ask_to_renew, revoke
from llmgw.control.certificate_views import expiry_warning
from llmgw.control.errors import ApiError
from llmgw.control.times import rfc3339
from llmgw.link.joining import JoinRefused, RenewRequest
from llmgw.link.messages import Renew
from llmgw.link.server import Peer
from llmgw.link.session import Refusal
from llmgw.pki.authority import Authority
from llmgw.pki.issuer import Issuer
from llmgw.pki.signing import Request, node_request
from llmgw.pki.signing_request import new_key, read_request
from llmgw.store.identities import Certificate
from tests.control.clock import Time
from tests.control.office import ADDRESS, DAY_S, Machine, Office, open_office, refused
from tests.control.year import Year


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(tmp_path) as opened:
        yield opened


def turned_away(verdict: Peer | Refusal) -> str:
    assert isinstance(verdict, Refusal)
    assert verdict.code == "revoked"
    return verdict.words


# -- a line of renewals


async def test_the_next_one_counts_from_its_first_use(office: Office) -> None:
    first = await office.joined()
    second = await office.renew(first)
    office.time.move(1.0)
    assert office.states() == ["token current", "renewal next"]
    assert isinstance(office.dial(first), Peer), "until then the one before is good"
    assert office.states() == ["token current", "renewal next"]
    assert isinstance(office.dial(second), Peer)
    assert office.states() == ["token retired", "renewal current"]
    known = office.plane.book.certificate(second.serial)
    assert known is not None
    assert (known.previous, known.line) == (first.serial, first.serial)


async def test_a_lost_answer_locks_nobody_out(office: Office) -> None:
    machine = await office.joined()
    office.time.move(1.0)
    lost = await office.renew(machine)
    office.time.move(-0.5)
    again = await office.renew(machine)
    assert office.states() == ["token current", "renewal superseded", "renewal next"]
    assert isinstance(office.dial(lost), Peer), "its answer came after all, late"
    assert office.states() == ["token retired", "renewal superseded", "renewal current"]
    assert again.serial != lost.serial


async def test_renewing_with_the_next_one_is_a_use_of_it(office: Office) -> None:
    machine = await office.joined()
    second = await office.renew(machine)
    third = await office.renew(second)
    assert office.states() == ["token retired", "renewal current", "renewal next"]
    assert isinstance(office.dial(third), Peer)


@pytest.mark.parametrize("minutes", [-4.0, -6.0, 10.0])
async def test_a_clock_that_is_off_at_renewal(office: Office, minutes: float) -> None:
    machine = await office.joined()
    if minutes == -4.0:
        await office.renew(machine, clock_off_s=60 * minutes)
        return
    with pytest.raises(JoinRefused) as caught:
        await office.renew(machine, clock_off_s=60 * minutes)
    assert refused(caught.value) == (403, "clock")
    assert f"your clock is {abs(minutes):.0f} min " in caught.value.message
    assert office.states() == ["token current"]


@pytest.mark.parametrize(
    ("changes", "code"), [({"cluster": "x"}, "identity"), ({"roles": {"gateway": "gpu-1"}}, "role")]
)
async def test_only_nodes_of_this_cluster_renew(office: Office, changes: dict[str, Any], code: str) -> None:
    machine = await office.joined()
    request = RenewRequest(csr=machine.csr, time=rfc3339(office.time().wall_s))
    with pytest.raises(JoinRefused) as caught:
        await office.joining.renew(replace(machine.identity, **changes), request, ADDRESS)
    assert refused(caught.value) == (403, code)


# -- copied keys


async def test_a_key_that_was_copied_is_seen_and_neither_machine_is_let_in(office: Office) -> None:
    first = await office.joined()
    copy = first.copied()
    second = await office.renew(first)
    office.time.move(1.0)
    assert isinstance(office.dial(second), Peer)
    words = turned_away(office.dial(copy, "10.0.0.66:1"))
    assert f"certificate {first.serial} of gpu-1 was replaced by {second.serial}, which has been used since" in words
    assert "llmgw ctl node token gpu-1 --replace" in words
    assert [node for node, _ in office.closed] == ["gpu-1"], "and the one that was connected is not any more"
    assert "its key is on two machines" in turned_away(office.dial(second))
    (alarm,) = await office.events("certificate.copied")
    assert "10.0.0.66:1" in alarm
    with pytest.raises(JoinRefused) as caught:
        await office.renew(second)
    assert refused(caught.value) == (403, "copied_key")
    machine = Machine("gpu-1")
    await office.join(await office.token(take_over=True), machine)
    assert isinstance(office.dial(machine), Peer)


async def test_an_older_connection_of_the_same_process_that_comes_late_is_no_copy(office: Office) -> None:
    first = await office.joined()
    second = await office.renew(first)
    office.time.move(1.0)
    assert isinstance(office.dial(second), Peer)
    assert "dial in with that one" in turned_away(office.dial(first))
    assert await office.events("certificate.copied") == []
    assert isinstance(office.dial(second), Peer)


async def test_of_two_machines_from_one_image_the_second_is_refused_and_the_first_undisturbed(office: Office) -> None:
    first = await office.joined()
    second = Machine("gpu-1", first.key, first.certificate, "another-machine", "another-process")
    verdict = office.dial(second, "10.0.0.66:1")
    assert isinstance(verdict, Refusal)
    assert verdict.code == "duplicate"
    for words in (verdict.words, verdict.event):
        assert ADDRESS in words
        assert "10.0.0.66:1" in words
        assert "llmgw ctl node token NAME" in words
    assert office.closed == []
    await office.renew(second)
    assert isinstance(office.dial(first), Peer)
    assert await office.events("certificate.copied") == []


async def test_a_file_stays_good_beside_a_newer_one(office: Office) -> None:
    issued = Authority.load(office.pki)
    machines = []
    for _ in range(2):
        machine = Machine("gpu-1", fingerprint="m")
        now = _moment(office.time)
        machine.certificate = issued.signer.sign(_node("gpu-1", now), read_request(machine.csr))
        machines.append(machine)
    for machine in (*machines, *machines):
        assert isinstance(office.dial(machine), Peer)
    assert office.states() == ["file current", "file current"]
    assert len(await office.events("certificate.entered")) == 2
    await revoke(office.identities, machines[0].serial, "replaced")
    turned_away(office.dial(machines[0]))
    assert isinstance(office.dial(machines[1]), Peer)


async def test_what_an_issuing_key_signed_and_nobody_wrote_down_is_entered_too(office: Office) -> None:
    """As after a restore of an older store."""
    issuer = Issuer.load(office.pki, office.own.identity.roots)
    assert issuer is not None
    machine = Machine("gpu-1")
    machine.certificate = issuer.sign_node("gpu-1", read_request(machine.csr), DAY_S, _moment(office.time)).certificate
    assert isinstance(office.dial(machine), Peer)
    assert office.states() == ["unseen current"]
    newer = await office.renew(machine)
    assert isinstance(office.dial(newer), Peer)
    assert office.states() == ["unseen retired", "renewal current"]


# -- off for too long


async def test_a_node_that_was_off_proves_its_key_three_times_and_no_more(office: Office) -> None:
    machine = await office.joined()
    office.hang_up("gpu-1")
    for _ in range(3):
        office.time.move(3 * DAY_S)
        with pytest.raises(JoinRefused) as caught:
            await office.renew(machine)
        assert refused(caught.value) == (403, "expired")
        machine = await office.recover(machine)
        assert isinstance(office.dial(machine), Peer)
        office.hang_up("gpu-1")
    office.time.move(3 * DAY_S)
    with pytest.raises(JoinRefused) as caught:
        await office.recover(machine)
    assert refused(caught.value) == (403, "recovery_limit")
    assert "llmgw ctl node token gpu-1 --replace" in caught.value.hint


async def test_an_ordinary_renewal_gives_it_all_its_tries_again(office: Office) -> None:
    machine = await office.joined()
    for _ in range(4):
        for _ in range(2):
            office.time.move(2 * DAY_S)
            machine = await office.recover(machine)
        machine = await office.renew(machine)


async def test_a_proof_is_good_once_and_for_a_minute_and_for_its_own_key(office: Office) -> None:
    machine = await office.joined()
    office.time.move(2 * DAY_S)
    nonce = office.joining.nonce(machine.serial)
    for changes, code in (
        ({"nonce": "x"}, "nonce"),
        ({"nonce": nonce}, "proof"),
        ({"nonce": nonce}, "nonce"),
        ({"signature": base64.b64encode(b"x").decode()}, "proof"),
        ({"signature": "!"}, "malformed"),
        ({"certificate": "x"}, "certificate"),
        ({"csr": "x"}, "csr"),
    ):
        with pytest.raises(JoinRefused) as caught:
            await office.recover(machine, **changes)
        assert caught.value.code == code
    other = Machine("gpu-1", new_key(), machine.certificate)
    with pytest.raises(JoinRefused, match="does not prove that you have the key"):
        await office.recover(other)
    await office.recover(machine)


async def test_a_certificate_of_another_authority_is_not_recovered(office: Office, tmp_path: Path) -> None:
    async with open_office(tmp_path / "other") as other:
        foreign = await other.joined()
    with pytest.raises(JoinRefused) as caught:
        await office.recover(foreign)
    assert refused(caught.value) == (403, "foreign")


async def test_an_expired_certificate_that_is_revoked_stays_out(office: Office) -> None:
    machine = await office.joined()
    office.hang_up("gpu-1")
    office.time.move(3 * DAY_S)
    answer = await revoke(office.identities, machine.serial, "stolen")
    assert answer.serials == (machine.serial,)
    with pytest.raises(JoinRefused) as caught:
        await office.recover(machine)
    assert refused(caught.value) == (403, "revoked")
    assert "(stolen)" in caught.value.message
    assert await office.crl.look()
    written = (office.pki / "crl.pem").read_bytes()
    office.time.move(8 * DAY_S)
    assert await office.crl.look(), "it is written anew though nothing was revoked"
    assert (office.pki / "crl.pem").read_bytes() != written


# -- taken away


async def test_a_revoked_node_is_cut_off_and_says_so_in_the_cluster(office: Office) -> None:
    await office.joined()
    await office.joined("gpu-2")
    answer = await revoke(office.identities, "gpu-1", "stolen")
    assert (answer.node, answer.closed, len(answer.serials)) == ("gpu-1", True, 1)
    assert answer.words == "gpu-1: 1 certificate revoked; its stream is closed"
    ((node, words),) = office.closed
    assert (node, "(stolen)" in words) == ("gpu-1", True)
    found = office.plane.cluster.nodes["gpu-1"]
    assert (found.state, found.why) == ("revoked", "revoked by an operator: stolen")
    assert "gpu-2" in office.live
    assert isinstance(office.dial(await office.renew(await office.joined("gpu-3"))), Peer)


async def test_the_engines_of_a_revoked_node_leave_the_routing_table(office: Office) -> None:
    floor = office.floor
    await office.joined()
    gateway = floor.join_gateway("gw")
    await floor.obey(office.live["gpu-1"])
    before = (await floor.table(gateway)).routes[0]
    assert {each.replica for each in before.endpoints} == set(office.plane.cluster.replicas)
    answer = await revoke(office.identities, "gpu-1", "stolen")
    after = (await floor.table(gateway)).routes[0]
    assert (after.endpoints, after.draining) == ((), ()), "nor is one of them left to end in peace"
    assert len(before.endpoints) == len(answer.replicas) == 2
    for replica in answer.replicas:
        assert replica.state != "ready"
        assert replica.why


async def test_what_was_renewed_from_a_revoked_certificate_and_not_used_yet_goes_with_it(office: Office) -> None:
    machine = await office.joined()
    other = await office.joined("gpu-2")
    newer = await office.renew(machine)
    answer = await revoke(office.identities, machine.serial, "its key was stolen")
    assert answer.serials == (machine.serial, newer.serial)
    assert answer.closed
    turned_away(office.dial(machine))
    turned_away(office.dial(newer))
    (words,) = await office.events("certificate.revoked")
    assert newer.serial in words
    assert isinstance(office.dial(other), Peer)


async def test_a_retired_certificate_that_is_revoked_takes_nothing_with_it(office: Office) -> None:
    machine = await office.joined()
    newer = await office.renew(machine)
    assert isinstance(office.dial(newer), Peer)
    newest = await office.renew(newer)
    assert (await revoke(office.identities, machine.serial, "an old disk was lost")).serials == (machine.serial,)
    assert isinstance(office.dial(newest), Peer)


async def test_a_file_for_a_revoked_node_is_refused_until_the_node_is_removed(office: Office) -> None:
    await office.joined()
    await revoke(office.identities, "gpu-1", "stolen")
    before = Machine("gpu-1")
    signer = Authority.load(office.pki).signer
    before.certificate = signer.sign(_node("gpu-1", _moment(office.time)), read_request(before.csr))
    assert "gpu-1 was revoked on" in turned_away(office.dial(before))
    async with office.admin() as client:
        assert (await client.delete("/api/v1/nodes/gpu-1")).status_code == 200
    assert "was removed on" in turned_away(office.dial(before))
    office.time.move(1.0)
    after = Machine("gpu-1")
    after.certificate = signer.sign(_node("gpu-1", _moment(office.time)), read_request(after.csr))
    assert isinstance(office.dial(after), Peer)


async def test_a_serial_that_was_never_seen_can_be_revoked(office: Office) -> None:
    machine = Machine("gpu-1")
    signer = Authority.load(office.pki).signer
    machine.certificate = signer.sign(_node("gpu-1", _moment(office.time)), read_request(machine.csr))
    colons = ":".join(f"{machine.serial:0>40}"[at : at + 2] for at in range(0, 40, 2)).upper()
    await revoke(office.identities, colons, "lost")
    assert "(lost)" in turned_away(office.dial(machine))
    with pytest.raises(ApiError, match="no node or serial is called 'gpu-7'"):
        await revoke(office.identities, "gpu-7", "x")


async def test_the_control_planes_own_certificate_is_not_revoked_by_mistake(office: Office) -> None:
    own = office.own.identity.own.serial
    office.plane.book.put(Certificate(serial=own, node="cp", role="gateway"))
    with pytest.raises(ApiError, match="is this control plane's own certificate"):
        await revoke(office.identities, own, "oops")


async def test_a_node_is_asked_to_renew_where_it_can(office: Office) -> None:
    machine = await office.joined()
    peer = office.live["gpu-1"]
    while len(peer.outbox):
        await peer.outbox.get()
    assert ask_to_renew(office.identities, "gpu-1").serial == machine.serial
    assert isinstance(await peer.outbox.get(), Renew)
    with pytest.raises(ApiError, match="no node is called 'x'"):
        ask_to_renew(office.identities, "x")
    office.hang_up("gpu-1")
    await office.floor.settled()
    with pytest.raises(ApiError, match="gpu-1 is not connected"):
        ask_to_renew(office.identities, "gpu-1")


async def test_expiry_is_warned_of(office: Office) -> None:
    await office.joined()
    book = office.plane.book
    assert expiry_warning(book, "gpu-1", office.time().wall_s) is None
    words = expiry_warning(book, "gpu-1", office.time().wall_s + 0.8 * DAY_S)
    assert words is not None
    assert words.startswith("its certificate expires on ")
    async with office.admin() as client:
        office.time.move(1.1 * DAY_S)
        await office.floor.settled()
        (node,) = (await client.get("/api/v1/nodes")).json()
        assert any(words.startswith("its certificate expired on ") for words in node["warnings"])
        assert "llmgw_node_certificate_expiry_seconds" in (await client.get("/metrics")).text


# -- a year of it


async def test_weeks_of_renewals_and_kills_lock_nobody_out(tmp_path: Path) -> None:
    """``python -m tests.control.year`` does the same for a whole year."""
    await Year(tmp_path, seed=1).run(15.0)


def _moment(time: Time) -> datetime:
    return datetime.fromtimestamp(time().wall_s, UTC)


def _node(name: str, now: datetime) -> Request:
    return node_request("c", name, 365 * DAY_S, now)
