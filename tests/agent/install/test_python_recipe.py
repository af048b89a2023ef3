"""Environments made by uv from locks, of wheels that are made here. The engines themselves: ``make test-engines``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from llmgw.agent.install import environment, intact, python_recipe, uv_cache
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.places import Installation, Places
from llmgw.agent.install.program import Program
from llmgw.agent.install.recipe import RecipeFailed
from llmgw.agent.install.trial import own
from llmgw.agent.supervisor.engine_user import prepare
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState
from tests.engines_real.patches import wheel

from .machine import THIS_MACHINE

HELP = (Path(__file__).parents[2] / "engines" / "help" / "vllm-0.32.0.txt").read_text()
SAYS = """
import sys, pathlib
def main():
    with open({runs!r}, "a") as runs:
        print(*sys.argv[1:], file=runs)
    if sys.argv[1] == "--version":
        print({version!r})
    else:
        print((pathlib.Path(__file__).parent / "help.txt").read_text())
"""


@dataclass
class Site:
    """A folder with wheels, and a node whose engines come from it."""

    folder: Path
    said: list[tuple[EngineState, str]] = field(default_factory=list)

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def publish(self, version: str, *, says: str | None = None, help_text: str = HELP) -> EngineSpec:
        """A vLLM that can do no more than be asked, what it needs, and the lock of both."""
        self.wheels.mkdir(exist_ok=True)
        code = SAYS.format(runs=str(self.runs), version=says or f"{version}+cpu")
        content = {"vllm/__init__.py": "", "vllm/cli.py": code, "vllm/help.txt": help_text}
        found = [wheel(self.wheels, "vllm", f"{version}+cpu", content, "vllm = vllm.cli:main")]
        found.append(wheel(self.wheels, "shared", "1.0", {"shared/large.py": f"TEXT = {'x' * 100_000!r}\n"}))
        lines = [
            *("# llmgw engine lock 1", "# engine: vllm", f"# version: {version}", "# build: cpu"),
            *(f"# architecture: {THIS_MACHINE.cpu.architecture}", "# python: 3.11", "# glibc: 2.17"),
            *("# unpacked-bytes: 200000", "# note: it is made by a test"),
        ]
        for path in found:
            name, number, *_ = path.name.split("-")
            lines.append(f"{name}=={number} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        lock = self.folder / f"vllm-{version}.lock"
        lock.write_text("\n".join([*lines, ""]))
        sha256 = hashlib.sha256(lock.read_bytes()).hexdigest()
        return EngineSpec(name="vllm", version=version, source=lock.as_uri(), sha256=sha256)

    def say(self, state: EngineState, words: str) -> None:
        self.said.append((state, words))

    async def install(self, spec: EngineSpec) -> Path:
        recipe = await python_recipe.resolve(spec, THIS_MACHINE, self.folder / "downloads", self.say)
        place = self.folder / "engines" / spec.name / recipe.folder
        partial = place.with_name(f"{place.name}.partial-1")
        partial.mkdir(parents=True)
        await recipe.put(partial, self.say)
        partial.rename(place)
        return place

    async def prove(self, spec: EngineSpec, place: Path) -> Program:
        scratch = self.folder / "proofs"
        return await environment.prove_environment(spec.name, spec.version, place, scratch, THIS_MACHINE, self.say)

    def asked(self) -> list[str]:
        return self.runs.read_text().splitlines() if self.runs.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    return Site(tmp_path)


async def test_it_runs_where_it_lies_once_its_folder_has_its_name(site: Site) -> None:
    spec = site.publish("9.1.0")
    place = await site.install(spec)
    program = await site.prove(spec, place)
    assert place.name.startswith("9.1.0-cpu-")
    assert program.argv == (str(place / "bin" / "vllm"),)
    assert program.version == "9.1.0+cpu"
    assert "--tensor-parallel-size" in program.help_text
    assert place in program.reads
    assert (place / "lib/python3.11/site-packages/shared/__pycache__/large.cpython-311.pyc").exists()
    for script in (place / "bin").iterdir():
        assert b".partial-" not in script.read_bytes()[:4096]


async def test_each_step_is_said_in_words(site: Site) -> None:
    await site.install(site.publish("9.1.0"))
    assert (EngineState.RESOLVING, "making a Python 3.11 environment for vllm 9.1.0") in site.said
    assert (EngineState.UNPACKING, "compiling the modules of 2 packages of vllm 9.1.0") in site.said
    assert site.said[-1] == (EngineState.UNPACKING, "writing it to the disk")


async def test_versions_share_the_files_that_they_have_in_common(site: Site) -> None:
    places = [await site.install(site.publish(version)) for version in ("9.1.0", "9.2.0")]
    large, other = [place / "lib/python3.11/site-packages/shared/large.py" for place in places]
    assert large.samefile(other)


async def test_whatever_the_umask_everybody_can_read_it(site: Site) -> None:
    before = os.umask(0o077)
    try:
        place = await site.install(site.publish("9.1.0"))
    finally:
        os.umask(before)
    for path in (place / "bin" / "vllm", place / "lib/python3.11/site-packages/shared/large.py"):
        assert path.stat().st_mode & 0o044 == 0o044
        assert path.parent.stat().st_mode & 0o055 == 0o055


async def test_what_was_seen_is_not_asked_again_until_something_changes(site: Site) -> None:
    spec = site.publish("9.1.0")
    place = await site.install(spec)
    await site.prove(spec, place)
    assert site.asked() == ["--version", "serve --help=all"]
    await site.prove(spec, place)
    assert len(site.asked()) == 2
    os.utime(place / "bin" / "vllm")
    await site.prove(spec, place)
    assert len(site.asked()) == 4


async def test_an_interpreter_that_is_gone_shows_at_the_next_look(site: Site) -> None:
    spec = site.publish("9.1.0")
    place = await site.install(spec)
    await site.prove(spec, place)
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").symlink_to("/usr/bin/python2.2")
    with pytest.raises(NotProved, match=r"its interpreter, /usr/bin/python2.2, ended with status 126"):
        await site.prove(spec, place)


async def test_another_version_than_the_one_asked_for_is_not_taken(site: Site) -> None:
    spec = site.publish("9.1.0", says="9.0.9")
    with pytest.raises(NotProved, match=r"says that it is vllm 9\.0\.9, and 9\.1\.0 was to be installed"):
        await site.prove(spec, await site.install(spec))


async def test_a_flag_that_has_another_name_is_found_in_its_own_help(site: Site) -> None:
    spec = site.publish("9.1.0", help_text=HELP.replace("--max-num-seqs", "--max-running-seqs"))
    with pytest.raises(NotProved, match=r"other flags than this llmgw passes: --max-num-seqs: not defined"):
        await site.prove(spec, await site.install(spec))


async def test_one_that_the_agents_file_names_may_lack_flags(site: Site) -> None:
    spec = site.publish("9.1.0", help_text=HELP.replace("--max-num-seqs", "--max-running-seqs"))
    place = await site.install(spec)
    program = await environment.prove_named(
        "vllm", place / "bin" / "vllm", site.folder / "proofs", THIS_MACHINE, site.say
    )
    assert program.version == "9.1.0+cpu"
    assert not (place / environment.PROOF).exists(), "nothing is written into somebody else's folder"


async def test_one_that_is_named_and_no_environment_is_refused_in_words(site: Site) -> None:
    stray = site.folder / "vllm"
    with pytest.raises(NotProved, match=f"{stray} is not there"):
        await environment.prove_named("vllm", stray, site.folder / "proofs", THIS_MACHINE, site.say)
    stray.write_text("#!/bin/sh\necho 0.32.0\n")
    stray.chmod(0o755)
    with pytest.raises(NotProved, match=f"{stray} lies in no Python environment"):
        await environment.prove_named("vllm", stray, site.folder / "proofs", THIS_MACHINE, site.say)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and mounts")
async def test_not_even_the_interpreter_of_a_named_one_runs_as_the_agent(tmp_path: Path) -> None:
    assert prepare("llmgw-engine").warning is None
    own(tmp_path / "cache/proofs", "llmgw-engine")
    programs = tmp_path / "theirs/bin"
    programs.mkdir(parents=True)
    for name in ("python", "vllm"):
        (programs / name).write_text('#!/bin/sh\necho "run by $(id -un)"\nexit 3\n')
        (programs / name).chmod(0o755)
    with pytest.raises(NotProved, match=r"its interpreter, .*, ended with status 3: run by llmgw-engine$"):
        await environment.prove_named(
            "vllm", programs / "vllm", tmp_path / "cache/proofs", THIS_MACHINE, lambda state, words: None
        )


async def test_a_wheel_that_is_another_is_refused_with_both_hashes(site: Site) -> None:
    spec = site.publish("9.1.0")
    right = hashlib.sha256((site.wheels / "shared-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    path = wheel(site.wheels, "shared", "1.0", {"shared/large.py": "TEXT = 'another'\n"})
    wrong = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(RecipeFailed) as failure:
        await site.install(spec)
    assert "shared" in str(failure.value)
    assert right in str(failure.value)
    assert wrong in str(failure.value)


async def test_a_wheel_that_nobody_has_is_named_with_what_the_lock_says_of_it(site: Site) -> None:
    spec = site.publish("9.1.0")
    (site.wheels / "shared-1.0-py3-none-any.whl").unlink()
    with pytest.raises(RecipeFailed, match=r"has a wheel of shared.*\. it is made by a test"):
        await site.install(spec)


async def test_damage_is_found_and_not_linked_again(site: Site) -> None:
    spec = site.publish("9.1.0")
    place = await site.install(spec)
    assert intact.damage(place, lambda: False) is None
    large = place / "lib/python3.11/site-packages/shared/large.py"
    with large.open("r+b") as file:
        file.write(b"LOST")
    words = intact.damage(place, lambda: False)
    assert words == f"lib/python3.11/site-packages/shared/large.py is missing or changed in {place}"
    place.rename(place.with_name("damaged"))
    again = await site.install(spec)
    assert intact.damage(again, lambda: False) is None


async def test_what_no_version_is_linked_to_leaves_the_cache(site: Site) -> None:
    place = await site.install(site.publish("9.1.0"))
    cache = uv_cache.of(site.folder / "engines")
    assert len(list(cache.glob("archive-v*/*"))) == 2
    assert uv_cache.sweep(cache) == 0
    other = await site.install(site.publish("9.2.0"))
    places = Places(site.folder / "engines", site.folder / "cache")
    places.remove(Installation(place, site.publish("9.1.0"), "cpu", 0.0))
    assert len(list(cache.glob("archive-v*/*"))) == 2, "9.1.0 alone has gone: what they share is needed"
    assert (other / "lib/python3.11/site-packages/shared/large.py").stat().st_nlink == 2
    await site.install(site.publish("9.1.0"))


@pytest.fixture
def silent() -> Iterator[str]:
    """An index that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


