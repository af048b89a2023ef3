"""Which of this machine's programs an engine is, and what that program says of itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch.child import ending, started
from llmgw.agent.install.places import Installation, Places
from llmgw.config import AgentConfig, ConfigError, load_agent
from llmgw.config.agent import PROGRAM_KEYS
from llmgw.engines.asking import Question, help_questions, version_question, whole
from llmgw.engines.base import Engine
from llmgw.engines.flags import read_flags

AGENT_FILE = Path("/etc/llmgw/agent.yaml")
NO_FILE_ENGINES_DIR = Path("/opt/llmgw/engines")
"""Where engines lie on a node whose file says nothing else."""

_PROGRAMS: Mapping[str, str] = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "python"}
_ON_PATH: Mapping[str, str] = {**_PROGRAMS, "sglang": "sglang"}
_LAST_LINES = 3
_MOST_BYTES = 8 << 20


class NotChecked(Exception):
    """There is nothing that could be looked at; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    engine: str
    argv: tuple[str, ...]
    """As ``Launch.program`` is for this engine."""
    how: str
    """By what it was chosen, in words."""
    ray: Path | None = None
    """What the agent's file names as Ray."""
    remarks: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.argv[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a program printed."""

    help_text: str
    version: str
    """Empty: it did not say."""
    remarks: tuple[str, ...] = ()


def find(engine: str, named: Path | None, config: Path | None) -> Found:
    """The program of ``engine``: the one that is ``named``, else the agent's own choice, else one on PATH.

    ``config`` is the agent's file; None: where it usually is, if it is there. Raises NotChecked.
    """
    if named is not None:
        return Found(engine=engine, argv=_argv(engine, _executable(_inside(engine, named))), how="as asked for (--bin)")
    file, path = _agent_file(config)
    if file is not None and (chosen := _named_by(file, engine)):
        key, program = chosen
        how = f"named by {path} ({key})"
        return Found(engine=engine, argv=_argv(engine, _executable(program)), how=how, ray=_ray(file))
    engines_dir = file.engines_dir if file is not None else NO_FILE_ENGINES_DIR
    ray = _ray(file) if file is not None else None
    if installed := _installed(engine, engines_dir, ray):
        return installed
    on_path = shutil.which(_ON_PATH[engine])
    if on_path is None:
        where = f"{path} names no {engine}" if file is not None else f"there is no {path}"
        raise NotChecked(
            f"no {engine} to check: {where}, none is installed under {engines_dir}, and {_ON_PATH[engine]} is not on "
            "PATH: name one (--bin PATH), or give a help (--help-file FILE)"
        )
    how = "found on PATH, from where llmgw itself takes no engine"
    return Found(engine=engine, argv=_argv(engine, Path(on_path)), how=how)


def _agent_file(config: Path | None) -> tuple[AgentConfig | None, Path]:
    path = config or AGENT_FILE
    if config is None and not os.path.lexists(path):
        return None, path
    try:
        return load_agent(path), path
    except ConfigError as error:
        raise NotChecked(f"{error}\nMend it, or name the engine's program: --bin PATH") from None


def _named_by(file: AgentConfig, engine: str) -> tuple[str, Path] | None:
    programs = file.engines.programs
    return next(((PROGRAM_KEYS[name], program) for name, program in programs.items() if name == engine), None)


def _ray(file: AgentConfig) -> Path | None:
    return file.engines.vllm.ray_bin if file.engines.vllm is not None else None


def _installed(engine: str, engines_dir: Path, ray: Path | None) -> Found | None:
    """The newest of those that an agent has installed."""
    places = Places(engines_dir, engines_dir)
    ours = [each for each in places.installations() if each.spec.name == engine]
    ours.sort(key=lambda each: -each.installed_at)
    with_program = [(each, program) for each in ours if (program := _program_in(engine, each)) is not None]
    if not with_program:
        return None
    (newest, program), *others = with_program
    remarks = tuple(f"{each.spec.version} is installed too; to check it: --bin {path}" for each, path in others)
    how = f"installed {newest.spec.version}" + (", the newest" if others else "")
    return Found(engine=engine, argv=_argv(engine, program), how=how, ray=ray, remarks=remarks)


def _program_in(engine: str, installation: Installation) -> Path | None:
    return next(_candidates(engine, installation.folder), None)


def _candidates(engine: str, folder: Path) -> Iterator[Path]:
    name = _PROGRAMS[engine]
    for pattern in (f"bin/{name}", name, f"*/bin/{name}", f"*/{name}", f"**/{name}"):
        yield from (path for path in sorted(folder.glob(pattern)) if path.is_file() and os.access(path, os.X_OK))


def _inside(engine: str, named: Path) -> Path:
    """A folder stands for the program in it."""
    if not named.is_dir():
        return named
    found = next(_candidates(engine, named), None)
    if found is None:
        raise NotChecked(f"there is no {_PROGRAMS[engine]} in the folder {named}: name the program itself")
    return found


def _executable(path: Path) -> Path:
    if not path.exists():
        raise NotChecked(f"{path} is not there")
    if not path.is_file():
        raise NotChecked(f"{path} is not a file")
    if not os.access(path, os.X_OK):
        raise NotChecked(f"{path} is not executable: chmod +x {path}, or run this as a user who may run it")
    # Never resolved: an environment's python is a link, and is the environment's by its own path alone.
    return path.absolute()


def _argv(engine: str, program: Path) -> tuple[str, ...]:
    if engine != "sglang":
        return (str(program),)
    return (str(program), "serve") if program.name == "sglang" else (str(program), "-m", "sglang.launch_server")


# -- asking


async def ask(engine: Engine, found: Found) -> Said:
    """Its help and its version. Raises NotChecked where it prints nothing that could be read."""
    help_text = await _help(found.engine, found.argv)
    status, output, errors = await _run(version_question(found.engine, found.argv))
    version = (engine.read_version(output + errors) if status == 0 else None) or ""
    remarks = () if version else (f"it did not say its version; it counts as a recent {found.engine}",)
    return Said(help_text=help_text, version=version, remarks=remarks)


async def ask_other(engine: Engine, found: Found, program: str) -> str | None:
    """The help of another program of the engine, such as ``ray start``; None where there is no such program.

    Raises NotChecked where there is one that says nothing.
    """
    name, *subcommand = program.split()
    path = _beside(engine, found, name)
    if path is None:
        return None
    return await _answer(Question(argv=(str(path), *subcommand, "--help")))


def _beside(engine: Engine, found: Found, name: str) -> Path | None:
    if name == "ray" and found.ray is not None:
        return found.ray if os.access(found.ray, os.X_OK) else None
    names = engine.worker_programs if name in engine.worker_programs else (name,)
    places = [folder / each for folder in _folders(Path(found.path)) for each in names]
    return next((path for path in places if path.is_file() and os.access(path, os.X_OK)), None)


def _folders(program: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((program.parent, program.resolve().parent)))


async def _help(engine: str, argv: tuple[str, ...]) -> str:
    found: list[str] = []
    failed: NotChecked | None = None
    for question in help_questions(engine, argv):
        try:
            text = await _answer(question)
        except NotChecked as error:
            failed = failed or error
            continue
        if whole(text):
            return text
        found.append(text)
    if found:
        return max(found, key=lambda text: len(read_flags(text)))
    assert failed is not None
    raise failed


async def _answer(question: Question) -> str:
    """Whichever of stdout and stderr has the help; programs differ in that."""
    status, output, errors = await _run(question)
    command = " ".join(question.argv)
    if status != 0:
        raise NotChecked(f"{command} {_ending(status, question)}{_last_lines(output, errors)}")
    text = max(output, errors, key=lambda text: len(read_flags(text)))
    if not text.strip():
        raise NotChecked(f"{command} ended well, and printed nothing")
    return text


async def _run(question: Question) -> tuple[int | None, str, str]:
    """The exit status (None: killed at its time limit), stdout and stderr. Raises NotChecked."""
    env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", **question.env}
    if sys.stderr.isatty():
        print(f"asking {' '.join(question.argv)} …", file=sys.stderr)
    status: int | None = None
    pieces: list[bytes] = [b"", b""]
    try:
        async with started(question.argv, env=env) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            async with asyncio.timeout(question.limit_s), asyncio.TaskGroup() as tasks:
                reads = [tasks.create_task(_read(stream)) for stream in (process.stdout, process.stderr)]
            pieces = [read.result() for read in reads]
            status = await process.wait()
    except TimeoutError:
        pass
    except OSError as error:
        raise NotChecked(f"{question.argv[0]}: {error.strerror or error}") from None
    output, errors = (piece.decode("utf-8", "replace") for piece in pieces)
    return status, output, errors


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of it, of which the beginning is kept: no help is so long that this would cut it."""
    kept = bytearray()
    while piece := await stream.read(1 << 16):
        kept += piece[: _MOST_BYTES - len(kept)]
    return bytes(kept)


def _ending(status: int | None, question: Question) -> str:
    return f"did not end within {question.limit_s:g} s" if status is None else ending(status)


def _last_lines(output: str, errors: str) -> str:
    lines = [line.strip() for line in (errors.strip() or output.strip()).splitlines() if line.strip()]
    return ":\n  " + "\n  ".join(line[:300] for line in lines[-_LAST_LINES:]) if lines else ""
