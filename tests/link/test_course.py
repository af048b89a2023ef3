"""The client's session rules, without I/O."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.course import Conversation, Course, Deliver, Ended, LinkError, ServerAddress, parse_server
from llmgw.link.messages import (
    Desired,
    Heartbeat,
    LogLines,
    LogsCancel,
    LogsRequest,
    Observed,
    Refused,
    Routes,
    Unknown,
    Welcome,
)


def course(*servers: str, base_s: float = 1.0, max_s: float = 30.0) -> Course:
    return Course(servers or ("https://a", "https://b"), base_s=base_s, max_s=max_s, rng=Random(1))


def welcome(epoch: int = 3, session: int = 1, **changes) -> Welcome:
    return Welcome(epoch=epoch, session=session, **changes)


def welcomed(epoch: int = 3, session: int = 1) -> Conversation:
    conversation = Conversation("https://a:7443", 0)
    assert isinstance(conversation.receive(welcome(epoch, session)), Deliver)
    return conversation


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://10.0.0.140:7443", "https://10.0.0.140:7443"),
        ("https://cp", "https://cp:7443"),
        ("https://cp/", "https://cp:7443"),
        ("https://[fd00::1]:9", "https://[fd00::1]:9"),
    ],
)
def test_addresses(text: str, url: str):
    assert parse_server(text).url == url


@pytest.mark.parametrize(
    "text",
    ["cp:7443", "ftp://cp", "https://", "https://cp:99999", "https://cp/x", "https://u@cp", "https://cp?x=1", ""],
)
def test_what_is_no_address(text: str):
    with pytest.raises(LinkError, match="https://HOST:7443 was expected"):
        parse_server(text)


def test_no_server_at_all():
    with pytest.raises(LinkError, match="no server is named"):
        Course([], base_s=1, max_s=30, rng=Random(1))


def test_it_goes_round_and_waits_between_rounds():
    going = course()
    dialled, waits = [], []
    for _ in range(14):
        dialled.append(going.current.host)
        waits.append(going.failed())
    assert dialled == ["a", "b"] * 7
    within, between = waits[0::2], waits[1::2]
    assert all(0 <= wait <= 0.5 for wait in within)
    for wait, full in zip(between, [1, 2, 4, 8, 16, 30, 30], strict=True):
        assert full / 2 <= wait <= full


def test_one_server_backs_off_from_base_to_max():
    going = course("https://a", base_s=0.5, max_s=3.0)
    for full in (0.5, 1.0, 2.0, 3.0, 3.0):
        assert full / 2 <= going.failed() <= full


def test_a_session_that_lasted_begins_the_backoff_anew():
    going = course("https://a")
    for _ in range(9):
        going.failed()
    assert going.failed(lasted_s=1.0) >= 15, "one that was cut off at once is no sign of health"
    assert going.failed(lasted_s=60.0) <= 1.0


def test_a_peer_that_was_taken_over_is_patient():
    assert course("https://a").failed(lasted_s=60.0, patient=True) >= 15.0


def test_learned_servers_are_added_and_the_files_are_never_forgotten():
    going = course("https://a")
    going.welcomed(welcome(servers=("https://c", "https://a:7443", "http://no", "nonsense", "https://c:7443")))
    assert going.servers == (ServerAddress("a", 7443), ServerAddress("c", 7443))
    going.failed()
    assert going.current.host == "c"
    going.welcomed(welcome(servers=("https://d",)))
    assert [server.host for server in going.servers] == ["a", "d", "c"], "the one it is connected to stays"
    assert going.current.host == "c"
    going.welcomed(welcome(servers=()))
    assert going.servers[0].host == "a"


def test_jitter_differs_from_peer_to_peer():
    waits = {Course(["https://a"], base_s=1, max_s=30, rng=Random(seed)).failed() for seed in range(50)}
    assert len(waits) == 50


@given(st.lists(st.tuples(st.sampled_from(["fail", "welcome", "lost"]), st.integers(0, 9)), max_size=60))
def test_epochs_never_decrease_and_waits_stay_bounded(steps: list[tuple[str, int]]):
    going = course("https://a", "https://b")
    newest = 0
    for what, number in steps:
        if what == "welcome":
            conversation = Conversation(going.current.url, going.newest_epoch)
            step = conversation.receive(welcome(epoch=number))
            assert isinstance(step, Ended) is (number < newest)
            if isinstance(step, Deliver):
                going.welcomed(welcome(epoch=number))
                newest = number
        else:
            assert 0 <= going.failed(lasted_s=number * 4.0 if what == "lost" else 0.0) <= 30.0
        assert going.newest_epoch == newest
        assert going.current in going.servers


def test_a_welcome_of_a_deposed_leader_ends_the_connection():
    step = Conversation("https://a:7443", newest_epoch=4).receive(welcome(epoch=3))
    assert isinstance(step, Ended)
    assert step.words.startswith("https://a:7443 leads with epoch 3, but epoch 4 has been seen: it was deposed")
    assert isinstance(Conversation("https://a:7443", newest_epoch=3).receive(welcome(epoch=3)), Deliver)


def test_a_welcome_of_another_protocol_names_both():
    step = Conversation("https://a:7443", 0).receive(welcome(protocol=9, version="9.0"))
    assert isinstance(step, Ended)
    assert "wants protocol 9 (llmgw v9.0), this peer speaks 1 to 1" in step.words


def test_nothing_counts_before_the_welcome():
    conversation = Conversation("https://a:7443", 0)
    for frame in (Desired(epoch=3, session=1, revision=1), LogsRequest(id="1", shard="s/0")):
        assert conversation.receive(frame) is False
    assert conversation.dropped == {"before-welcome": 2}


@pytest.mark.parametrize(
    ("frame", "counts"),
    [
        (Desired(epoch=3, session=1, revision=1), True),
        (Desired(epoch=2, session=1, revision=1), False),
        (Desired(epoch=4, session=1, revision=1), False),
        (Desired(epoch=3, session=2, revision=1), False),
        (Routes(epoch=3, session=1, version=1), True),
        (Routes(epoch=2, session=1, version=1), False),
        (LogsRequest(id="1", shard="s/0"), True),
        (LogsCancel(id="1"), True),
        (Unknown(type="news"), False),
        (Heartbeat(epoch=3, session=1, sent_at=0.0), False),
        (welcome(epoch=9), False),
    ],
)
def test_frames_of_another_epoch_or_session_change_nothing(frame, counts: bool):
    conversation = welcomed()
    assert isinstance(conversation.receive(frame), Deliver) is counts
    assert sum(conversation.dropped.values()) == (0 if counts else 1)
    assert conversation.welcome == welcome()


def test_what_is_sent_carries_the_session():
    conversation = welcomed(epoch=3, session=8)
    assert conversation.stamp(Observed(epoch=0, session=0, revision=2)) == Observed(epoch=3, session=8, revision=2)
    assert conversation.stamp(LogLines(id="1")) == LogLines(id="1")


def test_refusals_before_and_during_a_session():
    refusal = Refused(code="identity", words="no")
    step = Conversation("https://a:7443", 0).receive(refusal)
    assert step == Ended("refused-identity", "https://a:7443 refused this peer: no", False, refusal)
    taken = Refused(code="duplicate", words="another process")
    step = welcomed().receive(taken)
    assert step == Ended("refused-duplicate", "https://a:7443 ended the session: another process", True, taken)
    step = Conversation("https://a:7443", 0).receive(taken)
    assert isinstance(step, Ended)
    assert not step.patient, "the old session may be a dead one: it is soon closed"
