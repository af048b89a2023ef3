"""Work in steps that are shown with their seconds, may be run again, and are undone where they leave half a thing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Say = Callable[[str], None]


class StepFailed(Exception):
    """A step can't be done: what was seen, and a command that shows more."""

    def __init__(self, seen: str, *, look: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.look = look


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    do: Callable[[Say], Awaitable[None]]
    """Raises StepFailed. What it says is shown below its name."""
    needs: str = ""
    """What it can't do without, for people."""
    check: Callable[[], Awaitable[bool]] | None = None
    """Whether all is as `do` would leave it; asked before."""
    undo: Callable[[], Awaitable[None]] | None = None
    """Takes back what `do` may have made, also half of it, after this step or a later one failed."""
    settles: bool = False
    """Once it has begun, what was made stays: its failure is one to look at, not to take back."""


class Shown(Protocol):
    """Where a course is shown."""

    def begin(self, number: int, of: int, name: str) -> None: ...

    def say(self, words: str) -> None: ...

    def end(self, name: str, seconds: float, outcome: str) -> None:
        """``outcome``: done, there already, failed, taken back."""


class CourseFailed(Exception):
    """``step`` failed; ``str()`` tells what was seen, ``look`` where to look, ``left`` what could not be taken back."""

    def __init__(self, step: str, failure: StepFailed, left: Sequence[str]) -> None:
        super().__init__(failure.seen)
        self.step = step
        self.look = failure.look
        self.left = tuple(left)


async def run_course(steps: Sequence[Step], shown: Shown) -> float:
    """Runs all steps in order; returns the seconds. Raises CourseFailed; a cancellation takes back likewise."""
    began = time.monotonic()
    started: list[Step] = []
    for number, step in enumerate(steps, 1):
        shown.begin(number, len(steps), step.name)
        since = time.monotonic()
        if step.settles:
            started.clear()
        started.append(step)
        try:
            if step.check is not None and await step.check():
                shown.end(step.name, time.monotonic() - since, "there already")
                continue
            await step.do(shown.say)
        except StepFailed as failure:
            shown.end(step.name, time.monotonic() - since, "failed")
            left = await _take_back(started, shown)
            raise CourseFailed(step.name, failure, left) from failure
        except BaseException:
            shown.end(step.name, time.monotonic() - since, "broken off")
            for words in await _take_back(started, shown):
                shown.say(words)
            raise
        shown.end(step.name, time.monotonic() - since, "done")
    return time.monotonic() - began


async def _take_back(started: Sequence[Step], shown: Shown) -> list[str]:
    left = []
    for step in reversed(started):
        if step.undo is None:
            continue
        since = time.monotonic()
        try:
            await step.undo()
            shown.end(step.name, time.monotonic() - since, "taken back")
        except StepFailed as failure:
            left.append(f"{failure.seen}{f' (look with `{failure.look}`)' if failure.look else ''}")
    return left
