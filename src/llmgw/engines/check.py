"""Whether an engine's own help still has every flag that llmgw can pass to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum

from llmgw.engines.base import Engine
from llmgw.engines.flags import Flag, Help, read_help
from llmgw.engines.widest import Passed, widest

# Flags near the end of every whole help that was seen. Where one of ours is missing and so are these, it is the end of
# the help that is missing. (``--help`` itself stands at the beginning, and says nothing about the end.)
_ENDS: Mapping[str, tuple[str, ...]] = {
    "llamacpp": ("--sleep-idle-seconds", "--lora-init-without-apply", "--slot-prompt-similarity", "--spec-default"),
    "vllm": ("--speculative-config", "--structured-outputs-config", "--kv-transfer-config", "--weight-transfer-config"),
    "sglang": (
        "--disable-cuda-graph",
        "--enable-dp-attention",
        "--monokernel-backend",
        "--enable-flashinfer-allreduce-fusion",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The versions that have a flag, as far as it is known: from ``since`` on, and before ``until``."""

    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()
    why: str


# Only flags that are passed where the help has them, and that are fine to be without.
_NOT_IN_ALL: Mapping[str, Mapping[str, _Span]] = {
    "vllm": {
        "--disable-log-requests": _Span(until=(0, 10), why="newer versions log no requests unless they are told to"),
        "--shutdown-timeout": _Span(since=(0, 18), why="older versions end requests at once when they are stopped"),
    },
    "sglang": {
        "--engine-info-bootstrap-port": _Span(since=(0, 5, 23), why="older versions may open no such port"),
    },
}

_RELEASE = re.compile(r"\d+(?:\.\d+)+")
_DEPRECATED = re.compile(r"(?i:\W*deprecated\b)|.*\(DEPRECATED\)")
_ALIKE = 0.6


class State(StrEnum):
    DEFINED = "defined"
    DEPRECATED = "deprecated"
    """There, and the help says that it will go."""
    INSTEAD = "instead"
    """Not there, and llmgw passes another flag, which is."""
    LEFT_OUT = "left out"
    """Not there, and fine to be without."""
    MISSING = "missing"
    REMOVED = "removed"
    """In the help, which says of it only that it is gone."""
    VALUE = "value"
    """There, and takes other values than llmgw gives it."""
    UNSEEN = "not seen"
    """Not there, and the help may be cut off."""


