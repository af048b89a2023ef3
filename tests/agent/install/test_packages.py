"""Packages, installed by the real apt-get and dpkg into a root of the tests' own; dnf is played by scripts."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmgw.agent.discovery.system import OsRelease
from llmgw.agent.install.faults import MissingLibrary, NotProved
from llmgw.agent.install.heal import Healer
from llmgw.agent.install.packages import OsPackages, PackagesFailed, PackagesNotAllowed
from llmgw.agent.install.providers import System
from llmgw.cluster.model import EngineState

from . import apt_root
from .apt_root import AptRoot

DEADLINE_S = 60.0
LIBRARY = "usr/lib/libfoo.so.1"

needs_apt = pytest.mark.skipif(
    shutil.which("apt-get") is None or os.geteuid() != 0, reason="needs root and apt-get: packages are installed"
)


@dataclass
class Words:
    """What is said meanwhile, to be waited for."""

    said: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, words: str) -> None:
        self.said.append(words)
        self.news.set()

    async def until(self, like: Callable[[str], bool]) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := [words for words in self.said if like(words)]):
                self.news.clear()
                await self.news.wait()
            return found[0]


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AptRoot:
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    made = apt_root.make(tmp_path)
    made.publish("libfoo1", LIBRARY)
    return made


def packages(apt: AptRoot, **more: float) -> OsPackages:
    return OsPackages(apt.folder / "cache", system=apt.system, run_dir=apt.folder / "run", **more)


@needs_apt
async def test_missing_lists_are_fetched_and_the_package_installed(apt: AptRoot) -> None:
    words = Words()
    await packages(apt).install(["libfoo1"], words)
    assert (apt.root / LIBRARY).exists()
    assert apt.installed("libfoo1") == "install ok installed"
    assert list(dict.fromkeys(words.said)) == [
        "installing libfoo1 (apt-get)",
        "reading the package sources anew (apt-get update)",
    ]
    assert "Setting up libfoo1" in (apt.folder / "cache/os-packages.log").read_text()


@needs_apt
async def test_lists_that_know_the_package_are_not_fetched_again(apt: AptRoot) -> None:
    apt.update()
    words = Words()
    await packages(apt).install(["libfoo1"], words)
    assert set(words.said) == {"installing libfoo1 (apt-get)"}


@needs_apt
async def test_a_file_that_was_removed_from_an_installed_package_comes_back(apt: AptRoot) -> None:
    for _ in range(2):
        await packages(apt).install(["libfoo1"], Words())
        (apt.root / LIBRARY).unlink()


@needs_apt
@pytest.mark.parametrize(
    "lock",
    ["var/lib/apt/lists/lock", "var/cache/apt/archives/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock"],
)
async def test_a_held_lock_is_waited_for_by_name(apt: AptRoot, lock: str) -> None:
    """Held until the wait was seen, and then let go."""
    words = Words()
    with apt.locked(lock) as holder:
        async with asyncio.TaskGroup() as group:
            installing = group.create_task(packages(apt).install(["libfoo1"], words))
            waiting = await words.until(lambda said: said.startswith("waiting"))
            assert waiting == f"waiting for another apt-get to finish (held by unattended-upgr, pid {holder.pid})"
            assert not (apt.root / LIBRARY).exists()
            assert not installing.done()
            assert holder.stdin is not None
            holder.stdin.close()
    assert holder.returncode == 0  # nobody killed it
    assert (apt.root / LIBRARY).exists()
    assert words.said[-1] == "installing libfoo1 (apt-get)"
    waited_itself = "Waiting for cache lock" in (apt.folder / "cache/os-packages.log").read_text()
    assert waited_itself == ("dpkg" in lock)  # the others it gives up at once


@needs_apt
@pytest.mark.parametrize("lock", ["var/lib/apt/lists/lock", "var/lib/dpkg/lock-frontend"])
async def test_a_lock_that_stays_is_given_up_naming_who_holds_it(apt: AptRoot, lock: str) -> None:
    with apt.locked(lock) as holder:
        with pytest.raises(PackagesFailed) as caught:
            await packages(apt, wait_s=2.0).install(["libfoo1"], Words())
        assert holder.poll() is None
    assert str(caught.value) == (
        f"another apt-get did not finish (held by unattended-upgr, pid {holder.pid}): "
        f"see what it does (ps -fp {holder.pid}). Nothing was changed"
    )


@needs_apt
async def test_an_unknown_package_is_said_in_the_last_lines(apt: AptRoot) -> None:
    with pytest.raises(
        PackagesFailed, match=r"apt-get install libbar1 ended with status 100 .*Unable to locate package"
    ):
        await packages(apt).install(["libbar1"], Words())


@needs_apt
async def test_what_an_interrupted_dpkg_left_is_finished_first(apt: AptRoot) -> None:
    apt.publish("half", "usr/lib/half", postinst="true")
    await packages(apt).install(["half"], Words())
    status = apt.root / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("Status: install ok installed", "Status: install ok unpacked"))
    (apt.root / "var/lib/dpkg/updates/0000").write_text(status.read_text())
    words = Words()
    await packages(apt).install(["libfoo1"], words)
    assert "finishing what an interrupted dpkg has left (dpkg --configure -a)" in words.said
    assert [apt.installed(name) for name in ("half", "libfoo1")] == ["install ok installed"] * 2


@needs_apt
async def test_a_package_that_can_not_be_set_up_is_said_in_its_own_words(apt: AptRoot) -> None:
    apt.publish("bad", "usr/lib/bad", postinst="echo the moon is full >&2; exit 3")
    with pytest.raises(PackagesFailed, match=r"post-installation script subprocess returned error exit status 3"):
        await packages(apt).install(["bad"], Words())
    assert "the moon is full" in (apt.folder / "cache/os-packages.log").read_text()


@needs_apt
async def test_called_off_while_it_waits_it_ends(apt: AptRoot) -> None:
    words = Words()
    with apt.locked("var/lib/dpkg/lock-frontend"):
        task = asyncio.create_task(packages(apt).install(["libfoo1"], words))
        await words.until(lambda said: said.startswith("waiting"))
        task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError):
                await task
    assert not (apt.root / LIBRARY).exists()


@needs_apt
async def test_called_off_in_the_middle_of_a_package_it_is_finished_first(apt: AptRoot) -> None:
    begun = apt.folder / "begun"
    os.mkfifo(begun)
    # Setting it up takes a second more: time enough to be killed in, if anything did.
    apt.publish("slow", "usr/lib/slow", postinst=f"echo > {begun}; sleep 1")
    task = asyncio.create_task(packages(apt).install(["slow"], Words()))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(begun.read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert apt.installed("slow") == "install ok installed"


@needs_apt
async def test_an_agent_that_is_killed_leaves_a_package_to_be_finished(apt: AptRoot) -> None:
    begun, go, done = (apt.folder / name for name in ("begun", "go", "done"))
    for pipe in (begun, go, done):
        os.mkfifo(pipe)
    apt.publish("slow", "usr/lib/slow", postinst=f"echo > {begun}; read x < {go}; echo it goes on; echo > {done}")
    agent = f"""
