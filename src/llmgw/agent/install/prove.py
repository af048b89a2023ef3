"""Whether an engine's program works here: it says its version, finds its libraries, and answers one token.

The last is what counts. A build for another processor says its version and prints its help, and dies while loading.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from llmgw.agent.fetch.child import Ended, ending, run, started
from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard, Placement
from llmgw.engines.base import Command, Engine, EngineUnhealthy, Launch, Probe
from llmgw.engines.tiny_gguf import tiny_gguf

VERSION_LIMIT_S = 20.0
HELP_LIMIT_S = 30.0
TOKEN_LIMIT_S = 90.0
_ASK_AGAIN_S = 0.05
_PORTS_TRIED = 3
_KEY = "proof"

_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_LOADER_MISSING = re.compile(r"error while loading shared libraries: ([^\s:]+): cannot open")
_SYMBOLS = re.compile(r"version [`']([A-Z]+_[\d.]+)' not found")
_FOUND = re.compile(r"=> (/\S+) \(0x")

_PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libvulkan.so.1": "libvulkan1",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "libcurl.so.4": "libcurl4",
}


class NotProved(Exception):
    """The program does not work here; the message says how that showed, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    version: str | None
    help_text: str
    libraries: tuple[Path, ...]
    """Libraries that the loader finds outside of the system's own folders."""


async def prove(engine: Engine, program: Path, folder: Path) -> Proof:
    """Proves ``program`` in a folder of its own under ``folder``, ending it afterwards. Raises NotProved, OSError."""
    if not program.is_file():
        raise NotProved(f"{program} is not there" if not program.exists() else f"{program} is not a file")
    if not os.access(program, os.X_OK):
        raise NotProved(f"{program} is not executable: chmod +x {program}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        libraries = await _libraries(program, scratch)
        version = engine.read_version(await _say(program, "--version", VERSION_LIMIT_S, scratch))
        help_text = await _say(program, "--help", HELP_LIMIT_S, scratch)
        if "--port" not in help_text:
            raise NotProved(f"{program} --help does not name --port: it is no {engine.name} server")
        await _one_token(engine, program, help_text, Path(scratch))
    return Proof(version=version, help_text=help_text, libraries=libraries)


async def _say(program: Path, flag: str, limit_s: float, scratch: str) -> str:
    ended = await run([str(program), flag], env=_environment(scratch), limit_s=limit_s, cwd=scratch)
    if ended.status != 0:
        raise NotProved(_why(f"{program} {flag}", ended, limit_s))
    return ended.output


async def _libraries(program: Path, scratch: str) -> tuple[Path, ...]:
    """Asks the loader about the program and about what lies beside it, since backends are loaded later."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return ()
    found: set[Path] = set()
    for file in (program, *_beside(program)):
        ended = await run([ldd, str(file)], env=_environment(scratch), limit_s=VERSION_LIMIT_S)
        if words := _loader_complaint(ended.output):
            raise NotProved(f"{file}: {words}")
        found.update(Path(path) for path in _FOUND.findall(ended.output))
    return tuple(sorted(path for path in found if not path.is_relative_to("/lib") and not path.is_relative_to("/usr")))


def _beside(program: Path) -> Iterable[Path]:
    """One file of each library in the program's folder; ``libx.so``, ``libx.so.0`` and so on are one."""
    libraries: dict[str, Path] = {}
    for path in sorted(program.resolve().parent.glob("lib*.so*")):
        libraries.setdefault(path.name.partition(".so")[0], path)
    return libraries.values()


def _loader_complaint(output: str) -> str | None:
    missing = sorted({*_MISSING.findall(output), *_LOADER_MISSING.findall(output)})
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing if name in _PACKAGES})
        hint = f"; on Debian and Ubuntu: apt-get install {' '.join(packages)}" if packages else ""
        return f"the {'library' if len(missing) == 1 else 'libraries'} {', '.join(missing)} can't be found{hint}"
    if symbols := _SYMBOLS.search(output):
        return f"it needs {symbols[1]}, which is newer than what this system has: use a build for this system"
    return None


