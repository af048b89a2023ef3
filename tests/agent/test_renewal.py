"""Certificates that don't run out: renewed in time, recovered when they did, and said where neither works."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmgw.agent.identity import IdentityStore, NamedFiles, Pair
from llmgw.agent.joining import join, place_of
from llmgw.agent.renewal import FINAL, RETRY_EXPIRED_MOST_S, Failing, Renewal, due_at, retry_after_s
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import read_certificate
from llmgw.pki.contexts import ClientIdentity
from llmgw.pki.signing_request import key_hash, key_of_pem
from tests.agent.issuing import Issuing

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
async def issuing(tmp_path: Path) -> AsyncIterator[Issuing]:
    async with Issuing.make(tmp_path / "cp").serving() as found:
        yield found


class Node:
    """A node that has joined, its renewal, and a clock of its own."""

    def __init__(self, issuing: Issuing, store: IdentityStore, named: NamedFiles) -> None:
        self.ahead_s = 0.0
        self.store = store
        self.renewed: list[str] = []
        self.changes = 0
        self.servers: tuple[str, ...] = (issuing.url,)
        self.cut_off = False
        self.renewal = Renewal(
            store=store,
            files=ClientIdentity(named.ca, named.cert, named.key),
            servers=lambda: self.servers,
            renewed=self.renewed.append,
            changed=self._changed,
            cut_off=lambda: self.cut_off,
            clock=lambda: datetime.now(UTC) + timedelta(seconds=self.ahead_s),
            rng=random.Random(1),
        )

    def _changed(self) -> None:
        self.changes += 1

    @property
    def pair(self) -> Pair:
        pair = self.store.current()
        assert pair is not None
        return pair

    def due(self) -> datetime:
        return due_at(self.pair, datetime.now(UTC) + timedelta(seconds=self.ahead_s))


@pytest.fixture
async def node(issuing: Issuing, tmp_path: Path) -> Node:
    place = place_of(tmp_path / "etc" / "agent.yaml", tmp_path / "work")
    joined = await join(issuing.token(), (), place)
    return Node(issuing, place.store, joined.named)


def later(issuing: Issuing, node: Node, seconds: float) -> None:
    """Time goes by for both."""
    issuing.ahead_s += seconds
    node.ahead_s += seconds


async def test_nothing_is_asked_before_it_is_time(issuing: Issuing, node: Node) -> None:
    before = len(issuing.asked)
    assert 0 < await node.renewal.look() <= 60
    later(issuing, node, 0.44 * issuing.lifetime_s)
    assert await node.renewal.look() <= 60
    assert len(issuing.asked) == before
    assert node.renewed == []


async def test_it_is_renewed_by_the_certificate_in_use_with_a_new_key(issuing: Issuing, node: Node) -> None:
    first = node.pair
    later(issuing, node, 0.61 * issuing.lifetime_s)
    await node.renewal.look()
    second = node.pair
    assert issuing.shown == [first.serial]
    assert second.serial != first.serial
    assert key_hash(second.key.public_key()) != key_hash(first.key.public_key())
    assert second.not_after > first.not_after
    assert len(node.renewed) == 1
    assert node.renewal.warnings() == ()
    later(issuing, node, 60)
    await node.renewal.look()
    assert len(node.renewed) == 1


async def test_it_is_renewed_at_once_where_somebody_asks_for_it(issuing: Issuing, node: Node) -> None:
    first = node.pair
    node.renewal.ask()
    await node.renewal.look()
    assert node.pair.serial != first.serial


async def test_a_lost_answer_is_asked_for_again_with_the_same_key(issuing: Issuing, node: Node) -> None:
    later(issuing, node, 0.61 * issuing.lifetime_s)
    issuing.lose = 2
    for _ in range(3):
        await node.renewal.look()
        later(issuing, node, 60)
    assert len(issuing.shown) == 3
    assert len(issuing.issued) == 2
    assert len(node.renewed) == 1


async def test_the_next_control_plane_is_asked_where_one_is_gone(issuing: Issuing, node: Node) -> None:
    node.servers = ("https://127.0.0.1:1", *node.servers)
    node.renewal.ask()
    await node.renewal.look()
    assert len(node.renewed) == 1


@pytest.mark.parametrize("code", [*sorted(FINAL - {"no_issuer"}), ""])
async def test_what_keeps_failing_is_said(issuing: Issuing, node: Node, code: str) -> None:
    later(issuing, node, 0.61 * issuing.lifetime_s)
    if code:
        issuing.refuse = (code, f"refused for {code}")
    else:
        node.servers = ("https://127.0.0.1:1",)
    with capture_logs() as logs:
        for _ in range(3):
            await node.renewal.look()
            later(issuing, node, 3600)
    assert [line["event"] for line in logs] == ["the certificate can't be renewed"], "once, not each time"
    (warning,) = node.renewal.warnings()
    assert "can't be renewed since" in warning
    assert (f"refused for {code}" if code else "connection refused") in warning
    assert node.changes >= 1
    issuing.refuse, node.servers = None, (issuing.url,)
    node.renewal.ask()
    await node.renewal.look()
    assert node.renewal.warnings() == ()


async def test_a_control_plane_that_does_not_issue_is_no_failure_until_the_end_is_near(
    issuing: Issuing, node: Node
) -> None:
    issuing.refuse = ("no_issuer", "this control plane holds no issuing key")
    later(issuing, node, 0.61 * issuing.lifetime_s)
    await node.renewal.look()
    assert node.renewal.warnings() == ()
    later(issuing, node, 0.2 * issuing.lifetime_s)
    await node.renewal.look()
    (warning,) = node.renewal.warnings()
    assert "expires on" in warning
    assert "no issuing key" in warning


async def test_a_node_that_was_off_for_longer_than_its_certificate_proves_its_key(issuing: Issuing, node: Node) -> None:
    first = node.pair
    later(issuing, node, 3 * 86_400)
    await node.renewal.look()
    assert issuing.asked[-3:] == ["/v1/authority", "/v1/recover/nonce", "/v1/recover"]
    assert node.pair.serial != first.serial
    assert node.pair.not_after > issuing.now()
    assert len(node.renewed) == 1
    assert issuing.shown == []


async def test_whether_it_expired_is_for_the_clock_of_the_control_plane_to_say(issuing: Issuing, node: Node) -> None:
    """A node whose clock stands in the past does not know it, one whose clock is ahead believes it."""
    issuing.ahead_s += 3 * 86_400
    node.renewal.ask()
    with capture_logs() as logs:
        await node.renewal.look()
    assert issuing.asked[-1] == "/v1/recover"
    assert any("3.0 days behind the control plane's" in line.get("why", "") for line in logs)


async def test_a_clock_that_is_ahead_renews_and_says_by_how_much(issuing: Issuing, node: Node) -> None:
    node.ahead_s = 3 * 86_400
    issuing.refuse = ("clock", "the clocks differ by too much")
    with capture_logs() as logs:
        await node.renewal.look()
    assert issuing.asked[-1] == "/v1/renew"
    assert "3.0 days ahead of the control plane's" in logs[-1]["why"]


async def test_a_node_that_is_cut_off_asks_the_control_planes_clock(issuing: Issuing, node: Node) -> None:
    """By its own clock, which stands in the past, it would never be time."""
    node.cut_off = True
    for _ in range(3):
        await node.renewal.look()
    assert issuing.asked[-1] == "/v1/authority"
    assert node.renewed == []
    issuing.ahead_s = 3 * 86_400
    await node.renewal.look()
    assert issuing.asked[-1] == "/v1/recover"
    assert len(node.renewed) == 1


async def test_a_node_that_is_cut_off_from_everybody_has_no_trouble_with_its_certificate(node: Node) -> None:
    node.cut_off, node.servers = True, ("https://127.0.0.1:1",)
    with capture_logs() as logs:
        for _ in range(5):
            await node.renewal.look()
    assert (logs, node.renewal.warnings()) == ([], ())


async def test_a_clock_that_is_set_back_holds_up_no_try(issuing: Issuing, node: Node) -> None:
    node.ahead_s = 400 * 86_400
    issuing.refuse = ("clock", "the clocks differ by too much")
    await node.renewal.look()
    issuing.refuse, node.ahead_s = None, 0.0
    later(issuing, node, 0.61 * issuing.lifetime_s)
    await node.renewal.look()
    assert len(node.renewed) == 1


async def test_another_pair_that_is_put_in_place_is_taken_up(issuing: Issuing, node: Node, tmp_path: Path) -> None:
    await node.renewal.look()
    place = place_of(tmp_path / "etc" / "agent.yaml", None)
    await join(issuing.token(id="token-2"), (), place)
    await node.renewal.look()
    assert len(node.renewed) == 1


async def test_files_that_somebody_put_there_are_left_alone(issuing: Issuing, tmp_path: Path) -> None:
    issued = issuing.authority.issue_client("n1", tmp_path / "tls", lifetime_s=20 * 86_400)
    store = IdentityStore(tmp_path / "work" / "identity")
    node = Node(issuing, store, NamedFiles(issued.ca, issued.cert, issued.key))
    node.renewal.ask()
    with capture_logs() as logs:
        await node.renewal.look()
    assert (issuing.asked, node.renewed) == ([], [])
    assert "put there by hand" in logs[-1]["why"]
    (warning,) = node.renewal.warnings()
    assert "expires on" in warning


async def test_no_private_key_is_in_any_byte_that_is_sent(issuing: Issuing, node: Node) -> None:
    pairs = [node.pair]
    node.renewal.ask()
    await node.renewal.look()
    pairs.append(node.pair)
    later(issuing, node, 3 * 86_400)
    await node.renewal.look()
    pairs.append(node.pair)
    assert {"/v1/join", "/v1/renew", "/v1/recover"} <= set(issuing.asked)
    sent = bytes(issuing.wire)
    assert sent.count(b"CERTIFICATE REQUEST") == 6
    assert b"PRIVATE KEY" not in sent
    for pair in pairs:
        number = pair.key.private_numbers().private_value.to_bytes(32, "big")
        whole = pair.key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        for form in (number, number.hex().encode(), base64.b64encode(whole)[:40], base64.b64encode(number)[:40]):
            assert form not in sent


async def test_it_runs_until_it_is_cancelled_and_outlives_faults(
    issuing: Issuing, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = asyncio.Event()

    def breaks() -> Pair | None:
        broken.set()
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(node.store, "current", breaks)
        task = asyncio.ensure_future(node.renewal.run())
        async with asyncio.timeout(10):
            await broken.wait()
    done = asyncio.Event()
    monkeypatch.setattr(node.renewal, "_renewed", lambda words: done.set())
    node.renewal.ask()
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@given(
    tries=st.integers(1, 1000),
    left_s=st.floats(-1e7, 1e8),
    code=st.sampled_from(["", "clock", *sorted(FINAL)]),
    seed=st.integers(),
)
def test_the_wait_before_another_try(tries: int, left_s: float, code: str, seed: int) -> None:
    failing = Failing(since=NOW, tries=tries, code=code, words="")
    wait_s = retry_after_s(failing, left_s, random.Random(seed))
    assert 0 < wait_s <= 3600
    if code not in FINAL and left_s > 60:
        assert wait_s <= left_s / 8, "there are tries left before it expires"
    if code not in FINAL and left_s <= 0:
        assert wait_s <= RETRY_EXPIRED_MOST_S


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("sample")
    issued = Authority.create(folder / "pki", "lab", now=NOW).issue_client("n1", folder, now=NOW)
    leaf, key = read_certificate(issued.cert, "it"), key_of_pem(issued.key.read_bytes(), "it")
    return Pair(folder=folder, number=1, origin="", leaf=leaf, key=key, since=NOW)


@given(here_s=st.floats(-400 * 86_400, 400 * 86_400))
def test_the_moment_is_within_the_life_whenever_the_pair_came(sample: Pair, here_s: float) -> None:
    pair = replace(sample, since=NOW + timedelta(seconds=here_s))
    due = due_at(pair, NOW)
    assert pair.leaf.not_valid_before_utc < due <= pair.not_after