import asyncio
from pathlib import Path
from llmgw.agent.install.packages import OsPackages
from tests.agent.install.apt_root import DEBIAN, System
asyncio.run(OsPackages(Path({str(apt.folder)!r}), system=System(DEBIAN, {apt.system.path!r})).install(["slow"], print))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", agent, stdout=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(begun.read_text)
        process.kill()
        await process.wait()
        await asyncio.to_thread(go.write_text, "on\n")
        await asyncio.to_thread(done.read_text)
        # The next agent finds it done, or waits for it.
        await packages(apt).install(["libfoo1"], Words())
    assert apt.installed("slow") == "install ok installed"


@needs_apt
async def test_installs_of_one_agent_take_turns(apt: AptRoot) -> None:
    apt.publish("libbar1", "usr/lib/libbar.so.1")
    here, first, second = packages(apt), Words(), Words()
    async with asyncio.TaskGroup() as group:
        group.create_task(here.install(["libfoo1"], first))
        group.create_task(here.install(["libbar1"], second))
    assert second.said[0] == "waiting for the OS packages of another engine, to install libbar1 then"
    assert [apt.installed(name) for name in ("libfoo1", "libbar1")] == ["install ok installed"] * 2


@needs_apt
async def test_the_first_boot_is_waited_for(apt: AptRoot) -> None:
    """cloud-init says so by two files under /run; a failed one (status 1) is no reason not to try."""
    (apt.folder / "run/cloud-init").mkdir(parents=True)
    (apt.folder / "run/cloud-init/status.json").touch()
    script = apt.folder / "bin/cloud-init"
    script.write_text(f'#!/bin/sh\necho "$@" >> {apt.folder}/asked\nexit 1\n')
    script.chmod(0o755)
    words = Words()
    await packages(apt).install(["libfoo1"], words)
    assert words.said[0] == "waiting for cloud-init to finish this machine's first boot"
    assert (apt.folder / "asked").read_text() == "status --wait\n"
    (apt.folder / "run/cloud-init/result.json").touch()
    await packages(apt).install(["libfoo1"], words)
    assert (apt.folder / "asked").read_text() == "status --wait\n"


