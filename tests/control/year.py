"""A year of renewals and kills: ``python -m tests.control.year [--seed 1] [--days 365] [--skip-processes]``.

Twice: twenty nodes and a control plane that forgets at any moment what it had not stored, in this process; then one
node whose both sides are processes that are killed (``tests.control.kills``).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import structlog

from llmgw.link.server import Peer
from llmgw.store.memory import MemoryStore
from tests.control.clock import Time
from tests.control.kills import KilledYear, memory_folder
from tests.control.office import DAY_S, Machine, Office, open_office


class Year:
    """Twenty nodes that renew half way through, and a control plane that dies between any two of their steps."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.store, self.time = MemoryStore(), Time()
        self.nodes: dict[str, Machine] = {}
        self.due: dict[str, float] = {}
        self.lives = 0
        self.renewals = 0

    async def run(self, days: float) -> None:
        end = self.time().wall_s + days * DAY_S
        while self.time().wall_s < end:
            async with open_office(self.folder, store=self.store, time=self.time) as office:
                self.lives += 1
                await self._life(office, end, self.rng.randrange(1, 200))
        await self._check()

    async def _check(self) -> None:
        async with open_office(self.folder, store=self.store, time=self.time) as office:
            for machine in self.nodes.values():
                if not self.is_expired(machine):
                    assert isinstance(office.dial(machine), Peer), machine.name
            assert await office.events("certificate.copied") == []
            assert await office.events("certificate.entered") == []

    async def _life(self, office: Office, end: float, steps: int) -> None:
        """Whatever was not stored by the end of it is forgotten: the store alone goes on."""
        for number in range(20):
            if f"n{number}" not in self.nodes:
                await self._joins(office, f"n{number}")
        for machine in self.nodes.values():
            if not self.is_expired(machine):
                assert isinstance(office.dial(machine), Peer), machine.name
        for _ in range(steps):
            name = min(self.due, key=lambda name: self.due[name])
            if self.due[name] >= end:
                self.time.move(max(0.0, end - self.time().wall_s))
                return
            self.time.move(max(0.0, self.due[name] - self.time().wall_s))
            await self._renews(office, name)

    async def _joins(self, office: Office, name: str) -> None:
        machine = Machine(name, fingerprint=name)
        await office.join(await office.token(name), machine)
        self._took(machine)

    async def _renews(self, office: Office, name: str) -> None:
        old = self.nodes[name]
        fate = self.rng.random()
        if fate < 0.02:
            # Off for days: its certificate expires meanwhile.
            self.due[name] += self.rng.uniform(1.0, 3.0) * DAY_S
            return
        new = await (office.recover(old) if self.is_expired(old) else office.renew(old))
        if fate < 0.10:
            self.due[name] = self.time().wall_s + 5.0  # the answer was lost: tried again
            return
        self.renewals += 1
        self._took(new)
        if fate < 0.20:
            return  # killed before it dialled in with it; it will, once it is up again
        assert isinstance(office.dial(new), Peer), name

    def is_expired(self, machine: Machine) -> bool:
        return machine.identity.not_after.timestamp() <= self.time().wall_s

    def _took(self, machine: Machine) -> None:
        self.nodes[machine.name] = machine
        self.due[machine.name] = self.time().wall_s + self.rng.uniform(0.45, 0.60) * DAY_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=365.0)
    parser.add_argument("--skip-processes", action="store_true", help="only what runs in this process, within a minute")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        year = Year(Path(folder), given.seed)
        asyncio.run(year.run(given.days))
    print(
        f"seed {given.seed}, {given.days:g} days, 20 nodes: {year.renewals} renewals, {year.lives - 1} kills of the "
        f"control plane, nobody was locked out; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    if not given.skip_processes:
        processes(given.seed, given.days)


def processes(seed: int, days: float) -> None:
    began = time.monotonic()
    with memory_folder() as folder:
        year = KilledYear(folder, seed)
        month = 0

        def tell(day: float) -> None:
            nonlocal month
            if day >= 30.0 * (month + 1):
                month = int(day // 30)
                print(f"  day {day:.0f}: {year.renewals} renewals, {year.killed.total()} kills", flush=True)

        year.run(days, tell)
    kills = ", ".join(f"{count} at `{step}`" for step, count in sorted(year.killed.items()))
    print(
        f"seed {seed}, {days:g} days, 1 node: {year.renewals} renewals, {year.recoveries} answers to proofs of an "
        f"expired key, {year.killed.total()} kills ({kills}), it was never locked out; {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
