"""One node's renewals over months, with kill -9 at every step of both sides, on real files and a real database.

The agent's side is killed between any two things that it does to the disk. The control plane is a process for each
request, with the SQLite store of the one before, and is killed at any moment of it: before it has read anything, amid
a transaction, with its answer on the way, or as it ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.agent.identity import RENEWAL, IdentityStore, Pair
from llmgw.control.times import rfc3339
from llmgw.link.joining import RecoverRequest, RenewRequest
from llmgw.link.server import Peer
from llmgw.pki.chain import read_chain
from llmgw.pki.signing_request import pem_of_request, proof_of_key, signing_request
from llmgw.store.sqlite import SqliteStore
from tests.agent.cut_short import killed_at
from tests.control.clock import Time
from tests.control.office import ADDRESS, DAY_S, Machine, Office, make_pki, open_office

NODE = "gpu-1"
TRIES = 100
DISK_STEPS = 60
ANSWER_S = 30.0

Ask = Callable[[Office], Coroutine[Any, Any, dict[str, str]]]


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Thousands of times is much for a disk that has to be waited for each time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


class LockedOut(AssertionError):
    """What must never be was seen."""


class KilledYear:
    """``killed`` counts kills by what was under way; ``kill`` is how likely one is at each step."""

    def __init__(self, folder: Path, seed: int, kill: float = 0.4) -> None:
        self.folder, self.rng, self._kill = folder, random.Random(seed), kill
        self.time = Time()
        self.agent = IdentityStore(folder / "node" / "identity")
        self.killed: Counter[str] = Counter()
        self.renewals = self.recoveries = 0
        self._processes = 0
        self._usual_s = 0.1
        make_pki(folder / "pki", now=self.time().wall_s)

    def run(self, days: float, tell: Callable[[float], object] = lambda day: None) -> None:
        """``tell`` is called after each renewal with the day that it is."""
        self._join()
        begin = self.time().wall_s
        while (day := (self.time().wall_s - begin) / DAY_S) < days:
            tell(day)
            life = self.rng.uniform(0.45, 0.60) if self.rng.random() > 0.02 else self.rng.uniform(1.5, 3.0)
            self.time.move(life * DAY_S)
            self._renewed(self._settled())
        self._in_one_piece(self._check)

    def _join(self) -> None:
        purpose = "token-1"
        machine = Machine(NODE, self.agent.key_for(purpose), fingerprint="machine")

        async def join(office: Office) -> dict[str, str]:
            given = await office.join(await office.token(NODE), machine)
            return {"certificate": given.certificate, "ca": given.ca}

        self._install(self._in_one_piece(join), purpose)
        self._in_one_piece(partial(self._dial, self._settled()))

    # -- the agent

    def _settled(self) -> Pair:
        """What a new process of the agent starts with."""
        self._processes += 1
        pair = self.agent.settle()
        if pair is None:
            raise LockedOut("no pair is whole")
        if rest := [path for path in self.agent.directory.rglob(".*") if path.name != ".lock"]:
            raise LockedOut(f"what was half made lies there still: {rest}")
        return pair

    def _renewed(self, old: Pair) -> None:
        """As often as it takes: the agent comes back after each kill, and tries again soon."""
        for _ in range(TRIES):
            new = self._tried()
            if new is not None and new.serial != old.serial:
                self.renewals += 1
                return
            self.time.move(self.rng.uniform(1.0, 600.0))
        raise LockedOut(f"{TRIES} tries, and it has no new certificate")

    def _tried(self) -> Pair | None:
        """From the start of a process on until it was killed, or is in with what it has got."""
        pair = self._settled()
        if not self._expired(pair) and self._control_plane("hello", partial(self._dial, pair)) is None:
            return None
        purpose = f"{RENEWAL}{pair.serial}"
        if self._agent_killed("key", partial(self.agent.key_for, purpose)):
            return None
        given = self._control_plane("answer", partial(self._ask, pair, purpose))
        if given is None:
            return None
        self.recoveries += self._expired(pair)
        if self._agent_killed("install", partial(self._install, given, purpose)):
            return None
        new = self.agent.current()
        assert new is not None
        return new if self._control_plane("first use", partial(self._dial, new)) is not None else None

    def _agent_killed(self, step: str, act: Callable[[], object]) -> bool:
        if self.rng.random() >= self._kill:
            act()
            return False
        if not killed_at(self.rng.randrange(DISK_STEPS), act):
            return False
        self.killed[step] += 1
        return True

    def _install(self, given: dict[str, str], purpose: str) -> None:
        key = self.agent.key_for(purpose)
        self.agent.install(read_chain(given["certificate"], given["ca"], node=NODE, key=key), key, purpose)

    def _expired(self, pair: Pair) -> bool:
        return pair.not_after.timestamp() <= self.time().wall_s

    # -- what it asks of the control plane, there

    async def _dial(self, pair: Pair, office: Office) -> dict[str, str]:
        machine = Machine(NODE, pair.key, pair.leaf, "machine", f"process-{self._processes}")
        verdict = office.dial(machine)
        if not isinstance(verdict, Peer):
            raise LockedOut(f"{pair.serial} is not let in: {verdict.words}")
        await office.floor.settled()
        return {}

    async def _ask(self, pair: Pair, purpose: str, office: Office) -> dict[str, str]:
        csr = signing_request(self.agent.key_for(purpose), NODE)
        moment = rfc3339(self.time().wall_s)
        if self._expired(pair):
            nonce = office.joining.nonce(pair.serial)
            request = RecoverRequest(
                certificate=pair.leaf.public_bytes(Encoding.PEM).decode(),
                csr=pem_of_request(csr),
                nonce=nonce,
                signature=base64.b64encode(proof_of_key(pair.key, nonce, csr)).decode(),
                time=moment,
            )
            given = await office.joining.recover(request, ADDRESS)
        else:
            identity = Machine(NODE, pair.key, pair.leaf).identity
            given = await office.joining.renew(identity, RenewRequest(csr=pem_of_request(csr), time=moment), ADDRESS)
        return {"certificate": given.certificate, "ca": given.ca}

    async def _check(self, office: Office) -> dict[str, str]:
        for kind in ("certificate.copied", "certificate.entered", "certificate.revoked"):
            if found := await office.events(kind):
                raise LockedOut(f"{kind}: {found}")
        now = self.time().wall_s
        ended = [each for each in office.plane.book.of_node(NODE) if 0 < each.not_after < now - 3 * DAY_S]
        if len(ended) > 2:
            raise LockedOut(f"{len(ended)} certificates that expired days ago are still kept")
        return await self._dial(self._settled(), office)

    # -- the control plane's process

    def _control_plane(self, step: str, ask: Ask) -> dict[str, str] | None:
        """What it answered; None: it was killed before. Raises what it raised."""
        if self.rng.random() >= self._kill:
            return self._in_one_piece(ask)
        answer, was_killed = self._process(ask, self.rng.uniform(0.0, 1.2 * self._usual_s))
        if was_killed:
            self.killed[step if answer is None else f"after {step}"] += 1
        # What was sent by somebody who died may have come, or not.
        return answer if not was_killed or self.rng.random() < 0.5 else None

    def _in_one_piece(self, ask: Ask) -> dict[str, str]:
        began = time.monotonic()
        answer, _ = self._process(ask, None)
        assert answer is not None
        self._usual_s += 0.1 * (time.monotonic() - began - self._usual_s)
        return answer

    def _process(self, ask: Ask, kill_after_s: float | None) -> tuple[dict[str, str] | None, bool]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._live(ask, writing)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], ANSWER_S if kill_after_s is None else kill_after_s)
        if kill_after_s is not None and not ready:
            os.kill(child, signal.SIGKILL)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.readline()
            if kill_after_s is not None and ready:
                os.kill(child, signal.SIGKILL)  # it has answered, and not ended yet
        _, status = os.waitpid(child, 0)
        was_killed = os.WIFSIGNALED(status)
        if not was_killed and os.WEXITSTATUS(status):
            raise LockedOut(said.decode())
        return (json.loads(said) if said.endswith(b"\n") else None), was_killed

    def _live(self, ask: Ask, writing: int) -> None:
        """In the process itself, which does not return."""
        code = 0
        try:
            asyncio.run(self._lives(ask, writing))
        except BaseException:
            code = 3
            os.write(writing, json.dumps(traceback.format_exc()).encode() + b"\n")
        os._exit(code)

    async def _lives(self, ask: Ask, writing: int) -> None:
        store = await SqliteStore.open(self.folder / "state" / "llmgw.db")
        async with open_office(self.folder, store=store, time=self.time) as office:
            answer = await ask(office)
            os.write(writing, json.dumps(answer).encode() + b"\n")
        await store.close()