@needs_apt
async def test_who_held_the_lock_is_known_from_the_lines_before_the_last(tmp_path: Path) -> None:
    """And what is printed is in the language that is understood here."""
    script = tmp_path / "bin/apt-get"
    script.parent.mkdir()
    lock = tmp_path / "not-seen-from-here"
    script.write_text(f"""#!/bin/sh
[ "$LC_ALL" = C ] || exit 7
echo "Waiting for cache lock: Could not get lock {lock}. It is held by process 4194305 (unattended-upgr)..."
echo "E: Unable to acquire the dpkg frontend lock ({lock}), is another process using it?"
exit 100""")
    script.chmod(0o755)
    here = OsPackages(tmp_path, system=System(apt_root.DEBIAN, f"{tmp_path}/bin:{os.defpath}"), wait_s=0.0)
    words = Words()
    with pytest.raises(PackagesFailed, match=r"did not finish \(held by unattended-upgr, pid 4194305\)"):
        await here.install(["libfoo1"], words)
    assert words.said[1:] == ["waiting for another apt-get to finish (held by unattended-upgr, pid 4194305)"]


# -- what may not be, and what heals


async def test_who_is_not_root_gets_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "apt-get").touch(mode=0o755)
    here = OsPackages(tmp_path, system=System(apt_root.DEBIAN, str(tmp_path)))
    with pytest.raises(PackagesNotAllowed, match=r"the agent is not root.*apt-get install libgomp1"):
        await here.install(["libgomp1"], Words())


async def test_a_system_without_either_tool_says_so(tmp_path: Path) -> None:
    here = OsPackages(tmp_path, system=System(OsRelease(id="arch"), str(tmp_path)))
    with pytest.raises(PackagesNotAllowed, match="neither apt-get nor dnf on this node: install libgomp1 by hand"):
        await here.install(["libgomp1"], Words())


def lacking(package: str | None) -> NotProved:
    return NotProved(
        "libfoo.so.1 can't be found",
        (MissingLibrary(name="libfoo.so.1", wanted_by=Path("/opt/server"), package=package),),
    )


@needs_apt
async def test_what_is_missing_is_installed(apt: AptRoot) -> None:
    said: list[tuple[EngineState, str]] = []
    healer = Healer(packages(apt))
    assert await healer.mend(lacking("libfoo1"), lambda state, words: said.append((state, words)))
    assert (apt.root / LIBRARY).exists()
    assert said[0] == (EngineState.OS_PACKAGES, "installing libfoo1 (apt-get)")
    assert said[-1] == (EngineState.PROVING, "proving it again, now with libfoo1")


@needs_apt
async def test_a_package_that_does_not_help_is_not_installed_over_and_over(apt: AptRoot) -> None:
    healer = Healer(packages(apt))
    assert await healer.mend(lacking("libfoo1"), lambda state, words: None)
    with pytest.raises(NotProved, match=r"can't be found; libfoo1 was installed for it 0 minutes ago"):
        await healer.mend(lacking("libfoo1"), lambda state, words: None)
    again = Healer(packages(apt), again_s=0.0)
    for _ in range(2):
        assert await again.mend(lacking("libfoo1"), lambda state, words: None)


