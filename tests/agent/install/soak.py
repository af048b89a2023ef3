"""kill -9 of an installing process at random moments, again and again in the same folders.

After each kill: nothing that counts as installed is damaged, at most one partial lies there, and no process is left.
In the end it is installed and works. ``python -m tests.agent.install.soak --kills 200``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from llmgw.agent.fetch.contents import damage
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState
from llmgw.engines.builds import DEFAULT_ENGINES
from tests.agent.fetch.origin import Answer, Origin, serving

from .node import Engines, running
from .packing import Archive, behaving, scripted

VERSION = "b11000"
LISTING = f"/repos/ggml-org/llama.cpp/releases/tags/{VERSION}"
REPOSITORY = Path(__file__).parents[3]
GONE_S = 10.0
NOISE_BYTES = 12 << 20
STEPS = (EngineState.RESOLVING, EngineState.DOWNLOADING, EngineState.UNPACKING, EngineState.PROVING)
SOON_S = 0.2


class Broken(AssertionError):
    """What must never be was seen."""


@dataclass
class Report:
    kills: Counter[str] = field(default_factory=Counter)
    """By the state that the install was in."""
    finished: int = 0
    """Installs that were whole and proved when, or before, their kill came."""
    partials: int = 0
    """Kills that left one."""


async def install(folder: Path) -> None:
    """The process that is killed: installs and proves as the agent does, and says each state on a line."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    engines = Engines(folder)
    spec = EngineSpec(name="llamacpp", version=VERSION)
    print("begun", flush=True)
    async with running(engines):
        probing = asyncio.ensure_future(engines.installer.probe())
        engines.installer.take([spec])
        told = 0
        while not engines.usable(VERSION):
            await engines.until(lambda: len(engines.said) > told, "something is said")  # noqa: B023
            for said in engines.said[told:]:
                print(said.state.value, flush=True)
                if said.state is EngineState.FAILED:
                    sys.exit(said.words)
            told = len(engines.said)
        await probing
    print(EngineState.INSTALLED.value, flush=True)


@contextmanager
def release(archive: Archive) -> Iterator[Origin]:
    """A release on a server on loopback that sends it in some tenths of a second."""
    origin = Origin(archive.content, name=archive.path.name)
    origin.answers = [Answer(bytes_per_s=40 << 20)]
    with serving(origin):
        asset = {
            "name": origin.name,
            "size": len(origin.content),
            "state": "uploaded",
            "digest": f"sha256:{archive.sha256}",
            "browser_download_url": f"{origin.url}/{origin.name}",
        }
        origin.pages[LISTING] = ("application/json", json.dumps({"tag_name": VERSION, "assets": [asset]}).encode())
        yield origin


class Soak:
    def __init__(self, origin: Origin, node: Path, seed: int) -> None:
        self._node = node
        self._random = random.Random(seed)
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        self._env = {**kept, "LLMGW_GITHUB_API": origin.url}
        self._whole_s = 0.0
        self.report = Report()

    def measure(self) -> None:
        """An install that nobody disturbs, for how long one takes."""
        with self._started() as process:
            began = time.monotonic()
            out = process.communicate(timeout=120)[0]
            self._whole_s = time.monotonic() - began
        if process.returncode != 0 or not self._installed():
            raise Broken(f"an install that nobody disturbed failed: {out}")
        self._remove()

    def kill_once(self) -> None:
        with self._started() as process:
            said = self._await_the_moment(process)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            said += process.stdout.read().split()
        state = said[-1] if said else "begun"
        self._check()
        if process.returncode == -signal.SIGKILL:
            self.report.kills[state] += 1
        if self._installed() and state == EngineState.INSTALLED:
            self.report.finished += 1
            self._remove()

    def _await_the_moment(self, process: subprocess.Popen[str]) -> list[str]:
        """Any moment of an install; or one soon after a step has begun, since some steps are short.

        Returns the states that were read meanwhile.
        """
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0.0, self._whole_s))
            return []
        step, said = self._random.choice(STEPS), [""]
        assert process.stdout is not None
        while said[-1] not in (step, EngineState.INSTALLED) and (line := process.stdout.readline()):
            said.append(line.strip())
        time.sleep(self._random.uniform(0.0, SOON_S))
        return said[1:]

    def finish(self) -> None:
        """Whatever was left: the next start makes it whole, and leaves nothing else."""
        with self._started() as process:
            out = process.communicate(timeout=120)[0]
        if process.returncode != 0:
            raise Broken(f"the install after the kills failed: {out}")
        self._check()
        if self._partials() or not self._installed():
            raise Broken(f"after the last start there are {[path.name for path in self._engines.iterdir()]}")
        left = [path for path in (self._node / "cache").rglob("*") if path.is_file()]
        if left:
            raise Broken(f"after the last start the cache holds {left}")

    @property
    def _engines(self) -> Path:
        return self._node / "engines" / "llamacpp"

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "tests.agent.install.soak", "--install", str(self._node)]
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "begun":
                raise Broken("the installing process did not begin")
            yield process

    def _installed(self) -> list[Path]:
        return [path for path in self._engines.glob(f"{VERSION}-*") if ".partial-" not in path.name]

    def _partials(self) -> list[Path]:
        return list(self._engines.glob("*.partial-*"))

    def _check(self) -> None:
        deadline = time.monotonic() + GONE_S
        while strays := _processes_of(self._node):
            if time.monotonic() > deadline:
                raise Broken(f"processes outlived the installing one: {strays}")
        for place in self._installed():
            if why := damage(place):
                raise Broken(f"{place.name} counts as installed, and {why}")
        partials = self._partials()
        if len(partials) > 1:
            raise Broken(f"{len(partials)} partials were left: {[path.name for path in partials]}")
        self.report.partials += len(partials)

    def _remove(self) -> None:
        for place in self._installed():
            place.rename(place.with_name(f"{place.name}.partial-0"))  # removed by the next start


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that have anything to do with ``folder``, but for this one's own children's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(process.name) != os.getpid():
            found.append(line)
    return found


def soak(real: Path, folder: Path, kills: int, seed: int) -> Report:
    """Raises Broken."""
    noise = random.Random(seed).randbytes(NOISE_BYTES)
    archive = scripted(folder / "release", VERSION, behaving(real, VERSION), noise=noise)
    with release(archive) as origin:
        run = Soak(origin, folder / "node", seed)
        run.measure()
        while sum(run.report.kills.values()) < kills:
            run.kill_once()
        run.finish()
    return run.report


async def _real(folder: Path) -> Path:
    engines = Engines(folder)
    if await engines.installer.ensure(DEFAULT_ENGINES[0]) is not EngineState.INSTALLED:
        sys.exit(f"the real engine can't be had: {engines.words}")
    return Path(engines.program().argv[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--install", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.install is not None:
        asyncio.run(install(options.install))
        return
    with tempfile.TemporaryDirectory(prefix="llmgw-soak-") as folder:
        Path(folder).chmod(0o755)
        real = asyncio.run(_real(Path(folder) / "real"))
        began = time.monotonic()
        report = soak(real, Path(folder), options.kills, options.seed)
    print(
        f"{sum(report.kills.values())} kills in {time.monotonic() - began:.0f} s, seed {options.seed}: "
        f"{dict(report.kills.most_common())}; {report.finished} installs were proved by then; "
        f"{report.partials} kills left a partial, never more than one; nothing damaged counted as installed"
    )


if __name__ == "__main__":
    main()
