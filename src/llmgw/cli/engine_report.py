"""What ``llmgw ctl engine-check`` finds out, and how it is shown."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llmgw.cli import engine_program, tables
from llmgw.cli.admin import complain
from llmgw.cli.engine_program import Found, NotChecked
from llmgw.cli.rows import Column, console, fact, print_rows
from llmgw.engines.base import Engine
from llmgw.engines.check import Answer, Report, State, check
from llmgw.engines.registry import ENGINES
from llmgw.engines.widest import widest

DIFFERS = 1
COULD_NOT_CHECK = 2

_STYLES = {
    State.MISSING: "red",
    State.REMOVED: "red",
    State.VALUE: "red",
    State.UNSEEN: "yellow",
    State.DEPRECATED: "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where the help came from."""

    help_text: str
    words: str
    found: Found | None = None
    version: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    """Helps of other programs of the engine."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why other programs, which are there, gave none."""
    remarks: tuple[str, ...] = ()


def run_check(
    name: str, *, bin: Path | None, help_output: str | None, help_file: Path | None, config: Path | None, as_json: bool
) -> int:
    """Prints what was found out. Returns the exit status."""
    try:
        engine = _engine(name)
        source = _given(help_output, help_file, bin) or asyncio.run(_asked(engine, bin, config))
    except NotChecked as error:
        complain(str(error))
        return COULD_NOT_CHECK
    report = check(engine, source.help_text, version=source.version, others=source.others)
    if as_json:
        tables.print_json(_json(report, source))
    else:
        _show(console(), report, source)
    return _status(report)


def _engine(name: str) -> Engine:
    if name == "sim":
        raise NotChecked("sim is a part of llmgw itself: there is nothing to check")
    if name not in ENGINES:
        *others, last = (known for known in ENGINES if known != "sim")
        raise NotChecked(f"{name} is no engine that llmgw knows: name {', '.join(others)} or {last}")
    return ENGINES[name]


def _status(report: Report) -> int:
    if report.faults:
        return DIFFERS
    return COULD_NOT_CHECK if report.unseen else 0


# -- where the help comes from


def _given(text: str | None, file: Path | None, bin: Path | None) -> _Source | None:
    """The help that is among the options; None: a program is to be asked for it."""
    if text is not None and file is not None:
        raise NotChecked("--help-output and --help-file both give a help: leave one of them out")
    of = f", said to be of {bin}" if bin is not None else ""
    if text is not None:
        return _Source(help_text=text, words=f"as given (--help-output){of}")
    if file is None:
        return None
    name = "stdin" if str(file) == "-" else str(file)
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise NotChecked(f"{name}: {error.strerror or error}") from None
    return _Source(help_text=content.decode("utf-8", "replace"), words=f"from {name}{of}")


async def _asked(engine: Engine, bin: Path | None, config: Path | None) -> _Source:
    found = await asyncio.to_thread(engine_program.find, engine.name, bin, config)
    said = await engine_program.ask(engine, found)
    others: dict[str, str] = {}
    silent: dict[str, str] = {}
    for program in dict.fromkeys(flag.program for flag in widest(engine, said.version) if flag.program):
        try:
            help_text = await engine_program.ask_other(engine, found, program)
        except NotChecked as error:
            silent[program] = str(error)
            continue
        if help_text is not None:
            others[program] = help_text
    return _Source(
        help_text=said.help_text,
        words=found.how,
        found=found,
        version=said.version,
        others=others,
        silent=silent,
        remarks=(*found.remarks, *said.remarks),
    )


# -- what is shown


def _show(out: Console, report: Report, source: _Source) -> None:
    fact(out, "engine", Text.assemble((f"{report.engine} {report.version}".rstrip(), "bold")))
    if source.found is not None:
        fact(out, "program", " ".join(source.found.argv))
    fact(out, "chosen" if source.found is not None else "help", source.words)
    for looked in report.looked:
        what = f"{looked.program}: " if looked.program else ""
        fact(out, "read", f"{what}{looked.lines} lines, which define {_counted(looked.flags, 'flag')}")
    fact(out, "checked", _tally(report))
    for warning in _warnings(report, source):
        fact(out, "warning", Text(warning, "yellow"))
    rows = [_row(answer) for answer in report.answers if answer.state is not State.DEFINED]
    if rows:
        out.print()
        columns = [Column("FLAG"), Column("STATE"), Column("PASSED", gives_way=1)]
        print_rows(out, columns, "WHAT THE HELP SAYS", rows)
    out.print()
    fact(out, "", _verdict(report), indent=0)


def _row(answer: Answer) -> tuple[Text | str, ...]:
    return (
        _name(answer),
        Text(answer.state, _STYLES.get(answer.state, "")),
        answer.flag.when or "always",
        answer.words,
    )


def _name(answer: Answer) -> str:
    return f"{answer.flag.program} {answer.flag.name}".lstrip()


def _tally(report: Report) -> str:
    """``22 flags: 20 defined, 2 missing``."""
    counts = Counter(answer.state for answer in report.answers)
    states = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{_counted(len(report.answers), 'flag')} that llmgw can pass: {', '.join(states)}"


def _warnings(report: Report, source: _Source) -> list[str]:
    warnings = []
    for looked in report.looked:
        if looked.cut_short is not None:
            whose = f"the help of {looked.program}" if looked.program else "the help"
            warnings.append(f"{whose} may be cut off: {looked.cut_short}")
    unread: dict[str, list[str]] = {}
    for program in report.unread:
        if program not in source.silent:
            unread.setdefault(_why_unread(program, source.found), []).append(program)
    warnings += [f"not checked: {' and '.join(programs)}: {why}" for why, programs in unread.items()]
    warnings += [f"not checked: {program}: {why}" for program, why in source.silent.items()]
    return [*warnings, *source.remarks]


def _why_unread(program: str, found: Found | None) -> str:
    if found is None:
        return "no help of that was given"
    name = program.split()[0]
    if name == "ray":
        return f"there is no ray beside {found.path}, and engines.vllm.ray_bin in the agent's file names none that runs"
    return f"there is no {name} beside {found.path}, so replicas over several nodes are refused"


def _verdict(report: Report) -> Text:
    faults, unseen = report.faults, report.unseen
    if faults:
        names = ", ".join(_name(answer) for answer in faults)
        return Text(f"This build does not fit: {names}. Stay with the one before, or take another llmgw.", "red")
    if unseen:
        words = f"{_counted(len(unseen), 'flag')} could not be looked up: give the whole help, or --bin PATH."
        return Text(words, "yellow")
    return Text("This build fits: whatever llmgw can pass to it is there, or llmgw knows how to do without.", "green")


def _json(report: Report, source: _Source) -> dict[str, Any]:
    found = source.found
    return {
        "engine": report.engine,
        "version": report.version or None,
        "program": list(found.argv) if found is not None else None,
        "chosen": source.words,
        "ok": report.ok,
        "exit_status": _status(report),
        "helps": [
            {
                "program": looked.program or report.engine,
                "lines": looked.lines,
                "flags": looked.flags,
                "cut_short": looked.cut_short,
            }
            for looked in report.looked
        ],
        "flags": [
            {
                "program": answer.flag.program or report.engine,
                "flag": answer.flag.name,
                "passed": answer.flag.when or "always",
                "state": answer.state.value,
                "words": answer.words,
                "nearest": list(answer.nearest),
            }
            for answer in report.answers
        ],
        "warnings": _warnings(report, source),
    }


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"
