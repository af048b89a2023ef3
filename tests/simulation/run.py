"""Runs seeds, on several processes where there are many, and prints what came of them."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from .story import Violation, aloud
from .world import World

STEPS = 1000
FAULTS = ("a fault of llmgw's own", "decisions do not come to rest")
"""How the control plane logs what must never happen, before it goes on."""
STORY_LINES = 100


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    steps: int
    rule: str = ""
    """The invariant that broke; empty: all held."""
    words: str = ""
    story: list[str] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0


def quiet() -> None:
    """What the control planes log is not read by anybody here."""
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)


def _drop(logger: object, name: str, event: MutableMapping[str, Any]) -> str:
    words = str(event.get("event", ""))
    if words.startswith(FAULTS):
        raise Violation("fault", words + "\n" + traceback.format_exc())
    raise structlog.DropEvent


def simulate(seed: int, steps: int = STEPS, *, loud: bool = False) -> Outcome:
    """One seed from its beginning to its end. Never raises for what goes wrong in it."""
    began = time.process_time()
    world = World(seed, aloud=aloud() if loud else None)
    outcome = Outcome(seed, steps)
    try:
        world.run(steps)
    except Violation as violation:
        outcome.rule, outcome.words = violation.rule, str(violation)
    except Exception as error:
        outcome.rule, outcome.words = "crash", f"{type(error).__name__}: {error}"
        outcome.story = traceback.format_exc().splitlines()
    if outcome.rule:
        outcome.story = world.story.last(STORY_LINES) + outcome.story
    outcome.counted = world.checks.counted + Counter(
        {f"requests {how}": count for how, count in world.ended_requests.items()}
    )
    outcome.virtual_s = world.timeline.now
    outcome.cpu_s = time.process_time() - began
    return outcome


def report(outcome: Outcome) -> str:
    return "\n".join(
        (
            *outcome.story,
            "",
            f"seed {outcome.seed}: {outcome.words}",
            f"again: python -m tests.simulation --seed {outcome.seed} --steps {outcome.steps}",
        )
    )


def many(seeds: Iterable[int], steps: int, jobs: int) -> Iterable[Outcome]:
    if jobs == 1:
        for seed in seeds:
            yield simulate(seed, steps)
        return
    with multiprocessing.Pool(jobs, initializer=quiet) as pool:
        yield from pool.imap_unordered(_one, ((seed, steps) for seed in seeds), chunksize=8)


def _one(job: tuple[int, int]) -> Outcome:
    return simulate(*job)


def parse_seeds(text: str) -> Sequence[int]:
    """``123`` is that seed, ``1-100`` a range, both ends included."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else [int(first)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="run this one seed")
    parser.add_argument("--seeds", default="1-100", help="run these: 123, or 1-100 (default)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--story", action="store_true", help="say everything as it happens")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first seed that fails")
    asked = parser.parse_args(arguments)
    quiet()
    seeds = [asked.seed] if asked.seed is not None else parse_seeds(asked.seeds)
    began = time.perf_counter()
    total: Counter[str] = Counter()
    failed: list[Outcome] = []
    done, virtual_s, spent_s = 0, 0.0, 0.0
    outcomes = (
        [simulate(seeds[0], asked.steps, loud=asked.story)] if len(seeds) == 1 else many(seeds, asked.steps, asked.jobs)
    )
    for outcome in outcomes:
        done += 1
        total += outcome.counted
        virtual_s += outcome.virtual_s
        spent_s += outcome.cpu_s
        if outcome.rule:
            failed.append(outcome)
            print(f"seed {outcome.seed}: {outcome.words.splitlines()[0][:200]}", file=sys.stderr, flush=True)
            if not asked.keep_going:
                break
    for outcome in failed[:1]:
        print(report(outcome))
    print(f"\n{done} seeds of {asked.steps} steps, {len(failed)} failed")
    print(f"{virtual_s / 3600:.1f} hours of virtual time in {time.perf_counter() - began:.1f} s")
    print(f"{1000 * spent_s / max(done * asked.steps, 1):.3f} ms of one core a step")
    for name, count in sorted(total.items()):
        print(f"  {count:>9}  {name}")
    if failed:
        print("failed:")
        for each in failed:
            print(f"  {each.seed}: {each.words.splitlines()[0][:200]}")
    return 1 if failed else 0