async def _one_token(engine: Engine, program: Path, help_text: str, scratch: Path) -> None:
    weights = scratch / "proof.gguf"
    weights.write_bytes(await asyncio.to_thread(tiny_gguf))
    for _ in range(_PORTS_TRIED):
        shard = _shard(_free_port())
        launch = Launch(
            shard=shard,
            program=(str(program),),
            host="127.0.0.1",
            weights=str(weights),
            work_dir=str(scratch),
            help_text=help_text,
        )
        try:
            await _serve_one_token(engine, shard, engine.command(launch), scratch)
            return
        except _PortTaken:
            continue
    raise NotProved(f"no port of 127.0.0.1 stayed free long enough to prove {program} on it")


class _PortTaken(Exception):
    pass


async def _serve_one_token(engine: Engine, shard: DesiredShard, command: Command, scratch: Path) -> None:
    environment = {**_environment(str(scratch)), **command.env}
    async with started(command.argv, env=environment, cwd=str(scratch), merged=True) as server:
        said = bytearray()
        async with asyncio.TaskGroup() as tasks:
            ends = tasks.create_task(_until_the_end(server, said))
            token = tasks.create_task(_until_a_token(engine, shard, command.endpoint))
            done, _ = await asyncio.wait([ends, token], return_when=asyncio.FIRST_COMPLETED, timeout=TOKEN_LIMIT_S)
            ends.cancel()
            token.cancel()
    why = token.result() if token in done else None
    if token in done and why is None:
        return
    output = said.decode("utf-8", "replace")
    if ends in done:
        if "couldn't bind" in output:
            raise _PortTaken
        raise NotProved(_why("loading a tiny model", Ended(ends.result(), output), TOKEN_LIMIT_S))
    raise NotProved(why or f"no token came from a tiny model within {TOKEN_LIMIT_S:g} s")


async def _until_the_end(server: asyncio.subprocess.Process, said: bytearray) -> int:
    assert server.stdout is not None
    while piece := await server.stdout.read(1 << 16):
        said += piece
        del said[: -(1 << 16)]
    return await server.wait()


async def _until_a_token(engine: Engine, shard: DesiredShard, endpoint: str | None) -> str | None:
    """None once the engine has answered as asked, else why its answer is none."""
    headers = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(f"http://{endpoint}", headers=headers, trust_env=False) as http:
        while True:
            try:
                status, body = await _ask(http, engine.health())
                if engine.read_health(status, body) is None:
                    return engine.read_readiness(shard, *await _ask(http, engine.readiness(shard)))
            except EngineUnhealthy as error:
                return f"proving it with a tiny model: {error}"
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_ASK_AGAIN_S)


async def _ask(http: aiohttp.ClientSession, probe: Probe) -> tuple[int, bytes]:
    async with http.request(probe.method, probe.path, data=probe.body) as answer:
        return answer.status, await answer.read()


def _shard(port: int) -> DesiredShard:
    return DesiredShard(
        id="proof/0",
        generation=1,
        rank=0,
        model="proof",
        aliases=(),
        task="generate",
        source=None,
        profile=Profile(name="proof", engine="llamacpp", context=256, parallel=1),
        placement=Placement(node="", port=port),
        api_key=_KEY,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(scratch: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": scratch, "LANG": "C.UTF-8", "GGML_NO_BACKTRACE": "1"}


def _why(what: str, ended: Ended, limit_s: float) -> str:
    if ended.status == -signal.SIGILL:
        return (
            f"{what} was killed by SIGILL: this processor lacks instructions that the program was built with; "
            "use a build for this processor (engines.llamacpp.bin in the agent's file)"
        )
    if words := _loader_complaint(ended.output):
        return f"{what}: {words}"
    if ended.status is None:
        return f"{what} did not end within {limit_s:g} s"
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    return f"{what} {ending(ended.status)}" + (f": {lines[-1][:300]}" if lines else "")
