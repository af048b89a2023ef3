"""Whether an engine's program works here: it finds its libraries, says its version, and answers one token.

The last is what counts. A build for another processor says its version and prints its help, and dies while loading;
one that lacks the file with its CPU backend does so, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from llmgw.agent.fetch.child import Ended, ending
from llmgw.agent.install.faults import NotProved as NotProved
from llmgw.agent.install.libraries import beside, require_libraries, why_not_started
from llmgw.agent.install.trial import Trial, trial
from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard, Placement
from llmgw.engines.base import Command, Engine, EngineUnhealthy, Launch, Probe
from llmgw.engines.tiny_gguf import tiny_gguf

VERSION_LIMIT_S = 20.0
HELP_LIMIT_S = 30.0
DEVICES_LIMIT_S = 60.0
TOKEN_LIMIT_S = 90.0
_ASK_AGAIN_S = 0.05
_PORTS_TRIED = 3
_KEY = "proof"
_LAST_LINES = 3

_NO_CPU_BACKEND = "no CPU backend found"
_PORT_TAKEN = "couldn't bind"
_DEVICE = re.compile(r"^\s+CUDA\d+:", re.MULTILINE)
_CUDA_SAID = re.compile(r"^.*(?:cuda|CUDA|NVIDIA).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    version: str | None
    help_text: str
    libraries: tuple[Path, ...]
    """Libraries that the loader finds outside of the system's own folders."""


async def prove(engine: Engine, program: Path, folder: Path, *, gpus: int | None = None) -> Proof:
    """Proves ``program`` in a folder of its own under ``folder``, as the user that owns ``folder``.

    ``gpus``: how many NVIDIA GPUs this machine has; a CUDA build must see as many. None: not known. Raises NotProved,
    OSError.
    """
    if not program.is_file():
        raise NotProved(f"{program} is not there" if not program.exists() else f"{program} is not a file")
    if not os.access(program, os.X_OK):
        raise NotProved(f"{program} is not executable: chmod +x {program}")
    # Of a link the loader looks beside the program that it leads to, and ldd beside the link.
    real = program.resolve()
    linked = await require_libraries(real, await asyncio.to_thread(beside, real), cards=gpus != 0)
    libraries = tuple(sorted(path for path in linked if not _of_the_system(path)))
    reads = {program, program.resolve().parent, *(path.parent for path in libraries)}
    with trial(folder, sorted(reads)) as place:
        version = engine.read_version(await _say(place, program, "--version", VERSION_LIMIT_S))
        help_text = await _say(place, program, "--help", HELP_LIMIT_S)
        if "--port" not in help_text:
            raise NotProved(f"{program} --help does not name --port: it is no {engine.name} server")
        if gpus and await asyncio.to_thread(_is_cuda_build, program):
            await _see_gpus(place, program, gpus)
        await _one_token(engine, program, help_text, place)
    return Proof(version=version, help_text=help_text, libraries=libraries)


async def why_ended(what: str, program: Path, ended: Ended, limit_s: float) -> NotProved:
    """Why a trial of ``program`` that should have ended well did not, by how it ended and what it said."""
    if ended.status == -signal.SIGILL:
        return NotProved(
            f"{what} was killed by SIGILL: this processor lacks instructions that the program was built with; "
            "use a build for this processor (engines.llamacpp.bin in the agent's file)"
        )
    if failure := await why_not_started(what, ended.output, program):
        return failure
    if _NO_CPU_BACKEND in ended.output:
        return NotProved(
            f"{what} failed, since no CPU backend (libggml-cpu*.so) that this processor can run lies in "
            f"{program.resolve().parent}: what was built beside the program belongs there, too"
        )
    if ended.status is None:
        return NotProved(f"{what} did not end within {limit_s:g} s{_last(ended.output, 1)}")
    return NotProved(f"{what} {ending(ended.status)}{_last(ended.output, 1)}")


async def _say(place: Trial, program: Path, flag: str, limit_s: float) -> str:
    ended = await place.run([str(program), flag], limit_s=limit_s)
    if ended.status != 0:
        raise await why_ended(f"{program} {flag}", program, ended, limit_s)
    return ended.output


def _of_the_system(path: Path) -> bool:
    return path.is_relative_to("/lib") or path.is_relative_to("/usr")


def _is_cuda_build(program: Path) -> bool:
    return any(program.resolve().parent.glob("libggml-cuda*.so*"))


async def _see_gpus(place: Trial, program: Path, gpus: int) -> None:
    """A backend that can't be loaded is left out in silence, and models would run on the processor."""
    ended = await place.run([str(program), "--list-devices"], limit_s=DEVICES_LIMIT_S)
    if ended.status != 0:
        raise await why_ended(f"{program} --list-devices", program, ended, DEVICES_LIMIT_S)
    seen = len(_DEVICE.findall(ended.output))
    if seen < gpus:
        said = "; ".join(line.strip() for line in _CUDA_SAID.findall(ended.output)[:_LAST_LINES])
        who = f" (as the user {place.user})" if place.user else ""
        raise NotProved(
            f"{program} --list-devices names {seen} of the {gpus} NVIDIA GPUs of this machine{who}"
            + (f": {said}" if said else "; is the driver new enough for the CUDA that it was built with?")
        )


async def _one_token(engine: Engine, program: Path, help_text: str, place: Trial) -> None:
    weights = place.write("proof.gguf", await asyncio.to_thread(tiny_gguf))
    for _ in range(_PORTS_TRIED):
        shard = _shard(_free_port())
        launch = Launch(
            shard=shard,
            program=(str(program),),
            host="127.0.0.1",
            weights=str(weights),
            work_dir=str(place.folder),
            help_text=help_text,
        )
        try:
            await _serve_one_token(engine, shard, engine.command(launch), place)
            return
        except _PortTaken:
            continue
    raise NotProved(f"no port of 127.0.0.1 stayed free long enough to prove {program} on it")


class _PortTaken(Exception):
    pass


async def _serve_one_token(engine: Engine, shard: DesiredShard, command: Command, place: Trial) -> None:
    async with place.started(command.argv, env=dict(command.env)) as server:
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
        if _PORT_TAKEN in output:
            raise _PortTaken
        program = Path(command.argv[0])
        raise await why_ended("loading a tiny model", program, Ended(ends.result(), output), TOKEN_LIMIT_S)
    raise NotProved(why or f"no token came from a tiny model within {TOKEN_LIMIT_S:g} s{_last(output, _LAST_LINES)}")


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


def _last(output: str, lines: int) -> str:
    said: Sequence[str] = [line.strip()[:300] for line in output.splitlines() if line.strip()][-lines:]
    return f": {' / '.join(said)}" if said else ""
