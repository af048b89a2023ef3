"""Whether a Python engine works here: it says its version, and its own help has every flag that llmgw passes.

Saying either takes such an engine 20 to 60 seconds of a processor. What was seen is therefore written down beside it,
with what it depends on: the files of the engine and of torch, the interpreter and the driver. While all of that is as
it was, what is looked at again every ten minutes is what can go without it: the interpreter still starts, and the
loader finds every library of the engine and of torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter, ValidationError

from llmgw.agent.fetch.child import ending
from llmgw.agent.fetch.disk import write_durably
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.libraries import is_of_cards, lacking, linkage_of, too_old_for, why_not_started
from llmgw.agent.install.program import Program
from llmgw.agent.install.recipe import Say
from llmgw.agent.install.trial import Trial, trial
from llmgw.cluster.model import EngineState, Inventory
from llmgw.engines.asking import Question, help_questions, version_question, whole
from llmgw.engines.check import check
from llmgw.engines.registry import engine

log = structlog.get_logger()

PROOF = ".llmgw-proof.json"
ASKED = "1"
"""Which questions were asked, and how. What flags llmgw passes is no part of it: they are looked up anew each time."""
VERSION_LIMIT_S = 300.0
"""Seven seconds on a machine with nothing else to do; a minute was seen on one that was busy."""

_START_LIMIT_S = 60.0
_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was seen, and by what it is known that it would be seen again."""

    stamp: str
    version: str
    help_text: str


