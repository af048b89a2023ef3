from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from llmgw.store import open_store
from llmgw.store.base import Change, StoreError
from llmgw.store.memory import MemoryStore
from llmgw.store.opening import sqlite_path
from llmgw.store.sqlite import SqliteStore

from .leading import lead
from .processes import on_a_file_system_of_its_own
from .samples import event, node


async def test_memory_is_a_store_that_can_not_be_backed_up(tmp_path: Path) -> None:
    store = await open_store("memory:")
    assert isinstance(store, MemoryStore)
    with pytest.raises(StoreError, match="this store is in memory"):
        await store.backup(str(tmp_path / "copy.db"))
    await store.close()


async def test_directory_and_files_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        store = await open_store(f"sqlite:///{tmp_path}/state/of/llmgw.db")
    finally:
        os.umask(old_umask)
    await lead(store, "a")
    directory = tmp_path / "state" / "of"
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert modes == {"llmgw.db": 0o600, "llmgw.db-wal": 0o600, "llmgw.db-shm": 0o600, "llmgw.lock": 0o600}
    await store.close()
    assert {entry.name for entry in directory.iterdir()} == {"llmgw.db", "llmgw.lock"}


async def test_a_file_that_others_may_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    await (await SqliteStore.open(path)).close()
    path.chmod(0o644)
    await (await SqliteStore.open(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_all_is_there_after_it_was_closed_and_opened(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "llmgw.db")
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node()], events=[event(1)]))
    before = await store.load()
    await store.close()
    store = await SqliteStore.open(tmp_path / "llmgw.db")
    assert await store.load() == before
    assert await store.events() == [event(1)]
    await store.commit(epoch, Change(events=[event(2)]))
    assert await lead(store, "b") > epoch
    await store.close()


@pytest.mark.parametrize("name", ["llm gw.db", "50%.db", "größe#1.db"])
async def test_names_of_all_kinds_of_directories_and_files(tmp_path: Path, name: str) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/{name}.d/{name}")
    await store.backup(str(tmp_path / f"copy of {name}"))
    await store.close()
    assert (tmp_path / f"{name}.d" / name).exists()
    assert (tmp_path / f"copy of {name}").exists()


SQLITE = "sqlite:////absolute/path/llmgw.db (four slashes), or memory: (forgets everything when it ends)"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "postgresql://db.example/llmgw",
            "store postgresql://…: several control planes on PostgreSQL are not built yet; use sqlite:///…, such as "
            + SQLITE,
        ),
        (
            "postgresql+psycopg://u:secret@h/d",
            "store postgresql+psycopg://…: several control planes on PostgreSQL are not built yet; use sqlite:///…, "
            "such as " + SQLITE,
        ),
        ("mysql://h/d", f"store 'mysql://h/d' is of an unknown kind: expected {SQLITE}"),
        ("/var/lib/llmgw.db", f"store '/var/lib/llmgw.db' is of an unknown kind: expected {SQLITE}"),
        ("sqlite", f"store 'sqlite' is of an unknown kind: expected {SQLITE}"),
        ("", f"store '' is of an unknown kind: expected {SQLITE}"),
        *(
            (url, f"store {url!r} does not name a file by its absolute path: expected {SQLITE}")
            for url in ("sqlite:///llmgw.db", "sqlite://", "sqlite::memory:", "sqlite:////", "sqlite:////var/lib/")
        ),
        (
            "sqlite:////x.db?mode=ro",
            f"store 'sqlite:////x.db?mode=ro' has options after '?': there are none, expected {SQLITE}",
        ),
    ],
)
async def test_other_stores_are_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(StoreError) as refused:
        await open_store(url)
    assert str(refused.value) == words


def test_the_path_is_what_stands_after_three_slashes() -> None:
    assert sqlite_path("sqlite:////var/lib/llmgw/llmgw.db") == Path("/var/lib/llmgw/llmgw.db")


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    path.write_text("model: smollm\n" * 100)
    with pytest.raises(StoreError, match=r"llmgw\.db is not a database: .*, or move this one away"):
        await SqliteStore.open(path)
    assert path.read_text() == "model: smollm\n" * 100


@pytest.mark.parametrize("script", ["", "; CREATE TABLE alembic_version AS SELECT '12ab' AS version_num"])
async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path, script: str) -> None:
    path = tmp_path / "llmgw.db"
    other = sqlite3.connect(path)
    other.executescript(f"CREATE TABLE bookmarks (url TEXT){script}")
    other.close()
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"not one that llmgw made \(it has .*bookmarks\)"):
        await SqliteStore.open(path)
    assert path.read_bytes() == content


async def test_a_damaged_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    store = await SqliteStore.open(path)
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node(f"n{number}") for number in range(100)]))
    await store.close()
    content = bytearray(path.read_bytes())
    page = content.index(b'{"id":"n50"') // 4096
    content[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"llmgw\.db is damaged: .*restore a backup \(docs/backup\.md\)"):
        await SqliteStore.open(path)
    assert path.read_bytes() == content


async def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "llmgw.db").mkdir()
    with pytest.raises(StoreError, match=r"can't open the store: .*expected a file"):
        await SqliteStore.open(tmp_path / "llmgw.db")


async def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    for path in (tmp_path / "state" / "llmgw.db", tmp_path / "state" / "deeper" / "llmgw.db"):
        with pytest.raises(StoreError, match=r"can't make the data directory: .*expected"):
            await SqliteStore.open(path)


async def test_a_place_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # Root may write anywhere but on a read-only mount.
        (line,) = on_a_file_system_of_its_own("refuse-to-open", tmp_path, "ro,size=2m")
        assert line == (
            f"StoreError can't lock the data directory: {tmp_path}/llmgw.lock: Read-only file system. "
            f"{tmp_path} is mounted read-only; remount it, or name another place"
        )
        return
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=f"{tmp_path} must be writable for uid {os.geteuid()}"):
        await SqliteStore.open(tmp_path / "llmgw.db")


async def test_a_row_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    await (await SqliteStore.open(path)).close()
    shell = sqlite3.connect(path)
    with shell:
        shell.execute("""INSERT INTO nodes VALUES ('n1', '{"id": "n1", "state": "asleep", "since": 1}')""")
    shell.close()
    store = await SqliteStore.open(path)
    with pytest.raises(StoreError, match=r"the stored node 'n1' can't be read: state: .*'asleep'"):
        await store.load()
    await store.close()