def _hold_to(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index)
    for name in ("PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "")


async def test_an_index_that_falls_silent_is_given_up(site: Site, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.publish("9.1.0")
    _hold_to(monkeypatch, silent)
    monkeypatch.setattr(python_recipe, "STALL_S", 2.0)
    with pytest.raises(RecipeFailed, match=r"it stood still for 2 s after"):
        await site.install(spec)


async def test_called_off_it_leaves_no_process(site: Site, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.publish("9.1.0")
    _hold_to(monkeypatch, silent)
    downloading = asyncio.Event()

    def say(state: EngineState, words: str) -> None:
        if state is EngineState.DOWNLOADING:
            downloading.set()

    site.say = say  # type: ignore[method-assign]
    installing = asyncio.create_task(site.install(spec))
    await asyncio.wait_for(downloading.wait(), 30.0)
    assert _run_from(site.folder)
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    assert not _run_from(site.folder)


def _run_from(folder: Path) -> list[str]:
    """Command lines of processes that stand in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve().is_relative_to(folder):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


async def test_a_lock_that_is_not_what_was_asked_for_is_refused(site: Site) -> None:
    spec = replace(site.publish("9.1.0"), version="9.2.0")
    with pytest.raises(RecipeFailed, match=r"is a lock of vllm 9\.1\.0 \(cpu, .*\), and vllm 9\.2\.0 is asked for"):
        await site.install(spec)


async def test_github_has_none(site: Site) -> None:
    with pytest.raises(RecipeFailed, match="set `source: index`"):
        await site.install(EngineSpec(name="vllm", version="0.32.0", source="github"))


async def test_a_proof_survives_as_json(site: Site) -> None:
    spec = site.publish("9.1.0")
    place = await site.install(spec)
    await site.prove(spec, place)
    kept = json.loads((place / environment.PROOF).read_text())
    assert kept["version"] == "9.1.0+cpu"
    (place / environment.PROOF).write_text("{")
    await site.prove(spec, place)
    assert len(site.asked()) == 4
