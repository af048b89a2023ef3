"""The server's session rules, without I/O."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmgw.link.messages import Heartbeat, Hello, LogLines, Observed, RoutesAck, TrafficReport
from llmgw.link.session import Admitted, Presented, Refusal, Registry, Session
from llmgw.pki.certificate import PeerIdentity
from tests.exploring import examples

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def registry(**options) -> Registry:
    return Registry(**({"cluster": "lab", "epoch": 5, "servers": ("https://cp:7443",)} | options))


def node_identity(id: str = "a", **changes) -> PeerIdentity:
    identity = PeerIdentity(
        common_name=id,
        role="node",
        id=id,
        cluster="lab",
        serial=f"5e7{id}",
        not_after=NOW + timedelta(days=1),
        roles={"node": id},
    )
    return replace(identity, **changes)


GATEWAY = PeerIdentity(
    common_name="cp-1",
    role="server",
    id="cp-1",
    cluster="lab",
    serial="77",
    not_after=NOW + timedelta(days=1),
    roles={"server": "cp-1", "gateway": "cp-1"},
)


def hello(id: str = "a", **changes) -> Hello:
    return replace(Hello(role="node", id=id, fingerprint=f"machine-{id}", instance="one"), **changes)


def admitted(rules: Registry, said: Hello, identity: PeerIdentity | None = None, address: str = "h:1") -> Admitted:
    verdict = rules.admit(said, identity or node_identity(said.id), address, NOW)
    assert isinstance(verdict, Admitted), verdict
    return verdict


def refused(rules: Registry, said: Hello, identity: PeerIdentity | None = None, address: str = "h:1") -> Refusal:
    verdict = rules.admit(said, identity or node_identity(said.id), address, NOW)
    assert isinstance(verdict, Refusal), verdict
    return verdict


def test_sessions_count_from_one_and_say_all_a_peer_needs():
    rules = registry(heartbeat_s=3.0)
    first, second = admitted(rules, hello("a")), admitted(rules, hello("b"))
    assert (first.session.number, second.session.number) == (1, 2)
    welcome = first.welcome
    assert (welcome.epoch, welcome.session, welcome.cluster, welcome.heartbeat_s) == (5, 1, "lab", 3.0)
    assert welcome.servers == ("https://cp:7443",)


def test_a_gateway_goes_by_the_name_in_its_uri():
    rules = registry()
    admitted(rules, Hello(role="gateway", id="cp-1", fingerprint="m"), GATEWAY)
    verdict = refused(rules, Hello(role="gateway", id="cp-2", fingerprint="m"), GATEWAY)
    assert verdict.code == "identity"
    assert verdict.words == (
        "your certificate is for 'cp-1', but you claim to be 'cp-2': "
        "use that name, or issue a certificate with `--name cp-2`"
    )


def test_a_role_that_the_certificate_lacks():
    verdict = refused(registry(), Hello(role="gateway", id="a"), node_identity("a"))
    assert verdict.code == "role"
    assert verdict.words == (
        "you dial in as a gateway ('a'), but your certificate ('a') is that of a node: give each its own certificate"
    )
    assert verdict.event == "h:1 dials in as a gateway ('a') with the certificate of a node ('a')"
    assert refused(registry(), Hello(role="node", id="cp-1"), GATEWAY).code == "role"


def test_both_names_stand_in_both_texts():
    verdict = refused(registry(), hello("b"), node_identity("a"))
    for words in (verdict.words, verdict.event):
        assert "'a'" in words
        assert "'b'" in words


def test_common_name_and_uri_must_both_be_the_claimed_id():
    assert refused(registry(), hello("a"), node_identity("a", common_name="b")).code == "identity"
    assert refused(registry(), hello("a"), node_identity("a", roles={"node": "b"})).code == "identity"


@pytest.mark.parametrize(("cluster", "shown"), [("other", "for cluster 'other'"), ("", "without an llmgw:// name")])
def test_another_cluster(cluster: str, shown: str):
    verdict = refused(registry(), hello(), node_identity(cluster=cluster, roles={} if not cluster else {"node": "a"}))
    assert verdict.code == "identity"
    assert shown in verdict.words
    assert "'lab'" in verdict.words


@pytest.mark.parametrize(
    ("ours", "theirs", "advice"),
    [
        ((3, 2), (3, 2), None),
        ((3, 2), (2, 1), None),
        ((3, 2), (4, 3), None),
        ((3, 2), (1, 1), "upgrade the peer"),
        ((3, 2), (5, 4), "upgrade the control plane (control planes first, then gateways, then agents)"),
        ((1, 1), (2, 1), None),
    ],
)
def test_protocols_must_overlap(ours: tuple[int, int], theirs: tuple[int, int], advice: str | None):
    rules = registry(protocol=ours[0], oldest_protocol=ours[1])
    said = hello(protocol=theirs[0], oldest_protocol=theirs[1], version="0.9")
    if advice is None:
        assert admitted(rules, said).welcome.protocol == min(ours[0], theirs[0])
        return
    verdict = refused(rules, said)
    assert verdict.code == "protocol"
    for words in (verdict.words, verdict.event):
        assert words.endswith(advice)
        assert "protocol 2 to 3" in words
        assert "llmgw v0.9" in words
    assert rules.live("node", "a") is None


def test_an_expired_certificate_is_refused_though_tls_took_it():
    verdict = refused(registry(), hello(), node_identity(not_after=NOW - timedelta(seconds=1)))
    assert verdict.code == "identity"
    assert (
        "expired on 2026-11-29 11:59:59 UTC (the control plane's clock says 2026-11-29 12:00:00 UTC)" in verdict.words
    )


def test_a_serial_that_is_not_allowed():
    asked = []

    def allow(presented: Presented) -> str | None:
        asked.append((presented.serial, presented.id))
        return "certificate 5e7a was revoked" if presented.id == "a" else None

    rules = registry(allow_serial=allow)
    assert refused(rules, hello("a")).code == "revoked"
    admitted(rules, hello("b"))
    assert asked == [("5e7a", "a"), ("5e7b", "b")]


def test_a_serial_revoked_during_the_session():
    revoked: set[str] = set()
    rules = registry(allow_serial=lambda presented: "revoked" if presented.serial in revoked else None)
    session = admitted(rules, hello()).session
    assert rules.serial_refusal(session) is None
    revoked.add("5e7a")
    verdict = rules.serial_refusal(session)
    assert verdict is not None
    assert verdict.code == "revoked"


def test_a_second_machine_is_refused_with_both_addresses():
    rules = registry()
    first = admitted(rules, hello(), address="10.0.0.1:5").session
    verdict = refused(rules, hello(fingerprint="another", instance="two"), address="10.0.0.2:6")
    assert verdict.code == "duplicate"
    for words in (verdict.words, verdict.event):
        assert "10.0.0.1:5" in words
        assert "10.0.0.2:6" in words
    assert rules.live("node", "a") is first
    assert rules.end(first)
    admitted(rules, hello(fingerprint="another"))


def test_machines_without_a_fingerprint_are_not_the_same():
    rules = registry()
    admitted(rules, hello(fingerprint="", instance="one"))
    assert refused(rules, hello(fingerprint="", instance="two")).code == "duplicate"
    assert admitted(rules, hello(fingerprint="", instance="one")).displaced is not None


def test_the_same_machine_takes_over_and_the_old_session_counts_for_nothing():
    rules = registry()
    old = admitted(rules, hello()).session
    verdict = admitted(rules, hello(instance="two"), address="h:2")
    assert verdict.displaced is old
    assert verdict.displaced_words.startswith("another process of the same machine connected as 'a', from h:2")
    assert not rules.takes(old, Observed(epoch=5, session=old.number))
    assert not rules.takes(old, LogLines(id="1"))
    assert rules.takes(verdict.session, Observed(epoch=5, session=2))
    assert not rules.end(old)
    assert rules.live("node", "a") is verdict.session
    assert rules.dropped == {"stale-session": 2}


def test_the_same_process_takes_over_its_own_session():
    rules = registry()
    admitted(rules, hello())
    verdict = admitted(rules, hello(), address="h:2")
    assert verdict.displaced_words == "the same process connected again, from h:2"


def test_a_node_and_a_gateway_of_the_same_name_are_two():
    rules = registry()
    admitted(rules, hello("cp-1"))
    verdict = admitted(rules, Hello(role="gateway", id="cp-1"), GATEWAY)
    assert verdict.displaced is None


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Observed(epoch=5, session=1), None),
        (Observed(epoch=4, session=1), "stale-epoch"),
        (Observed(epoch=6, session=1), "stale-epoch"),
        (Observed(epoch=5, session=2), "stale-session"),
        (Heartbeat(epoch=5, session=1, sent_at=0.0), None),
        (Heartbeat(epoch=0, session=0, sent_at=0.0), "stale-epoch"),
        (RoutesAck(epoch=5, session=1, version=1), "wrong-role"),
        (TrafficReport(epoch=5, session=1), "wrong-role"),
        (LogLines(id="1"), None),
    ],
)
def test_frames_of_another_epoch_or_session_are_dropped_and_counted(frame, why: str | None):
    rules = registry()
    session = admitted(rules, hello()).session
    assert rules.takes(session, frame) is (why is None)
    assert rules.dropped == ({why: 1} if why else {})


class Sessions(RuleBasedStateMachine):
    """Peers come, go, come back and send old frames in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = registry()
        self.open: list[Session] = []
        self.live: dict[str, Session] = {}
        self.numbers: list[int] = []

    @rule(id=st.sampled_from("ab"), machine=st.sampled_from("xy"), instance=st.sampled_from("12"))
    def come(self, id: str, machine: str, instance: str) -> None:
        said = hello(id, fingerprint=machine, instance=machine + instance)
        before = self.live.get(id)
        verdict = self.rules.admit(said, node_identity(id), "h:1", NOW)
        if isinstance(verdict, Refusal):
            assert before is not None
            assert before.fingerprint != machine
            return
        assert before is None or (before.fingerprint == machine and verdict.displaced is before)
        self.open.append(verdict.session)
        self.live[id] = verdict.session
        self.numbers.append(verdict.session.number)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if not self.open:
            return
        session = data.draw(st.sampled_from(self.open))
        self.open.remove(session)
        was_live = self.live.get(session.id) is session
        assert self.rules.end(session) is was_live
        if was_live:
            del self.live[session.id]

    @rule(data=st.data(), epoch=st.integers(4, 6), number=st.integers(0, 9))
    def send(self, data: st.DataObject, epoch: int, number: int) -> None:
        if not self.open:
            return
        session = data.draw(st.sampled_from(self.open))
        counts = self.live.get(session.id) is session and epoch == 5 and number == session.number
        assert self.rules.takes(session, Observed(epoch=epoch, session=number)) is counts

    @invariant()
    def at_most_one_live_session_per_id(self) -> None:
        for id in "ab":
            assert self.rules.live("node", id) is self.live.get(id)

    @invariant()
    def numbers_only_grow(self) -> None:
        assert self.numbers == sorted(set(self.numbers))


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
