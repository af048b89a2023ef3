"""Every flag that an adapter can ever write, found by having it write: all options, all ranks, all builds of an engine.

Nothing is listed by hand. A flag that only a replica over several nodes gets is in here because the adapter was asked
for such a replica, and one that only some builds get because it was told of builds that have it, and of others.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from llmgw.cluster.catalog import Profile, SimOptions
from llmgw.cluster.model import DesiredShard, Placement, ShardPeer
from llmgw.engines.base import Command, Engine, Launch, LaunchRefused
from llmgw.engines.flags import FLAG, Flag

_ENGINE, _SIDECAR, _WORKER = "{engine}", "{sidecar}", "{worker}"

_KEY = re.compile(r"^([a-z][\w-]*): *(.*)$", re.MULTILINE)

_Changes = Mapping[str, Any]
_Option = tuple[str, _Changes]

# Options in the order of the words that tell them. The first of each is what every other is compared with.
_SHAPES: tuple[_Option, ...] = (
    ("", {"gpus_per_node": 1}),
    ("without GPUs", {"gpus_per_node": 0}),
    ("on 2 GPUs", {"gpus_per_node": 2}),
    ("on 2 GPUs, tensor_parallel 2", {"gpus_per_node": 2, "tensor_parallel": 2}),
    ("on 2 GPUs, pipeline_parallel 2", {"gpus_per_node": 2, "pipeline_parallel": 2}),
    ("over 2 nodes", {"nodes": 2, "gpus_per_node": 1}),
    ("over 2 nodes, tensor_parallel 2", {"nodes": 2, "gpus_per_node": 1, "tensor_parallel": 2}),
    ("over 2 nodes, pipeline_parallel 2", {"nodes": 2, "gpus_per_node": 1, "pipeline_parallel": 2}),
    ("over 2 nodes without GPUs", {"nodes": 2, "gpus_per_node": 0}),
    ("over 2 nodes without GPUs, tensor_parallel 2", {"nodes": 2, "gpus_per_node": 0, "tensor_parallel": 2}),
    ("over 2 nodes without GPUs, pipeline_parallel 2", {"nodes": 2, "gpus_per_node": 0, "pipeline_parallel": 2}),
)
_PROFILE: tuple[tuple[_Option, ...], ...] = (
    _SHAPES,
    (("", {}), ("launch_mode mp", {"launch_mode": "mp"}), ("launch_mode ray", {"launch_mode": "ray"})),
    (("", {}), ("with a context", {"context": 8192})),
    (("", {}), ("with parallel", {"parallel": 4})),
    (("", {}), ("with memory", {"memory_bytes": 8 << 30}), ("with max_concurrency", {"max_concurrency": 8})),
    (
        ("", {}),
        (
            "with sim options",
            {"sim": SimOptions(load_time_s=1.0, first_token_s=1.0, token_interval_s=1.0, fault="hang")},
        ),
    ),
)
_SHARD: tuple[tuple[_Option, ...], ...] = (
    (
        ("", {"task": "generate"}),
        ("task embed", {"task": "embed"}),
        ("task rerank", {"task": "rerank"}),
        ("task transcribe", {"task": "transcribe"}),
        ("task speech", {"task": "speech"}),
    ),
    (("", {"rank": 0}), ("ranks above 0", {"rank": 1})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A flag that llmgw passes to one of an engine's programs."""

    program: str
    """Empty: the engine itself. Else another of its programs, with its subcommand: ``ray start``."""
    name: str
    values: frozenset[str | None]
    """What follows it; None: it stands alone."""
    when: str
    """The fewest options under which it is passed; empty: always."""
    asked: bool
    """The engine's help is asked for it first, and without it the flag is left out."""
    instead: tuple[str, ...] = ()
    """Flags that are passed where the help lacks it, the next where it lacks that one too."""


def widest(engine: Engine, version: str = "") -> tuple[Passed, ...]:
    """Every flag of every command line that ``engine`` can be started with, at ``version`` (empty: not known)."""
    # An adapter is a plain object, which can be hashed; mypy denies that to protocols.
    return _widest(cast(Any, engine), version)