_FAULTS = frozenset({State.MISSING, State.REMOVED, State.VALUE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a help says of one flag."""

    flag: Passed
    state: State
    words: str
    """Empty where it is simply defined."""
    nearest: tuple[str, ...] = ()
    """Flags of the help that are most like it by name, the nearest first; only where it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One program of an engine whose help was read."""

    program: str
    """Empty: the engine itself."""
    lines: int
    flags: int
    """How many definitions its help has."""
    cut_short: str | None
    """Why the help may be no more than a part of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    engine: str
    version: str
    looked: tuple[Looked, ...]
    answers: tuple[Answer, ...]
    unread: tuple[str, ...]
    """Other programs of the engine whose help was not given: ``ray start``."""

    @property
    def ok(self) -> bool:
        """Every flag is there, or llmgw knows how to do without."""
        return not self.faults and not self.unseen

    @property
    def faults(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.state in _FAULTS)

    @property
    def missing(self) -> tuple[Answer, ...]:
        return self._of(State.MISSING)

    @property
    def removed(self) -> tuple[Answer, ...]:
        return self._of(State.REMOVED)

    @property
    def values(self) -> tuple[Answer, ...]:
        """Flags that take a value where llmgw gives none, none where it gives one, or other ones."""
        return self._of(State.VALUE)

    @property
    def unseen(self) -> tuple[Answer, ...]:
        return self._of(State.UNSEEN)

    @property
    def cut_short(self) -> str | None:
        """Why one of the helps may be cut off; None where none seems to be."""
        return next((looked.cut_short for looked in self.looked if looked.cut_short), None)

    @property
    def words(self) -> str:
        """One sentence; empty where all is well."""
        if self.faults:
            return "; ".join(_named(answer) for answer in self.faults)
        if self.unseen:
            names = ", ".join(answer.flag.name for answer in self.unseen)
            return f"{names} not seen, and the help may be cut off: {self.cut_short}"
        return ""

    def _of(self, state: State) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.state is state)


def check(engine: Engine, help_text: str, *, version: str = "", others: Mapping[str, str] | None = None) -> Report:
    """Looks up in ``help_text`` every flag that llmgw can pass to ``engine``.

    ``version`` is what the engine says it is (empty: not known, and it counts as a recent one). ``others`` are the
    helps of its other programs, by the names that ``widest`` gives them.
    """
    helps = {"": help_text, **(others or {})}
    passed = widest(engine, version)
    programs = dict.fromkeys(flag.program for flag in passed)
    looked: list[Looked] = []
    answers: list[Answer] = []
    for program in programs:
        if program not in helps:
            continue
        ours = [flag for flag in passed if flag.program == program]
        looking = _Looking(engine.name, version, read_help(helps[program]), ours)
        found = [looking.answer(flag) for flag in ours]
        cut_short = looking.cut_short(found)
        found = [looking.final(answer, cut=cut_short is not None) for answer in found]
        looked.append(
            Looked(program=program, lines=len(looking.help.lines), flags=looking.definitions, cut_short=cut_short)
        )
        answers += found
    return Report(
        engine=engine.name,
        version=version,
        looked=tuple(looked),
        answers=tuple(answers),
        unread=tuple(program for program in programs if program not in helps),
    )


class _Looking:
    def __init__(self, engine: str, version: str, help: Help, ours: Sequence[Passed]) -> None:
        self._engine = engine
        self._version = version
        self._ours = frozenset(flag.name for flag in ours)
        self._ends = () if any(flag.program for flag in ours) else _ENDS.get(engine, ())
        self.help = help
        self.definitions = len({id(flag) for flag in help.flags.values()})

    def answer(self, flag: Passed) -> Answer:
        defined = self.help.flags.get(flag.name)
        if defined is not None:
            return _defined(flag, defined)
        stand_in = next((name for name in flag.instead if name in self.help.flags), None)
        if stand_in is not None:
            return Answer(flag=flag, state=State.INSTEAD, words=f"not in this version: llmgw passes {stand_in}")
        removed = self.help.removed.get(flag.name)
        if removed is not None:
            return Answer(flag=flag, state=State.REMOVED, words=f"its line {removed.line} says: {removed.description}")
        if why := self._fine_without(flag):
            return Answer(flag=flag, state=State.LEFT_OUT, words=f"not in this version, and left out: {why}")
        return Answer(flag=flag, state=State.MISSING, words="")

    def cut_short(self, answers: Sequence[Answer]) -> str | None:
        """Why the help may be a part of itself; None where nothing speaks for it."""
        if not self.help.flags:
            return "it defines no flag at all"
        if not self.help.documents_itself:
            return "it does not document --help itself, so it is a summary or a part"
        ends = not self._ends or any(name in self.help.flags for name in self._ends)
        if not ends and any(self.open(answer) for answer in answers):
            last = max(self.help.flags.values(), key=lambda flag: flag.line)
            return (
                f"it stops after {last.names[-1]} (line {last.line}), and the flags that stand at the end of every "
                f"help of {self._engine} so far are not there"
            )
        return None

    def open(self, answer: Answer) -> bool:
        """Whether more of the help could answer otherwise: it is not there, or in a last line that may not be whole."""
        defined = self.help.flags.get(answer.flag.name)
        last = defined is not None and defined.line == len(self.help.lines)
        return answer.state is State.MISSING or (answer.state is State.VALUE and last)

    def final(self, answer: Answer, *, cut: bool) -> Answer:
        """The answer in the light of whether the help may be ``cut`` off."""
        if cut and self.open(answer):
            words = "not there as far as the help goes, and it may be cut off"
            return Answer(flag=answer.flag, state=State.UNSEEN, words=words)
        if answer.state is not State.MISSING:
            return answer
        nearest = self._nearest(answer.flag.name)
        return replace(answer, words=self._missing(answer.flag, nearest), nearest=nearest)

    def _fine_without(self, flag: Passed) -> str:
        span = _NOT_IN_ALL.get(self._engine, {}).get(flag.name)
        if span is None or flag.program or not flag.asked:
            return ""
        release = _release(self._version)
        gone = bool(span.until) and (release is None or release >= span.until)
        to_come = bool(span.since) and release is not None and release < span.since
        return span.why if gone or to_come else ""

    def _nearest(self, name: str) -> tuple[str, ...]:
        """Those that llmgw passes already are no new names of this one."""
        free = [other for other in self.help.flags if other.startswith("--") and other not in self._ours]
        ranked = sorted((-_likeness(name, other), other) for other in free)
        close = tuple(other for likeness, other in ranked[:3] if -likeness >= _ALIKE)
        return close or tuple(other for _, other in ranked[:1])

    def _missing(self, flag: Passed, nearest: tuple[str, ...]) -> str:
        lacking = ", nor is ".join(["not defined", *flag.instead])
        line = self.help.mention(flag.name)
        words = [lacking if line is None else f"{lacking} (only mentioned, in line {line})"]
        if nearest:
            alike = "" if _likeness(flag.name, nearest[0]) >= _ALIKE else ", which is hardly alike"
            there = self.help.flags[nearest[0]]
            words.append(f"the nearest is {nearest[0]} (line {there.line}: {there.definition}){alike}")
        words.append("llmgw would go without it" if flag.asked else "the program would refuse to start")
        return "; ".join(words)


def _defined(flag: Passed, defined: Flag) -> Answer:
    if words := _disagreement(flag, defined):
        return Answer(flag=flag, state=State.VALUE, words=words)
    if _DEPRECATED.match(defined.description):
        words = f"its line {defined.line} says: {defined.description}"
        return Answer(flag=flag, state=State.DEPRECATED, words=words)
    return Answer(flag=flag, state=State.DEFINED, words="")


def _disagreement(flag: Passed, defined: Flag) -> str:
    """Why what llmgw writes after the flag is not what it takes; empty where it is."""
    values = sorted(value for value in flag.values if value is not None)
    alone = None in flag.values
    if values and alone:
        # Written one way or the other, as the help says.
        return ""
    if alone and defined.needs_value:
        return f"llmgw passes it alone, and here it needs a value: {flag.name} {defined.metavar}"
    if values and not defined.takes_value:
        return f"llmgw passes it with a value ({values[0]}), and here it takes none"
    strange = [value for value in values if defined.choices and value not in defined.choices]
    if strange:
        return f"llmgw passes {', '.join(strange)}, and here it takes one of {', '.join(defined.choices)}"
    return ""


def _named(answer: Answer) -> str:
    where = f"{answer.flag.program} " if answer.flag.program else ""
    return f"{where}{answer.flag.name}: {answer.words}"


def _likeness(one: str, other: str) -> float:
    """From 0 to 1: by letters, or by words where the order of those has changed; a name that goes on counts most."""
    letters = SequenceMatcher(None, one.strip("-"), other.strip("-"))
    if other.startswith(f"{one}-"):
        return 0.9 + letters.ratio() / 10
    words, others = set(one.strip("-").split("-")), set(other.strip("-").split("-"))
    shared = len(words & others) / len(words | others)
    if letters.quick_ratio() <= max(shared, _ALIKE / 2):
        return shared
    return max(shared, letters.ratio()) * 0.9


def _release(version: str) -> tuple[int, ...] | None:
    """``0.32.0+cpu`` as numbers; None for what is no release."""
    found = _RELEASE.match(version)
    return tuple(int(part) for part in found[0].split(".")) if found else None
