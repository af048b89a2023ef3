from __future__ import annotations

import re

from llmgw.cluster.naming import replica_id, replica_key

from .building import cluster


def test_ids_are_distinct_for_ever() -> None:
    state = cluster()
    ids = [replica_id(state, "qwen", number) for number in range(1, 20_001)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"qwen-[a-z2-7]{5}", name) for name in ids[:100])


def test_ids_follow_from_secret_model_and_number_alone() -> None:
    one, other = cluster(), cluster()
    assert replica_id(one, "m", 3) == replica_id(other, "m", 3)
    suffixes = {replica_id(cluster(), "m", 1)[-5:], replica_id(cluster(), "n", 1)[-5:]}
    assert len(suffixes) == 2


def test_keys_differ_by_replica_and_by_secret() -> None:
    keys = {replica_key("s", "m-aaaaa"), replica_key("s", "m-aaaab"), replica_key("t", "m-aaaaa")}
    assert len(keys) == 3
    assert all(re.fullmatch(r"[0-9a-f]{64}", key) for key in keys)
