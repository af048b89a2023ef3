"""SQLite against memory: whatever is done to both, they say the same."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmgw.store.base import Change, Saved, Store, StoreError
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore
from tests.exploring import examples

from .leading import lead
from .samples import certificate, drain, engine, event, key, node, replica, token

R = TypeVar("R")

ids = st.sampled_from(["a", "b", "c"])
numbers = st.integers(min_value=0, max_value=30)
bounds = {"events_kept": 12, "prune_every": 1}


class SqliteAgainstMemory(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="llmgw-store-"))
        self.memory = MemoryStore(**bounds)
        self.sqlite = self.runner.run(SqliteStore.open(self.directory / "llmgw.db", **bounds))
        self.epochs: list[tuple[int, int]] = []

    def teardown(self) -> None:
        self.runner.run(self.sqlite.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    def both(self, call: Callable[[Store, int], Awaitable[R]], epochs: tuple[int, int] = (0, 0)) -> R | str:
        """The outcome of a call, which must be the same: a value, or the kind of error."""

        async def outcome(store: Store, epoch: int) -> R | str:
            try:
                return await call(store, epoch)
            except StoreError as error:
                return type(error).__name__

        first = self.runner.run(outcome(self.memory, epochs[0]))
        second = self.runner.run(outcome(self.sqlite, epochs[1]))
        assert first == second
        return first

    def some_epoch(self, age: int) -> tuple[int, int]:
        return self.epochs[-1 - age] if age < len(self.epochs) else (0, 0)

    @rule(holder=ids)
    def lead(self, holder: str) -> None:
        self.epochs.append((self.runner.run(lead(self.memory, holder)), self.runner.run(lead(self.sqlite, holder))))

    @rule(holder=ids, lease_s=st.sampled_from([0.0, 1000.0]), alone=st.booleans())
    def try_to_lead(self, holder: str, lease_s: float, alone: bool) -> None:
        first = self.runner.run(self.memory.lead(holder, lease_s=lease_s, alone=alone))
        second = self.runner.run(self.sqlite.lead(holder, lease_s=lease_s, alone=alone))
        if first is None or second is None:
            assert first is second
            return
        assert replace(first, epoch=0) == replace(second, epoch=0)
        self.epochs.append((first.epoch, second.epoch))

    @rule(age=st.sampled_from([0, 0, 1]), lease_s=st.sampled_from([0.0, 1000.0]))
    def renew(self, age: int, lease_s: float) -> None:
        self.both(lambda store, epoch: store.renew(epoch, lease_s), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]))
    def resign(self, age: int) -> None:
        self.both(lambda store, epoch: store.resign(epoch), self.some_epoch(age))

    @rule(
        age=st.sampled_from([0, 0, 0, 1]),
        nodes=st.lists(st.builds(node, ids, since=numbers.map(float)), max_size=2),
        gone=st.lists(ids, max_size=1),
        replicas=st.lists(st.builds(replica, ids, generation=numbers), max_size=2),
        removed=st.lists(ids, max_size=1),
        drains=st.lists(st.builds(drain, ids, since=numbers.map(float)), max_size=2),
        undrained=st.lists(ids, max_size=1),
        engines=st.lists(st.builds(engine, st.sampled_from(["vllm", "sglang"]), since=numbers.map(float)), max_size=2),
        made=st.dictionaries(ids, numbers, max_size=2),
        events=st.lists(st.builds(event, numbers, ids), max_size=4, unique_by=lambda event: event.id),
    )
    def commit(
        self,
        age: int,
        nodes: list,
        gone: list,
        replicas: list,
        removed: list,
        drains: list,
        undrained: list,
        engines: list,
        made: dict,
        events: list,
    ) -> None:  # type: ignore[type-arg]
        change = Change(
            nodes=nodes,
            removed_nodes=gone,
            replicas=replicas,
            removed_replicas=removed,
            drains=drains,
            removed_drains=undrained,
            engines=engines,
            replicas_made=made,
            events=events,
        )
        self.both(lambda store, epoch: store.commit(epoch, change), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]), model=ids, replicas=st.none() | numbers, base=numbers)
    def set_scale(self, age: int, model: str, replicas: int | None, base: int) -> None:
        self.both(lambda store, epoch: store.set_scale(epoch, model, replicas, base), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]), id=ids, revoked_at=st.none() | numbers.map(float))
    def put_key(self, age: int, id: str, revoked_at: float | None) -> None:
        self.both(lambda store, epoch: store.put_key(epoch, key(id, revoked_at=revoked_at)), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]), serial=ids, node=ids)
    def enter_serial(self, age: int, serial: str, node: str) -> None:
        self.both(
            lambda store, epoch: store.commit(epoch, Change(certificates=[certificate(serial, node)])),
            self.some_epoch(age),
        )

    @rule(age=st.sampled_from([0, 0, 1]), id=ids, used=st.sampled_from(["", "k", "l"]), gone=st.booleans())
    def put_token(self, age: int, id: str, used: str, gone: bool) -> None:
        change = Change(tokens=[token(id, used_key=used)], removed_tokens=[id] if gone else [])
        self.both(lambda store, epoch: store.commit(epoch, change), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]), id=ids, key=st.sampled_from(["k", "l"]))
    def claim_token(self, age: int, id: str, key: str) -> None:
        change = Change(certificates=[certificate(id + key, "n")])
        claim = token(id, used_key=key)
        self.both(lambda store, epoch: store.claim_token(epoch, claim, change), self.some_epoch(age))

    @rule(age=st.sampled_from([0, 0, 1]), token_hash=ids)
    def set_admin_token(self, age: int, token_hash: str) -> None:
        self.both(lambda store, epoch: store.set_admin_token(epoch, token_hash), self.some_epoch(age))

    @rule(after=st.none() | numbers.map(lambda n: event(n).id), subject=st.none() | ids, limit=st.integers(-1, 8))
    def events(self, after: str | None, subject: str | None, limit: int) -> None:
        self.both(lambda store, _: store.events(after=after, subject=subject, limit=limit))

    @precondition(lambda self: self.epochs)
    @rule()
    def restart(self) -> None:
        """Memory would forget: it stays open."""
        self.runner.run(self.sqlite.close())
        self.sqlite = self.runner.run(SqliteStore.open(self.directory / "llmgw.db", **bounds))

    @invariant()
    def they_say_the_same(self) -> None:
        async def saved(store: Store) -> Saved:
            return replace(await store.load(), secret="")

        self.both(lambda store, _: saved(store))


TestSqliteAgainstMemory = SqliteAgainstMemory.TestCase
TestSqliteAgainstMemory.settings = settings(max_examples=examples(15), stateful_step_count=20, deadline=None)