@lru_cache(maxsize=32)
def _widest(engine: Engine, version: str) -> tuple[Passed, ...]:
    wide = _Wide(engine, version)
    return tuple(wide.passed(program, name) for program, name in wide.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supposed(Launch):
    """A launch on a node whose engine documents whatever it is asked for."""

    supposed: _Everything

    @property
    def flags(self) -> Mapping[str, Flag]:
        return self.supposed


class _Everything(Mapping[str, Flag]):
    """Has every flag but some, and remembers which it was asked for."""

    def __init__(self, lacking: frozenset[str], metavar: str | None) -> None:
        self._lacking = lacking
        self._metavar = metavar
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Flag:
        self.asked[name] = None
        if name in self._lacking:
            raise KeyError(name)
        return Flag((name,), self._metavar, "")

    def __iter__(self) -> Iterator[str]:
        return iter(self.asked)

    def __len__(self) -> int:
        return len(self.asked)


@dataclass(frozen=True, slots=True)
class _Case:
    words: tuple[str, ...]
    shard: DesiredShard
    cores: int
    metavar: str | None = None
    """What the help says that flags take."""


_Where = tuple[str, str]
"""A program, and one of its flags."""


class _Wide:
    def __init__(self, engine: Engine, version: str) -> None:
        self._engine = engine
        self._version = version
        self.found: dict[_Where, _Case] = {}
        """Each flag with the simplest case that has it."""
        self._values: dict[_Where, set[str | None]] = {}
        self._asked: set[str] = set()
        # One case for each set of flags: with what is left out of them, cases of one set fare alike.
        self._kinds: dict[frozenset[_Where], _Case] = {}
        for case in _cases(engine):
            everything = self._look(case)
            if everything.asked:
                self._look(replace(case, metavar="N"))

    def passed(self, program: str, name: str) -> Passed:
        where = (program, name)
        return Passed(
            program=program,
            name=name,
            values=frozenset(self._values[where]),
            when=", ".join(self.found[where].words),
            asked=name in self._asked,
            instead=self._instead(where) if name in self._asked else (),
        )

    def _look(self, case: _Case) -> _Everything:
        everything, written = self._write(case, frozenset())
        self._asked.update(everything.asked)
        for where, value in written or ():
            self.found.setdefault(where, case)
            self._values.setdefault(where, set()).add(value)
        self._kinds.setdefault(frozenset(where for where, _ in written or ()), case)
        return everything

    def _instead(self, where: _Where) -> tuple[str, ...]:
        """Empty too where one of the commands that have the flag would simply be without it."""
        lacking: list[str] = [where[1]]
        kinds = [(flags, case) for flags, case in self._kinds.items() if where in flags]
        while True:
            stand_ins: dict[str, None] = {}
            for flags, case in kinds:
                _, written = self._write(case, frozenset(lacking))
                new = [name for at, name in dict(written or ()) if at == where[0] and (at, name) not in flags]
                if not new:
                    return tuple(lacking[1:])
                stand_ins.update(dict.fromkeys(new))
            lacking += stand_ins
            if not self._asked.intersection(stand_ins):
                return tuple(lacking[1:])

    def _write(
        self, case: _Case, lacking: frozenset[str]
    ) -> tuple[_Everything, list[tuple[_Where, str | None]] | None]:
        """What it asked for, and the flags with their values; None where the adapter refuses such a launch."""
        everything = _Everything(lacking, case.metavar)
        try:
            command = self._engine.command(_launch(case, self._version, everything))
        except LaunchRefused:
            return everything, None
        worker = next(iter(self._engine.worker_programs), "")
        return everything, list(_written(command, {_ENGINE: "", _WORKER: worker}))


def _cases(engine: Engine) -> Iterator[_Case]:
    """All combinations that the adapter does not refuse, simple ones first."""
    options = list(itertools.product(*_PROFILE, *_SHARD))
    options.sort(key=lambda chosen: sum(bool(words) for words, _ in chosen))
    for chosen in options:
        words = tuple(word for word, _ in chosen if word)
        profile, shard = chosen[: len(_PROFILE)], chosen[len(_PROFILE) :]
        asked = _shard(engine.name, _merged(profile), _merged(shard))
        if asked is not None and engine.refusal(asked) is None:
            yield from (_Case(words, asked, cores) for cores in (8, 1))


def _merged(options: Sequence[_Option]) -> _Changes:
    return {key: value for _, changes in options for key, value in changes.items()}


def _shard(engine: str, profile: _Changes, shard: _Changes) -> DesiredShard | None:
    """None where there is no such rank."""
    of = Profile(name="p", engine=engine, **profile)  # type: ignore[arg-type]
    if shard["rank"] >= of.nodes:
        return None
    gpus = range(of.gpus_per_node)
    several = of.nodes > 1
    return DesiredShard(
        id=f"model/{shard['rank']}",
        generation=1,
        model="model",
        aliases=("alias",),
        source="file:///model",
        profile=of,
        placement=Placement(
            node="node", port=20000, gpus=tuple(gpus), gpu_uuids=tuple(f"GPU-{index}" for index in gpus)
        ),
        api_key="key",
        dist_init="10.0.0.1:20050" if several else None,
        fabric="fabric" if several else None,
        peers=tuple(ShardPeer(node=f"n{rank}", address=f"10.0.0.{rank + 1}", port=20000) for rank in range(of.nodes))
        if several
        else (),
        **shard,
    )


def _launch(case: _Case, version: str, everything: _Everything) -> Launch:
    several = case.shard.profile.nodes > 1
    return _Supposed(
        shard=case.shard,
        program=(_ENGINE,),
        sidecar_program=(_SIDECAR,),
        worker_program=(_WORKER,),
        host="10.0.0.1",
        weights="/weights",
        weights_bytes=1 << 30,
        work_dir="/work",
        version=version,
        cores=case.cores,
        node_memory_bytes=64 << 30,
        interface="eth0" if several else None,
        hcas=("mlx5_0:1",) if several else (),
        supposed=everything,
    )


def _written(command: Command, names: Mapping[str, str]) -> Iterator[tuple[_Where, str | None]]:
    yield from _flags(command.argv, names)
    for path, text in command.files.items():
        # What ``--config`` names is read as if each of its keys were a flag.
        if path in command.argv:
            for key, value in _KEY.findall(text):
                yield (names[command.argv[0]], f"--{key}"), value
    for sidecar in command.sidecars:
        for argv in (sidecar.argv, sidecar.ready_argv):
            yield from _flags(argv, {**names, _SIDECAR: sidecar.name})


def _flags(argv: Sequence[str], names: Mapping[str, str]) -> Iterator[tuple[_Where, str | None]]:
    if not argv:
        return
    program = names[argv[0]]
    if program and len(argv) > 1 and not argv[1].startswith("-"):
        program = f"{program} {argv[1]}"
    for argument, following in itertools.zip_longest(argv[1:], argv[2:]):
        name, equals, value = argument.partition("=")
        if not _is_flag(name):
            continue
        stands_alone = following is None or _is_flag(following.partition("=")[0])
        yield (program, name), value if equals else None if stands_alone else following


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and FLAG.fullmatch(argument) is not None