@needs_apt
async def test_what_can_not_be_installed_is_said_beside_what_is_missing(apt: AptRoot) -> None:
    with pytest.raises(NotProved, match=r"^libfoo\.so\.1 can't be found; apt-get install libodd1 ended") as caught:
        await Healer(packages(apt)).mend(lacking("libodd1"), lambda state, words: None)
    assert caught.value.packages == ("libodd1",)


@pytest.mark.parametrize("failure", [NotProved("killed by SIGILL"), lacking(None)])
async def test_what_no_package_mends_installs_nothing(failure: NotProved, tmp_path: Path) -> None:
    healer = Healer(OsPackages(tmp_path, system=System(apt_root.DEBIAN, str(tmp_path))))
    assert not await healer.mend(failure, lambda state, words: None)


# -- dnf, which can't be had here


def dnf(tmp_path: Path, script: str, rpm: str = "exit 1") -> OsPackages:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("dnf", script), ("rpm", rpm)):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    return OsPackages(
        tmp_path / "cache", system=System(OsRelease(id="fedora", version_id="43"), f"{tools}:{os.defpath}")
    )


@needs_apt
async def test_dnf_installs(tmp_path: Path) -> None:
    await dnf(tmp_path, f'echo "$@" > {tmp_path}/asked').install(["libgomp"], Words())
    asked = (tmp_path / "asked").read_text()
    assert asked == "--assumeyes --setopt=install_weak_deps=False install libgomp\n"


@needs_apt
async def test_dnf_mends_what_is_installed_and_broken(tmp_path: Path) -> None:
    await dnf(tmp_path, f'echo "$@" > {tmp_path}/asked', rpm="exit 0").install(["libgomp"], Words())
    assert (tmp_path / "asked").read_text().split()[-2:] == ["reinstall", "libgomp"]


@needs_apt
async def test_dnf_5_does_not_wait_for_a_lock_and_so_it_is_run_again(tmp_path: Path) -> None:
    script = f"""
[ -e {tmp_path}/again ] && exit 0
touch {tmp_path}/again
echo 'Transaction failed: Failed to obtain rpm transaction lock. Another transaction is in progress.'
exit 1"""
    words = Words()
    await dnf(tmp_path, script).install(["libgomp"], words)
    assert any(said.startswith("waiting for another dnf to finish (") for said in words.said)


@needs_apt
async def test_dnf_4_waits_by_itself_and_says_for_whom(tmp_path: Path) -> None:
    script = f"echo 'Waiting for process with pid {os.getpid()} to finish.'; read x < {tmp_path}/go; echo done"
    os.mkfifo(tmp_path / "go")
    words = Words()
    async with asyncio.TaskGroup() as group:
        group.create_task(dnf(tmp_path, script).install(["libgomp"], words))
        said = await words.until(lambda said: said.startswith("waiting"))
        await asyncio.to_thread((tmp_path / "go").write_text, "on\n")
    assert said.startswith("waiting for another dnf to finish (held by ")
    assert said.endswith(f", pid {os.getpid()})")
    assert words.said[-1] == "installing libgomp (dnf)"


@needs_apt
async def test_dnf_that_waits_is_ended_when_it_is_called_off(tmp_path: Path) -> None:
    """It must not be ended while it installs; while it waits, it may be."""
    script = f"echo 'Waiting for process with pid {os.getpid()} to finish.'; exec sleep 600"
    words = Words()
    task = asyncio.create_task(dnf(tmp_path, script).install(["libgomp"], words))
    await words.until(lambda said: said.startswith("waiting"))
    task.cancel()
    async with asyncio.timeout(DEADLINE_S / 2):
        with pytest.raises(asyncio.CancelledError):
            await task


@needs_apt
async def test_dnf_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(PackagesFailed, match=r"dnf install odd ended with status 1 .*No match for argument: odd"):
        await dnf(tmp_path, "echo 'No match for argument: odd'; exit 1").install(["odd"], Words())