_PROOF = TypeAdapter(Proof)


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment with an engine in it."""

    engine: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def argv(self) -> tuple[str, ...]:
        """``Launch.program``."""
        if self.engine == "vllm":
            return (str(self.folder / "bin" / "vllm"),)
        # Rather than `sglang serve`, which looks first whether the model makes pictures.
        return (str(self.python), "-m", "sglang.launch_server")

    @property
    def site(self) -> Path | None:
        return next(iter(sorted(self.folder.glob("lib/python3*/site-packages"))), None)


async def prove_environment(
    name: str, wanted: str, folder: Path, scratch: Path, inventory: Inventory, say: Say
) -> Program:
    """Proves what llmgw has installed into ``folder``: version ``wanted``. Raises NotProved, OSError."""
    environment = Environment(name, folder)
    program, flaws = await _prove(environment, folder / PROOF, scratch, inventory, say)
    if flaws:
        raise NotProved(f"{name} {program.version} in {folder} has other flags than this llmgw passes: {flaws}")
    if not _is(program.version, wanted):
        raise NotProved(f"{folder} says that it is {name} {program.version}, and {wanted} was to be installed")
    return program


async def prove_named(name: str, path: Path, scratch: Path, inventory: Inventory, say: Say) -> Program:
    """Proves what the agent's file names: ``bin/vllm``, or the interpreter that has SGLang. Raises NotProved, OSError.

    Flags that it lacks are logged and no more: it may be older, and run what needs none of them.
    """
    if not os.access(path, os.X_OK):
        raise NotProved(f"{path} is not executable" if path.exists() else f"{path} is not there")
    folder = path.parent.parent
    if path.parent.name != "bin" or not (folder / "bin" / "python").exists():
        raise NotProved(f"{path} lies in no Python environment: there is no {path.parent / 'python'} beside it")
    # Nothing is written into a folder of somebody else's.
    seen = scratch.with_name(f"named-{name}.json")
    program, flaws = await _prove(Environment(name, folder), seen, scratch, inventory, say)
    if flaws:
        log.warning("an engine lacks flags that llmgw may pass", engine=name, program=str(path), flags=flaws)
    return program


async def _prove(
    environment: Environment, seen: Path, scratch: Path, inventory: Inventory, say: Say
) -> tuple[Program, str]:
    """The program, and what is wrong with its flags. ``seen``: the file that tells of an earlier proof."""
    base = await _base(environment, scratch)
    await _libraries(environment, cards=inventory.driver is not None)
    stamp = await asyncio.to_thread(_stamp, environment, base, inventory)
    proof = await asyncio.to_thread(_read, seen)
    if proof is None or proof.stamp != stamp:
        with trial(scratch, (environment.folder, base)) as place:
            proof = await _see(_Asking(environment, place, inventory), stamp, say)
        await asyncio.to_thread(_write, seen, proof)
    report = await asyncio.to_thread(check, engine(environment.engine), proof.help_text, version=proof.version)
    reads = tuple(dict.fromkeys((environment.folder, base)))
    program = Program(argv=environment.argv, version=proof.version, help_text=proof.help_text, reads=reads)
    return program, report.words


async def _base(environment: Environment, scratch: Path) -> Path:
    """Where the interpreter itself is installed, since an environment is no more than links to that. It must start.

    Not as the agent, even for this: an environment that the agent's file names may be anybody's.
    """
    real = environment.python.resolve()
    argv = [str(environment.python), "-I", "-S", "-c", "import sys; print(sys.base_prefix)"]
    with trial(scratch, (environment.folder, real.parent.parent)) as place:
        ended = await place.run(argv, limit_s=_START_LIMIT_S)
    if ended.status != 0:
        raise NotProved(f"its interpreter, {real}, {ending(ended.status)}: {_last(ended.output)}")
    return Path(ended.output.strip())


async def _libraries(environment: Environment, *, cards: bool) -> None:
    """Raises NotProved where the loader does not find a library that the system should have."""
    site = environment.site
    if site is None:
        raise NotProved(f"there is no lib/python3…/site-packages in {environment.folder}")
    asked = await asyncio.to_thread(lambda: sorted(_engine_libraries(site)))
    linkage = await linkage_of(asked)
    if linkage.too_old is not None:
        raise NotProved(too_old_for(asked[0], linkage.too_old))
    # Libraries of other packages are loaded by the time that these are: the loader alone can't know.
    own = await asyncio.to_thread(_names, site) if linkage.missing else set()
    missing = {name: files[0] for name, files in linkage.missing.items() if name not in own}
    missing = {name: file for name, file in missing.items() if cards or not is_of_cards(name)}
    if missing:
        raise await lacking(missing)


async def _see(asking: _Asking, stamp: str, say: Say) -> Proof:
    say(EngineState.PROVING, "asking it for its version")
    version = await asking.version()
    if asking.inventory.driver is not None:
        say(EngineState.PROVING, "counting the GPUs that it sees")
        await asking.gpus()
    say(EngineState.PROVING, "reading its help")
    return Proof(stamp=stamp, version=version, help_text=await asking.help_text())


@dataclass(frozen=True, slots=True)
class _Asking:
    """The questions that one environment is asked, each in a process of its own."""

    environment: Environment
    place: Trial
    inventory: Inventory

    async def version(self) -> str:
        question = version_question(self.environment.engine, self.environment.argv)
        output = await self._ask(Question(argv=question.argv, env=question.env, limit_s=VERSION_LIMIT_S))
        found = engine(self.environment.engine).read_version(output)
        if found is None:
            raise NotProved(f"{' '.join(question.argv[:2])} does not say its version: {_last(output)}")
        return found

    async def help_text(self) -> str:
        """The first whole one; the last where none is."""
        answer = ""
        for question in help_questions(self.environment.engine, self.environment.argv):
            answer = await self._ask(question)
            if whole(answer):
                break
        if "--port" not in answer:
            raise NotProved(f"the help of {' '.join(self.environment.argv)} does not name --port: it is no server")
        return answer

    async def gpus(self) -> None:
        """A driver that is too old for the build shows here, and nowhere before a model is loaded."""
        script = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
        question = Question(argv=(str(self.environment.python), "-c", script), limit_s=VERSION_LIMIT_S)
        cuda, count = (await self._ask(question)).strip().splitlines()[-1].split()
        there = [gpu for gpu in self.inventory.gpus if gpu.problem is None]
        if cuda != "None" and int(count) < len(there):
            raise NotProved(
                f"its torch (CUDA {cuda}) sees {count} of this node's {len(there)} GPUs with driver "
                f"{self.inventory.driver}: is the driver new enough for CUDA {cuda}?"
            )

    async def _ask(self, question: Question) -> str:
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "80"}
        if self.inventory.driver is None:
            quiet["SGLANG_USE_CPU_ENGINE"] = "1"
        # Whatever it keeps belongs into the home that goes with the trial.
        places = {"TMPDIR": str(self.place.folder), "XDG_CACHE_HOME": str(self.place.folder)}
        env = {**places, **quiet, **question.env}
        ended = await self.place.run(question.argv, limit_s=question.limit_s, env=env)
        if ended.status == 0:
            return ended.output
        what = " ".join(question.argv[:3])
        if failure := await why_not_started(what, ended.output, Path(question.argv[0])):
            raise failure
        if ended.status is None:
            raise NotProved(f"{what} did not end within {question.limit_s:g} s")
        raise NotProved(f"{what} {ending(ended.status)}: {_last(ended.output)}")


def _names(site: Path) -> set[str]:
    return {path.name for path in site.rglob("*.so*")}


def _engine_libraries(site: Path) -> Iterator[Path]:
    for pattern in ("vllm/*.so", "sgl_kernel/**/*.so", "torch/_C*.so", "torch/lib/libtorch_*.so"):
        yield from site.glob(pattern)


def _stamp(environment: Environment, base: Path, inventory: Inventory) -> str:
    parts = [ASKED, environment.engine, str(inventory.driver), str(len(inventory.gpus)), str(base)]
    for path in _depended(environment):
        found = path.stat()
        # The environment's own path is no part of it: it may be reached by several.
        parts.append(f"{path.name} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _depended(environment: Environment) -> Iterable[Path]:
    yield environment.python.resolve()
    if environment.engine == "vllm":
        yield environment.folder / "bin" / "vllm"
    site = environment.site
    if site is not None:
        packages = [path for pattern in ("vllm*", "sglang*", "torch-*") for path in site.glob(f"{pattern}.dist-info")]
        yield from sorted(path / "RECORD" for path in packages if (path / "RECORD").exists())
        yield from sorted(_engine_libraries(site))


def _read(seen: Path) -> Proof | None:
    try:
        return _PROOF.validate_json(seen.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(seen: Path, proof: Proof) -> None:
    try:
        write_durably(seen, _PROOF.dump_json(proof))
    except OSError as error:
        log.warning("what was seen of an engine can't be kept: it is asked again", file=str(seen), reason=str(error))


def _is(said: str, wanted: str) -> bool:
    """``0.32.0+cpu`` is 0.32.0."""
    try:
        return said == wanted or Version(said).public == wanted
    except InvalidVersion:
        return False


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:])[-400:] or "it said nothing"
