"""Steps as they run: a line for each with its seconds, what they say below it, and what to do about one that failed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import typer

from llmgw.onboarding.course import CourseFailed, Step, run_course

_INDENT = " " * 6


class OnTerminal:
    """Lines that are whole when they are written: they read the same in a terminal and in a log."""

    def begin(self, number: int, of: int, name: str) -> None:
        typer.echo(f"{_head(number, of)} {name}")

    def say(self, words: str) -> None:
        for line in words.splitlines():
            typer.echo(f"{_INDENT}{line}")

    def end(self, name: str, seconds: float, outcome: str) -> None:
        what = f"{outcome}: {name}" if outcome == "taken back" else outcome
        typer.echo(f"{_INDENT}{what}, {seconds:.1f} s")


def dry_run(steps: Sequence[Step]) -> None:
    """What would be done, and what each step can't do without."""
    for number, step in enumerate(steps, 1):
        typer.echo(f"{_head(number, len(steps))} {step.name}")
        if step.needs:
            typer.echo(f"{_INDENT}needs {step.needs}")


def run_shown(steps: Sequence[Step], within: AbstractAsyncContextManager[object] | None = None) -> float:
    """Runs the steps inside of ``within``; the seconds of all. Ends the program with status 1 where one fails."""

    async def run() -> float:
        task = asyncio.current_task()
        assert task is not None
        # As Ctrl-C does: what is half made is taken back before the end.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with within or nullcontext():
            return await run_course(steps, OnTerminal())

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    except CourseFailed as failure:
        typer.echo(f"error: {failure.step}: {failure}", err=True)
        if failure.look:
            typer.echo(f"look with: {failure.look}", err=True)
        for words in failure.left:
            typer.echo(f"left behind: {words}", err=True)
        raise typer.Exit(1) from failure


def _head(number: int, of: int) -> str:
    return f"[{number}/{of}]"
