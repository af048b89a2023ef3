"""The control plane's one writer: takes in what peers and operators say, decides, persists, and sends out.

Everything that changes the cluster goes through one queue, so a decision always sees a whole picture and nothing
needs a lock. Readers take ``plane.cluster``, which is immutable. Liveness is judged by the time at which a frame
was received, not by when the queue came to it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from llmgw.cluster.actions import (
    Action,
    CountReplica,
    Note,
    PutDrain,
    PutEngine,
    PutNode,
    PutReplica,
    RemoveDrain,
    RemoveReplica,
)
from llmgw.cluster.catalog import Catalog
from llmgw.cluster.engines import told_versions, with_file
from llmgw.cluster.model import Cluster, Gateway, Instant, Node
from llmgw.cluster.news import now_qualifies
from llmgw.cluster.reconcile import apply, next_wake_s, reconcile
from llmgw.control.book import Book, Unsaved
from llmgw.control.clock import Clock, system_clock
from llmgw.control.fold import Folded
from llmgw.control.leadership import Deposed, Leadership
from llmgw.store.base import ApiKey, Change, Event, Fenced, Saved, Store, StoreError
from llmgw.store.codec import encode_key
from llmgw.store.identities import Certificate, Token
from llmgw.store.ulid import Ulids

log = structlog.get_logger()

MAX_ROUNDS = 50
"""Rounds of deciding within one step: one that does not come to rest by then is a fault of ours, and is said."""
TICK_S = 1.0
STALL_S = 3.0
"""A pause of our own beyond this gives every node a fresh grace period: who slept can't judge who was silent."""
RETRY_S = 1.0
GRACE_AFTER_ANOTHER_LEADER_S = 60.0
"""Every node has to find its way to the new leader first."""

T = TypeVar("T")


class NotWritten(StoreError):
    """What was asked is taken up, and is carried out once the store can be written again; the message says why."""


@dataclass(slots=True)
class _Doubtful:
    """Ids of what a failed step may have written all the same: written anew, as they are now, with the next one."""

    nodes: set[str] = field(default_factory=set)
    replicas: set[str] = field(default_factory=set)
    drains: set[str] = field(default_factory=set)
    engines: set[str] = field(default_factory=set)
    scale: set[str] = field(default_factory=set)
    """Models of which an override may have been written. Put right, as the keys are, before anything is decided."""
    keys: dict[str, ApiKey] = field(default_factory=dict)
    """Those that may have been written, as they would be then."""

    def add(self, change: Change) -> None:
        self.nodes |= {node.id for node in change.nodes} | set(change.removed_nodes)
        self.replicas |= {replica.id for replica in change.replicas} | set(change.removed_replicas)
        self.drains |= {drain.node for drain in change.drains} | set(change.removed_drains)
        self.engines |= {history.name for history in change.engines}

    def clear(self) -> None:
        self.nodes.clear()
        self.replicas.clear()
        self.drains.clear()
        self.engines.clear()

    def __bool__(self) -> bool:
        return bool(self.nodes or self.replicas or self.drains or self.engines)


