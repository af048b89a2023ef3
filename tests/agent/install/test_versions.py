"""Several versions of an engine beside each other: which are had, which stay, and which go."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from llmgw.agent.install import installer as installing
from llmgw.agent.install.places import RECORD
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState, Gpu

from .conftest import Installed
from .machine import THIS_MACHINE
from .node import Engines, failed, running
from .packing import Archive, behaving, scripted


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "SWEEP_AGAIN_S", 0.05)


def made(installed: Installed, folder: Path, *versions: str) -> list[Archive]:
    return [scripted(folder, version, behaving(installed.binary, version)) for version in versions]


async def both_installed(engines: Engines, one: EngineSpec, two: EngineSpec) -> None:
    engines.installer.take([one, two])
    await engines.until(lambda: engines.usable(one.version) and engines.usable(two.version), "both are there")


async def test_versions_lie_side_by_side_and_a_shard_gets_its_own(installed: Installed, tmp_path: Path) -> None:
    old, new = made(installed, tmp_path, "b11000", "b11001")
    engines = Engines(tmp_path)
    async with running(engines):
        await both_installed(engines, old.spec, new.spec)
        assert engines.program("b11000").argv != engines.program("b11001").argv
        assert engines.installer.program("llamacpp", "b9") is None
        # Where nobody says which: one that is wanted.
        engines.installer.take([old.spec], [new.spec])
        assert engines.program().version == "b11000"
    assert [(engine.name, engine.version) for engine in engines.installer.states] == [
        ("llamacpp", "b11000"),
        ("llamacpp", "b11001"),
        ("sim", engines.installer.states[-1].version),
    ]


async def test_a_version_that_nobody_wants_goes_and_the_one_before_stays(installed: Installed, tmp_path: Path) -> None:
    oldest, old, new = made(installed, tmp_path, "b11000", "b11001", "b11002")
    engines = Engines(tmp_path)
    async with running(engines):
        await both_installed(engines, oldest.spec, old.spec)
        engines.installer.take([new.spec], [old.spec])
        await engines.until(lambda: engines.usable("b11002"), "the new one is there")
        await engines.until(lambda: engines.now("b11000") is None, "the oldest is gone")
        assert engines.usable("b11001")
        assert [name.partition("-")[0] for name in engines.folders()] == ["b11001", "b11002"]
        # It stays where it is, and is not brought where it is not.
        (engines.engines_dir / "llamacpp" / engines.folders()[0]).rename(tmp_path / "away")
        await engines.installer.probe()
        await engines.until(lambda: engines.now("b11001") is None, "it is not said to be there")
        assert [name.partition("-")[0] for name in engines.folders()] == ["b11002"]


async def test_a_version_that_a_shard_needs_stays(installed: Installed, tmp_path: Path) -> None:
    old, new = made(installed, tmp_path, "b11000", "b11001")
    engines = Engines(tmp_path)
    async with running(engines):
        await both_installed(engines, old.spec, new.spec)
        for in_use in (frozenset({("llamacpp", "b11000")}), frozenset({("llamacpp", "")})):
            engines.installer.take([new.spec], [], in_use)
            await engines.installer._sweep()
            assert len(engines.folders()) == 2
        engines.installer.take([new.spec])
        await engines.until(lambda: engines.now("b11000") is None, "then it goes")


async def test_a_version_that_runs_stays_whoever_started_it(installed: Installed, tmp_path: Path) -> None:
    script = 'case "$1" in stay) while :; do sleep 0.1; done ;; esac\n'
    old = scripted(tmp_path, "b11000", script + behaving(installed.binary, "b11000"))
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(old.spec) is EngineState.INSTALLED, engines.words
    stranger = await asyncio.create_subprocess_exec(engines.program("b11000").argv[0], "stay")
    try:
        engines.installer.take([])
        await engines.installer._sweep()
        assert len(engines.folders()) == 1
        assert engines.usable("b11000")
    finally:
        stranger.kill()
        await stranger.wait()
    await engines.installer._sweep()
    assert engines.folders() == []
    assert engines.now("b11000") is None


async def test_nothing_is_removed_before_anybody_has_said_what_is_wanted(installed: Installed, tmp_path: Path) -> None:
    (old,) = made(installed, tmp_path, "b11000")
    assert await Engines(tmp_path).installer.ensure(old.spec) is EngineState.INSTALLED
    engines = Engines(tmp_path)
    async with running(engines):
        await engines.installer.probe()
        assert engines.usable("b11000")
        engines.installer.take([])
        await engines.until(lambda: engines.now("b11000") is None, "now it goes")


async def test_folders_of_strangers_are_left_alone(installed: Installed, tmp_path: Path) -> None:
    (old,) = made(installed, tmp_path, "b11000")
    engines = Engines(tmp_path)
    folder = engines.engines_dir / "llamacpp"
    for name in ("mine", "b9-cpu-x86_64-0123456789ab"):
        (folder / name).mkdir(parents=True)
        (folder / name / "llama-server").write_text("#!/bin/sh\n")
    (folder / "copied").mkdir()
    async with running(engines):
        engines.installer.take([old.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is there")
        # A record in a folder of another name vouches for nothing either.
        place = folder / next(name for name in engines.folders() if name.startswith("b11000"))
        (folder / "copied" / RECORD).write_bytes((place / RECORD).read_bytes())
        engines.installer.take([])
        await engines.until(lambda: engines.now("b11000") is None, "it goes")
    assert engines.folders() == ["b9-cpu-x86_64-0123456789ab", "copied", "mine"]


async def test_a_broken_version_that_nobody_wants_is_told_and_not_mended(installed: Installed, tmp_path: Path) -> None:
    old, new = made(installed, tmp_path, "b11000", "b11001")
    engines = Engines(tmp_path)
    async with running(engines):
        await both_installed(engines, old.spec, new.spec)
        engines.installer.take([new.spec], [old.spec])
        Path(engines.program("b11000").argv[0]).write_text("#!/bin/sh\nexit 3\n")
        await engines.installer.probe()
        assert failed(engines, "b11000")
        assert engines.installer.program("llamacpp", "b11000") is None
        assert engines.usable("b11001")


async def test_a_bad_new_entry_for_a_version_that_works_costs_nothing(installed: Installed, tmp_path: Path) -> None:
    (old,) = made(installed, tmp_path, "b11000")
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([old.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is there")
        program = engines.program("b11000")
        bad = dataclasses.replace(old.spec, sha256="ab" * 32)
        engines.installer.take([bad])
        await engines.until(lambda: "what is asked for now has failed" in engines.words, "it is said")
        assert engines.usable("b11000")
        assert engines.program("b11000") == program
        assert all(engine.usable for engine in engines.said[-2:])
        engines.installer.take([old.spec])
        await engines.until(lambda: engines.words == "", "the file is as it was")


async def test_the_same_version_from_elsewhere_is_installed_beside_and_the_first_goes_later(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scripted(tmp_path / "1", "b11000", behaving(installed.binary, "b11000"))
    second = scripted(tmp_path / "2", "b11000", behaving(installed.binary, "b11000") + "\n# rebuilt")
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([first.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is there")
        engines.installer.take([second.spec])
        sha = second.sha256[:12]
        await engines.until(lambda: sha in engines.program("b11000").argv[0], "the other one is used")
        assert len(engines.folders()) == 2
        monkeypatch.setattr(installing, "SUPERSEDED_S", 0.0)
        await engines.installer._sweep()
        assert [name[-12:] for name in engines.folders()] == [sha]
        assert engines.usable("b11000")


async def test_the_same_file_under_another_entry_is_not_fetched_again(installed: Installed, tmp_path: Path) -> None:
    (old,) = made(installed, tmp_path, "b11000")
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(old.spec) is EngineState.INSTALLED
    elsewhere = tmp_path / "elsewhere" / old.path.name
    elsewhere.parent.mkdir()
    old.path.rename(elsewhere)
    spec = dataclasses.replace(old.spec, source=elsewhere.as_uri())
    before = len(engines.said)
    assert await engines.installer.ensure(spec) is EngineState.INSTALLED
    assert all(engine.usable for engine in engines.said[before:])
    elsewhere.unlink()
    again = Engines(tmp_path)
    assert await again.installer.ensure(spec) is EngineState.INSTALLED, "it is written down"


async def test_a_driver_that_comes_brings_the_build_for_it(installed: Installed, tmp_path: Path) -> None:
    """Nothing is fetched here, since this source has one file for all; what was asked for is written down."""
    (only,) = made(installed, tmp_path, "b11000")
    machine = [THIS_MACHINE]
    engines = Engines(tmp_path, machine=lambda: machine[0])
    async with running(engines):
        engines.installer.take([only.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is there")
        assert builds(engines) == ["cpu"]
        gpu = Gpu(index=0, uuid="GPU-1", name="H100", memory_bytes=1 << 36)
        machine[0] = dataclasses.replace(THIS_MACHINE, driver="580.1", gpus=(gpu,))
        await engines.installer.probe()
        await engines.until(lambda: builds(engines) == ["cuda"], "the build for it is asked for")
        assert all(engine.usable for engine in engines.said[-2:])
        before = len(engines.said)
        # A driver that can't be seen now takes nothing away.
        machine[0] = THIS_MACHINE
        await engines.installer.probe()
        assert engines.said[before:] == []
        assert builds(engines) == ["cuda"]


def builds(engines: Engines) -> list[str]:
    return [each.build for each in engines.installer._places.installations()]


async def test_another_source_that_turns_out_bad_takes_nothing_away(installed: Installed, tmp_path: Path) -> None:
    first = scripted(tmp_path / "1", "b11000", behaving(installed.binary, "b11000"))
    second = scripted(tmp_path / "2", "b11000", behaving(installed.binary, "b11000", "echo no such tensor; exit 1"))
    engines = Engines(tmp_path)
    async with running(engines):
        engines.installer.take([first.spec])
        await engines.until(lambda: engines.usable("b11000"), "it is there")
        program = engines.program("b11000")
        engines.installer.take([second.spec])
        await engines.until(lambda: "no such tensor" in engines.words, "it is said")
        await engines.installer.probe()
        assert engines.program("b11000") == program
        assert engines.usable("b11000")
    # Nor with the next agent, which finds both.
    again = Engines(tmp_path)
    async with running(again):
        again.installer.take([second.spec])
        await again.until(lambda: "no such tensor" in again.words and again.usable("b11000"), "it is said again")
        assert again.program("b11000") == program


async def test_a_version_that_is_called_off_while_it_is_proved_and_stays_is_proved(
    installed: Installed, tmp_path: Path
) -> None:
    """As with a rollback in the midst of an upgrade: the new version is kept from then on."""
    gate = tmp_path / "gate"
    waits = f'case "$1" in --version) until [ -e {gate} ]; do sleep 0.05; done ;; esac\n'
    old = scripted(tmp_path, "b11000", behaving(installed.binary, "b11000"))
    new = scripted(tmp_path, "b11001", waits + behaving(installed.binary, "b11001"))
    engines = Engines(tmp_path)

    def proving() -> bool:
        return (now := engines.now("b11001")) is not None and now.state is EngineState.PROVING

    async with running(engines):
        engines.installer.take([old.spec])
        await engines.until(lambda: engines.usable("b11000"), "the old one is there")
        engines.installer.take([old.spec, new.spec])
        await engines.until(proving, "the new one is being proved")
        engines.installer.take([old.spec], [new.spec])
        gate.touch()
        await engines.until(lambda: engines.usable("b11001"), "it is proved all the same")
