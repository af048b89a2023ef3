from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog.testing

from llmgw.agent.memory import Remembered, ShardMemory
from tests.agent.node import sim


def test_what_was_asked_and_what_was_proved_come_back(tmp_path: Path) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    first, second = sim(1, port=20000), sim(3, id="org/m-abcde/0", port=20100)
    memory.remember(first, "127.0.0.1:20000")
    memory.remember(second, None)
    memory.proved(first)
    again = ShardMemory(tmp_path / "wanted")
    assert list(again.all()) == [
        Remembered(shard=first, endpoint="127.0.0.1:20000", proved=True),
        Remembered(shard=second, endpoint=None),
    ]
    again.forget(first.id)
    again.forget(first.id)
    assert [known.shard for known in again.all()] == [second]


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    memory.remember(sim(), None)
    (file,) = (tmp_path / "wanted").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_proof_of_an_older_generation_counts_for_nothing(tmp_path: Path) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    memory.remember(sim(2, port=1), None)
    memory.proved(sim(1, port=1))
    memory.proved(sim(1, id="another/0", port=1))
    assert [known.proved for known in memory.all()] == [False]


def test_shards_of_like_names_have_files_of_their_own(tmp_path: Path) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    ids = ["a/b-abcde/0", "a-b-abcde/0", "a%2Fb-abcde/0", "ä-abcde/0"]
    for id in ids:
        memory.remember(sim(id=id, port=1), None)
    assert sorted(known.shard.id for known in memory.all()) == sorted(ids)


@pytest.mark.parametrize("spoilt", ["", "{", "[]", "null", '{"shard": {}}', "\udcff"])
def test_a_spoilt_file_is_passed_over_and_said(tmp_path: Path, spoilt: str) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    memory.remember(sim(id="good-abcde/0", port=1), None)
    (tmp_path / "wanted" / "bad.json").write_bytes(spoilt.encode(errors="surrogateescape"))
    with structlog.testing.capture_logs() as logs:
        assert [known.shard.id for known in memory.all()] == ["good-abcde/0"]
    assert [entry["event"] for entry in logs] == ["a shard's file can't be read; it is asked for anew"]


def test_the_replicas_key_is_never_logged(tmp_path: Path) -> None:
    memory = ShardMemory(tmp_path / "wanted")
    memory.remember(sim(), None)
    (file,) = (tmp_path / "wanted").iterdir()
    whole = json.loads(file.read_text())
    key = whole["shard"]["api_key"]
    whole["shard"]["api_key"] = [key]
    for text in (json.dumps(whole), json.dumps({"api_key": key}), json.dumps({"shard": {"api_key": key}}), f'"{key}'):
        file.write_text(text)
        with structlog.testing.capture_logs() as logs:
            assert list(memory.all()) == []
        assert key not in repr(logs)
