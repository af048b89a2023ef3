from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from llmgw.cluster.model import Drain, Node, Replica
from llmgw.store.base import ApiKey, Event, StoreError
from llmgw.store.codec import (
    DRAINS,
    EVENTS,
    KEYS,
    LIVE_FIELDS,
    NODES,
    REPLICAS,
    encode_drain,
    encode_event,
    encode_key,
    encode_node,
    encode_replica,
    without_clock,
    without_session,
)

from .samples import anything, node, replica


@settings(max_examples=60)
@given(anything(Node))
def test_nodes_come_back_without_their_session(node: Node) -> None:
    assert NODES.decode("n", encode_node(node)) == without_session(node)


@settings(max_examples=60)
@given(anything(Replica))
def test_replicas_come_back(replica: Replica) -> None:
    assert REPLICAS.decode("r", encode_replica(replica)) == without_clock(replica)


@settings(max_examples=60)
@given(anything(Drain))
def test_drains_come_back(drain: Drain) -> None:
    assert DRAINS.decode("n", encode_drain(drain)) == drain


@settings(max_examples=60)
@given(anything(Event), anything(ApiKey))
def test_events_and_keys_come_back(event: Event, key: ApiKey) -> None:
    assert EVENTS.decode("e", encode_event(event)) == event
    assert KEYS.decode("k", encode_key(key)) == key


def test_nothing_of_a_session_is_in_the_row() -> None:
    assert not LIVE_FIELDS & json.loads(encode_node(node())).keys()


def test_a_deadline_of_one_control_planes_clock_is_not_in_the_row() -> None:
    assert "drained_by_s" not in json.loads(encode_replica(replica(drained_by_s=12.5)))
    assert "drained_from_s" not in json.loads(encode_replica(replica(drained_from_s=12.5)))
    assert "whole_by_s" not in json.loads(encode_replica(replica(whole_by_s=12.5)))


def test_a_row_of_an_older_llmgw_loads_with_defaults() -> None:
    old = {"id": "m-abcde", "model": "m", "state": "ready", "since": 1.0}
    assert REPLICAS.decode("m-abcde", json.dumps(old)).placements == ()
    row = json.loads(encode_node(node()))
    del row["inventory"]["gpus"][0]["memory_shared"]
    del row["weights"]
    decoded = NODES.decode("n", json.dumps(row))
    assert decoded.inventory == node().inventory
    assert decoded.weights == ()


def test_fields_that_are_not_known_are_ignored() -> None:
    row = json.loads(encode_replica(replica()))
    row["mood"] = "sunny"
    row["placements"][0]["rack"] = {"name": "a3"}
    assert REPLICAS.decode("r", json.dumps(row)) == replica()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{}", r"the stored node 'n1' can't be read: id: Field required.*restore a backup \(docs/backup\.md\)"),
        ("{", "the stored node 'n1' can't be read: the whole: Invalid JSON"),
        ('{"id": 5, "state": "ready", "since": 0}', "'n1' can't be read: id: .*found 5"),
    ],
)
def test_a_row_that_can_not_be_read_is_named(row: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        NODES.decode("n1", row)