class Plane:
    """Holds the cluster. ``turn`` is its only writer, ``run`` takes turns for ever; ``tell`` and ``ask`` are how
    others reach it. ``leadership`` has the lead already, and is held on to here: before each turn.

    The catalog of ``cluster`` is the file's, and its engines are as they were stored: what the file says otherwise by
    now is taken up here.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        store: Store,
        leadership: Leadership,
        saved: Saved,
        last_event: str | None = None,
        heartbeat_s: float = 5.0,
        clock: Clock = system_clock,
    ) -> None:
        self.epoch = leadership.epoch
        self.store = store
        self.keys: dict[str, ApiKey] = {key.id: key for key in saved.keys}
        self.book = Book(saved)
        """Certificates, tokens and revocations; what changes in it is stored with the next step."""
        self.scale_base = dict(saved.scale_base)
        self.trouble: str | None = None
        """Why nothing can be written just now, for people; None: all is well."""
        self.news = asyncio.Event()
        """Set, and replaced, whenever events were written: wait on the one you read."""
        self.on_settled: list[Callable[[], None]] = []
        """Called after each step that may have changed something to send out."""
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._leadership = leadership
        self._doubtful = _Doubtful()
        self._inbox: deque[Callable[[], Awaitable[None] | None]] = deque()
        self._awake = asyncio.Event()
        self._lasting: set[str] = set()
        self._notes: list[Note] = []
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._known = cluster.nodes
        """Nodes as they were last stored: what a change is compared with."""
        self._ulids = Ulids(lambda: clock().wall_s, os.urandom, after=last_event)
        self._last_beat_s = now_s = clock().monotonic_s
        grace_s = self._grace_s(cluster)
        if leadership.lead.taken_over:
            grace_s = max(grace_s, GRACE_AFTER_ANOTHER_LEADER_S)
        self.cluster = replace(cluster, grace_until_s=now_s + grace_s, tables_settled_at_s=now_s + cluster.lease_s)
        self._follow(cluster.catalog)
        told = told_versions(self.cluster)
        self.cluster = replace(self.cluster, replicas={**self.cluster.replicas, **told})
        self._doubtful.replicas |= told.keys()

    # -- how others reach it

    def tell(self, act: Callable[[], Awaitable[None] | None], *, soon: bool = True) -> None:
        """Have the writer do this before it next decides; ``soon=False``: at its next tick will do."""
        self._inbox.append(act)
        if soon:
            self._awake.set()

    async def ask(self, act: Callable[[], Awaitable[T]]) -> T:
        """Have the writer do this, and wait until what follows from it is decided and stored."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def answer() -> None:
            try:
                result = await act()
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
                if isinstance(error, Fenced):
                    raise
                if isinstance(error, StoreError):
                    # Something to write, so that the trouble is shown for as long as it lasts; however often they ask.
                    refused = Note("store.refused", "", f"what an operator asked for could not be stored: {error}")
                    if refused not in self._notes:
                        self._notes.append(refused)
            else:
                self._answers.append((done, result))

        self.tell(answer)
        return await done

    def now(self) -> Instant:
        return self._clock()

    # -- what acts may do, on the writer

    def take(self, folded: Folded) -> None:
        """Take up a node as a peer's frame left it."""
        self.cluster = replace(self.cluster, nodes={**self.cluster.nodes, folded.node.id: folded.node})
        self._notes += folded.notes
        if folded.lasting:
            self._lasting.add(folded.node.id)

    def put_nodes(self, nodes: Iterable[Node]) -> None:
        """Take up nodes in which nothing changed that the store must know."""
        self.cluster = replace(self.cluster, nodes={**self.cluster.nodes, **{node.id: node for node in nodes}})

    def put_gateway(self, gateway: Gateway) -> None:
        self.cluster = replace(self.cluster, gateways={**self.cluster.gateways, gateway.id: gateway})

    def forget_gateways(self, gone: Iterable[str]) -> None:
        left = {name: gateway for name, gateway in self.cluster.gateways.items() if name not in set(gone)}
        self.cluster = replace(self.cluster, gateways=left)

    def note(self, kind: str, subject: str, words: str) -> None:
        self._notes.append(Note(kind, subject, words))

    async def claim_token(self, token: Token, certificates: Sequence[Certificate]) -> bool:
        """Store at once that ``token`` is used for ``token.used_key``, and what it was used for. False: by another
        key already, and nothing was written. What follows from it is noted, and written with the next step."""
        if not await self.store.claim_token(self.epoch, token, Change(certificates=certificates)):
            return False
        self.book.stored((token, *certificates))
        return True

    def take_catalog(
        self,
        catalog: Catalog,
        *,
        suspect_after_s: float,
        lost_after_s: float,
        in_flight_s: float,
        heartbeat_s: float = 5.0,
    ) -> None:
        if heartbeat_s != self._heartbeat_s:
            # Nodes have kept to the slower beat so far: nobody is judged by the quicker one before they know of it.
            patience_s = self._grace_s(self.cluster)
            self._heartbeat_s = heartbeat_s
            grace = self.now().monotonic_s + patience_s
            self.cluster = replace(self.cluster, grace_until_s=max(grace, self.cluster.grace_until_s))
        self.cluster = replace(
            self.cluster,
            suspect_after_s=suspect_after_s,
            lost_after_s=lost_after_s,
            in_flight_s=in_flight_s,
        )
        self._follow(catalog)

    def _follow(self, catalog: Catalog) -> None:
        """Go by the file's catalog; what of its engines is new is written with the next step."""
        self.cluster, actions = with_file(self.cluster, catalog, self.now())
        for action in actions:
            match action:
                case PutEngine(history):
                    self._doubtful.engines.add(history.name)
                case Note():
                    self._notes.append(action)
                case _:
                    raise AssertionError(f"a file changes engines alone: {action}")

    async def carry_out(self, actions: Sequence[Action]) -> None:
        """Store what an operator asked for, then take it up; what follows from it is decided in the same turn."""
        await self._commit(tuple(actions))

    async def remove_node(self, node_id: str, words: str) -> None:
        """Forget a node, and that it was to be drained. If it comes back, it is a new one."""
        drained = [RemoveDrain(node_id)] if node_id in self.cluster.drains else []
        await self._commit((*drained, Note("node.removed", node_id, words)), removed_node=node_id)

    async def set_scale(self, model: str, replicas: int | None) -> None:
        spec = self.cluster.catalog.model(model)
        base = spec.replicas if spec else 0
        try:
            await self.store.set_scale(self.epoch, model, replicas, base)
        except StoreError:
            self._doubtful.scale.add(model)
            raise
        scale = {name: count for name, count in self.cluster.scale.items() if name != model}
        self.scale_base.pop(model, None)
        if replicas is not None:
            scale[model] = replicas
            self.scale_base[model] = base
        self.cluster = replace(self.cluster, scale=scale)

    async def put_key(self, key: ApiKey) -> None:
        encode_key(key)  # What can't be written at all is refused here, and not tried again.
        try:
            await self.store.put_key(self.epoch, key)
        except StoreError:
            self._doubtful.keys[key.id] = key
            raise
        self.keys = {**self.keys, key.id: key}

    def halt(self) -> None:
        self.cluster = replace(self.cluster, halting=True)

    # -- the loop

    async def run(self) -> None:
        """Runs until cancelled. Raises Deposed where this control plane leads no more."""
        while True:
            await self.turn()
            if self.trouble is not None:
                await asyncio.sleep(RETRY_S)  # Whatever is told meanwhile: a store that fails must not be hammered.
            else:
                await self._wait(self.rest_s())

    async def turn(self) -> None:
        """Once: take in what was told, decide, store, answer, send out. Raises Deposed.

        Where it can't be done, ``trouble`` says why: the next turn is due RETRY_S later, and takes it up again.
        """
        try:
            await self._hold()
            await self._take_in()
            await self._end_overrides()
            await self._step()
        except Fenced as error:
            raise Deposed("another control plane has taken the lead; this one stops and changes nothing") from error
        except Deposed:
            raise
        except StoreError as error:
            self._say_trouble(f"the store can't be written, so nothing new starts and what runs goes on: {error}")
            self._answer_not_written(error)
            return
        except Exception as error:
            # What serves must not depend on a decision that fails: said, and tried again.
            if self._say_trouble(f"a fault of llmgw's own keeps it from deciding: {error!r}; see its log"):
                log.exception("a fault of llmgw's own")
            self._answer_not_written(error)
            return
        self._say_trouble(None)
        self._answer()
        self._send_out()

    async def _hold(self) -> None:
        """Hold on to the lead, and put right what may have been written though it was refused.

        Nothing is decided where the store fails at that; but peers are heard, and who asks is answered, however long
        it lasts.
        """
        try:
            await self._leadership.hold()
            await self._put_right()
        except Fenced:
            raise
        except StoreError:
            await self._take_in()
            raise

    def rest_s(self) -> float:
        """Seconds until the next turn is due if nothing is told before."""
        if self._inbox and self._awake.is_set():
            return 0.0
        now = self.now()
        wake = next_wake_s(self.cluster, now)
        return TICK_S if wake is None else min(TICK_S, max(0.0, wake - now.monotonic_s))

    def _send_out(self) -> None:
        for send_out in self.on_settled:
            try:
                send_out()
            except Exception:
                # Tried again after the next step. The nodes are heard, and what was decided is kept.
                log.exception("a fault of llmgw's own: not all was sent out")

    async def _put_right(self) -> None:
        """Undo what was refused to an operator and may have been written all the same: only the answer was lost.

        A key that nobody was given is left revoked.
        """
        doubtful = self._doubtful
        for model in sorted(doubtful.scale):
            replicas, base = self.cluster.scale.get(model), self.scale_base.get(model, 0)
            await self.store.set_scale(self.epoch, model, replicas, base)
            doubtful.scale.discard(model)
        for key_id, written in sorted(doubtful.keys.items()):
            key = self.keys.get(key_id) or replace(written, revoked_at=self.now().wall_s)
            await self.store.put_key(self.epoch, key)
            self.keys = {**self.keys, key_id: key}
            del doubtful.keys[key_id]

    async def _take_in(self) -> None:
        self._awake.clear()
        self._beat()
        refused: list[Callable[[], Awaitable[None] | None]] = []
        refusal: StoreError | None = None
        while self._inbox:
            act = self._inbox.popleft()
            try:
                doing = act()
                if doing is not None:
                    await doing
            except Fenced:
                raise
            except StoreError as error:
                # Tried again with the next turn. What came after it must not wait for that: somebody may have asked.
                refused.append(act)
                refusal = refusal or error
            except Exception:
                log.exception("a fault of llmgw's own: one message was not taken up")
        if refusal is not None:
            self._inbox.extendleft(reversed(refused))
            raise refusal

    async def _end_overrides(self) -> None:
        """A scale override ends when the file's own number changes.

        Looked at in every turn, after all that was told: the file may have changed while no control plane ran, and who
        scales right after a reload knows the new number.
        """
        for model in sorted(self.cluster.scale):
            spec = self.cluster.catalog.model(model)
            if spec is not None and spec.replicas == self.scale_base.get(model):
                continue
            await self.set_scale(model, None)
            why = "the file says another number now" if spec is not None else "it is no longer in the file"
            self.note("model.scale", model, f"the override of its replicas ends: {why}")

    async def _step(self) -> None:
        # All of it as of one moment: nobody is listened to while a step is written, however long that takes.
        now = self._beat()
        for _ in range(MAX_ROUNDS):
            before = self.cluster
            actions = reconcile(before, now)
            if not actions and not self._anything_to_write():
                return
            await self._commit(actions)
            if not actions:
                return
        log.error(
            "decisions do not come to rest", rounds=MAX_ROUNDS, actions=[repr(action)[:200] for action in actions]
        )

    async def _commit(self, actions: tuple[Action, ...], removed_node: str | None = None) -> None:
        after = apply(self.cluster, actions)
        if removed_node is not None:
            after = replace(after, nodes={name: node for name, node in after.nodes.items() if name != removed_node})
        notes = [*self._notes, *self._qualifying(after), *(action for action in actions if isinstance(action, Note))]
        taken = self.book.take_unsaved()
        change = self._change(after, actions, notes, removed_node, taken)
        try:
            await self.store.commit(self.epoch, change)
        except StoreError:
            # It may have been written all the same, and only the answer was lost.
            self._doubtful.add(change)
            self.book.put_back(taken)
            raise
        for event in change.events:
            log.info(event.words, kind=event.kind, subject=event.subject)
        self.cluster = after
        self._lasting.clear()
        self._doubtful.clear()
        self._notes.clear()
        self._known = after.nodes
        if notes:
            self.news.set()
            self.news = asyncio.Event()

    def _anything_to_write(self) -> bool:
        return bool(self._notes or self._lasting or self._doubtful or self.book.pending)

    def _qualifying(self, after: Cluster) -> list[Note]:
        before, now = replace(self.cluster, nodes=self._known), self.now()
        return [
            Note("node.qualifies", node_id, words)
            for node_id in sorted(self._lasting)
            for words in now_qualifies(before, after, node_id, now)
        ]

    def _change(
        self,
        after: Cluster,
        actions: Iterable[Action],
        notes: Iterable[Note],
        removed_node: str | None,
        taken: Unsaved,
    ) -> Change:
        """The step as it is stored: all that ``actions`` and peers touched, as it is in ``after``."""
        doubtful, now = self._doubtful, self.now()
        nodes = self._lasting | doubtful.nodes | {action.node.id for action in actions if isinstance(action, PutNode)}
        replicas, drains, engines = set(doubtful.replicas), set(doubtful.drains), set(doubtful.engines)
        for action in actions:
            match action:
                case PutReplica(replica):
                    replicas.add(replica.id)
                case PutDrain(drain):
                    drains.add(drain.node)
                case PutEngine(history):
                    engines.add(history.name)
                case RemoveReplica(name):
                    replicas.add(name)
                case RemoveDrain(name):
                    drains.add(name)
                case _:
                    pass
        if removed_node is not None:
            nodes.add(removed_node)
        events = [
            Event(id=self._ulids.next(), at=now.wall_s, kind=note.kind, subject=note.subject, words=note.words)
            for note in notes
        ]
        return Change(
            nodes=[after.nodes[name] for name in sorted(nodes) if name in after.nodes],
            removed_nodes=[name for name in sorted(nodes) if name not in after.nodes],
            replicas=[after.replicas[name] for name in sorted(replicas) if name in after.replicas],
            removed_replicas=[name for name in sorted(replicas) if name not in after.replicas],
            drains=[after.drains[name] for name in sorted(drains) if name in after.drains],
            removed_drains=[name for name in sorted(drains) if name not in after.drains],
            engines=[after.engines[name] for name in sorted(engines)],
            replicas_made={action.model: action.made for action in actions if isinstance(action, CountReplica)},
            events=events,
            **self.book.written(taken),
        )

    async def _wait(self, rest_s: float) -> None:
        try:
            async with asyncio.timeout(rest_s):
                await self._awake.wait()
        except TimeoutError:
            return

    def _beat(self) -> Instant:
        """What time it is; a pause of our own since it was last asked gives every node a fresh grace period."""
        now = self.now()
        pause, self._last_beat_s = now.monotonic_s - self._last_beat_s, now.monotonic_s
        if pause > TICK_S + STALL_S:
            grace = now.monotonic_s + self._grace_s(self.cluster)
            self.cluster = replace(self.cluster, grace_until_s=max(grace, self.cluster.grace_until_s))
            if all(note.kind != "control.stalled" for note in self._notes):  # once in an outage of the store
                words = f"this control plane paused for {pause:.1f} s: every node gets a fresh grace period"
                self.note("control.stalled", "", words)
        return now

    def _grace_s(self, cluster: Cluster) -> float:
        return max(cluster.lost_after_s, 2 * self._heartbeat_s)

    def _answer(self) -> None:
        for done, result in self._answers:
            if not done.done():
                done.set_result(result)
        self._answers.clear()

    def _answer_not_written(self, error: Exception) -> None:
        for done, _ in self._answers:
            if not done.done():
                done.set_exception(NotWritten(f"it is carried out once the store can be written: {error}"))
        self._answers.clear()

    def _say_trouble(self, words: str | None) -> bool:
        """Logs it where it is new; returns whether it was."""
        if words == self.trouble:
            return False
        if words is None:
            log.info("decisions are carried out again")
        else:
            log.error(words)
        self.trouble = words
        return True
