"""The agent's process: puts its rooms together and runs until it is told to stop. Engines outlive it."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import structlog

from llmgw.agent.converge import Converge
from llmgw.agent.discovery import (
    DiscoveryRefused,
    boot_id,
    discover,
    links_changed,
    machine_fingerprint,
    read_vitals,
    settings_of,
)
from llmgw.agent.exposure import Exposure
from llmgw.agent.gpus import GpuMemory
from llmgw.agent.identity import IdentityStore
from llmgw.agent.install import Installer
from llmgw.agent.logs import LogReader
from llmgw.agent.memory import ShardMemory
from llmgw.agent.notify import Notify, pulse, standing
from llmgw.agent.presence import Rooms
from llmgw.agent.probe import EngineClient
from llmgw.agent.renewal import Renewal
from llmgw.agent.supervisor import Supervisor, SupervisorError
from llmgw.agent.supervisor.engine_user import ENGINE_USER
from llmgw.agent.weights import WeightStore
from llmgw.cluster.model import EngineOnNode, Inventory, Vitals
from llmgw.config import AgentConfig
from llmgw.link.client import ClientIdentity, LinkClient, LinkError
from llmgw.link.course import Delivered
from llmgw.link.messages import Desired, Hello, LogsCancel, LogsRequest, Observed, Renew, Welcome
from llmgw.pki.names import IdentityError, PkiError
from llmgw.version import VERSION

log = structlog.get_logger()

REDISCOVER_S = 60.0
LOOK_AT_LINKS_S = 5.0
"""A port that goes down, or an address that changes, ends replicas over several nodes: told sooner than the rest."""
REPROVE_S = 600.0
FIRST_LOOK_S = 5.0
"""How long the start waits for the weights to be looked at; what is found later is said later."""
LINK_STUCK_S = 60.0
"""A stream whose thread has stood still for this long stands still for good: the agent ends, and is begun anew."""
IDENTITY = "identity"
"""In the work directory: where certificates are kept that the agent renews."""

T = TypeVar("T")


class AgentRefused(Exception):
    """The agent can't start; the message says why and what to do."""


class Agent:
    """Everything here runs on the agent's own loop; the stream has a loop and a thread of its own."""

    def __init__(self, config: AgentConfig, inventory: Inventory, notify: Notify | None = None) -> None:
        self._config = config
        self._notify = notify or Notify()
        self._loop = asyncio.get_running_loop()
        self._inventory = inventory
        self._engines: tuple[EngineOnNode, ...] = ()
        self._probed = False
        self._engines_changed = asyncio.Event()
        self._dirty = asyncio.Event()
        self._news = asyncio.Event()
        self._held: tuple[str, ...] = ()
        self._vitals: Vitals | None = None
        self._instance = secrets.token_hex(4)
        self._said: Observed | None = None
        self.id = config.node_id or socket.gethostname()
        work_dir = config.supervisor.work_dir
        user = ENGINE_USER if os.geteuid() == 0 else None
        self.supervisor = Supervisor(
            work_dir=work_dir,
            log_lines=config.supervisor.log_lines,
            stop_timeout_s=config.supervisor.stop_timeout_s,
            engine_user=user,
        )
        self.installer = Installer(
            engines_dir=config.engines_dir,
            cache_dir=work_dir / "cache",
            named=config.engines.programs,
            inventory=lambda: self._inventory,
            report=self._engines_said,
            builds=config.engines.builds,
            user=lambda: self.supervisor.user,
        )
        self.weights = WeightStore(
            weights_dir=config.weights_dir, model_dirs=config.model_dirs, report=self._weights_held
        )
        self.client = EngineClient()
        self._memory = ShardMemory(work_dir / "wanted")
        self.exposure = Exposure(node_id=self.id, memory=work_dir / "gateways.json", changed=self._dirty.set)
        rooms = Rooms(
            supervisor=self.supervisor,
            installer=self.installer,
            weights=self.weights,
            client=self.client,
            memory=self._memory,
            exposure=self.exposure,
            host=lambda: self._inventory.mgmt_addr,
            health_interval_s=config.supervisor.health_interval_s,
            engines_changed=lambda: self._engines_changed,
            inventory=lambda: self._inventory,
            gpu_memory=GpuMemory(config.discovery.nvidia_smi),
            sidecar_programs=_sidecar_programs(config),
        )
        self.converge = Converge(rooms, self._dirty.set)
        files = ClientIdentity(ca=config.tls.ca, cert=config.tls.cert, key=config.tls.key)
        self.link = LinkClient(
            role="node",
            id=self.id,
            servers=config.servers,
            tls=files,
            hello=lambda: self._on_loop(self._hello),
            vitals=lambda: self._vitals,
            on_frame=lambda frame: self._hop(lambda: self._take(frame)),
            on_state=lambda state: self._hop(self._news.set),
            heartbeat_s=config.heartbeat_interval_s,
            reconnect_base_s=config.reconnect_base_s,
            reconnect_max_s=config.reconnect_max_s,
        )
        self.renewal = Renewal(
            store=IdentityStore(work_dir / IDENTITY),
            files=files,
            servers=self._servers,
            renewed=self.link.redial,
            changed=self._dirty.set,
            cut_off=lambda: not self.link.state.connected,
        )
        self._logs = LogReader(self.supervisor, self.link.send, lambda: self.link.waiting)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``. Raises LinkError where the stream's thread hangs: nothing but a new process helps then."""
        try:
            await self._adopt()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    # The certificate too: one that expired while the machine was off is made good before it is shown.
                    await asyncio.gather(self._look_at_vitals(), self._look_for_weights(), self.renewal.look())
            self.link.start()
            # Now, and not once it is connected: a control plane that is away keeps no service from having started.
            self._notify.ready(self._standing())
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.converge.run()),
                    group.create_task(self.installer.run()),
                    group.create_task(self.exposure.run()),
                    group.create_task(self.renewal.run()),
                    group.create_task(self._report()),
                    group.create_task(pulse(self._notify, self.link.stuck_s, self._standing, self._news)),
                    group.create_task(_every(REPROVE_S, self._probe_engines, at_once=True)),
                    group.create_task(_every(REDISCOVER_S, self._look_again)),
                    group.create_task(_every(LOOK_AT_LINKS_S, self._look_at_links)),
                    group.create_task(_every(REDISCOVER_S, self._look_for_weights)),
                    group.create_task(_every(self._config.heartbeat_interval_s, self._look_at_vitals)),
                ]
                stopped = group.create_task(stop.wait())
                hangs = group.create_task(self._link_hangs())
                await asyncio.wait([stopped, hangs], return_when=asyncio.FIRST_COMPLETED)
                words = hangs.result() if hangs.done() else ""
                self._notify.stopping(words or "ends; its engines go on")
                for task in (*tasks, stopped, hangs):
                    task.cancel()
            if words:
                raise LinkError(words)
        finally:
            await asyncio.to_thread(self.link.stop)
            await self._logs.close()
            await self.converge.close()
            await self.supervisor.close()
            await self.client.close()

    async def _adopt(self) -> None:
        running = await self.supervisor.adopt()
        self.converge.adopt(running, self.supervisor.ended(), self._memory.all())
        for run in running:
            log.info("engine adopted", shard=run.shard_id, generation=run.generation, pid=run.pid)

    # -- what the control plane says

    def _take(self, frame: Delivered) -> None:
        match frame:
            case Welcome():
                self._said = None
                self._logs.drop_all()  # whoever asked for them has gone, or asks anew
                self._dirty.set()
            case Desired():
                self.converge.take(frame)
            case LogsRequest() | LogsCancel():
                self._logs.take(frame)
            case Renew():
                self.renewal.ask()

    def _servers(self) -> tuple[str, ...]:
        """The one that leads comes first, if one is known to."""
        here = self.link.state.server
        return (here, *(server for server in self._config.servers if server != here)) if here else self._config.servers

    # -- what it is told

    def _hello(self) -> Hello:
        self.converge.begin_session()
        return Hello(
            role="node",
            id=self.id,
            version=VERSION,
            fingerprint=machine_fingerprint(Path("/")),
            boot_id=boot_id(Path("/")),
            instance=self._instance,
            inventory=self._now_inventory(),
            vitals=self._vitals,
            probed=self._probed,
            engines=self._engines,
            shards=self.converge.shards(),
            weights=self._held,
        )

    def _now_inventory(self) -> Inventory:
        own = (*self.supervisor.warnings(), *self.exposure.warnings(), *self.renewal.warnings())
        return replace(self._inventory, warnings=(*self._inventory.warnings, *own))

    async def _report(self) -> None:
        """Says what changed, at once, and never more often than people can read."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._news.set()
            now = Observed(
                epoch=0,
                session=0,
                revision=self.converge.revision,
                inventory=self._now_inventory(),
                probed=self._probed,
                engines=self._engines,
                shards=self.converge.shards(),
                weights=self._held,
            )
            if now != self._said and self.link.state.connected:
                self.link.send(_what_changed(self._said, now))
                self._said = now
            await asyncio.sleep(0.05)

    def _engines_said(self, engines: tuple[EngineOnNode, ...]) -> None:
        self._engines = engines
        changed, self._engines_changed = self._engines_changed, asyncio.Event()
        changed.set()
        self._dirty.set()

    async def _link_hangs(self) -> str:
        """Returns, in words, once the stream's thread does nothing any more."""
        while True:
            await asyncio.sleep(min(self._config.heartbeat_interval_s, LINK_STUCK_S / 4))
            if (stuck_s := self.link.stuck_s()) > LINK_STUCK_S:
                return (
                    f"the thread of the stream has done nothing for {stuck_s:.0f} s: the agent ends, so that it is "
                    "started anew; its engines go on"
                )

    def _standing(self) -> str:
        link = self.link.state
        return standing(link.connected, link.words, link.since, len(self.converge.shards()))

    # -- what is looked at again

    async def _probe_engines(self) -> None:
        await self.installer.probe()
        self._engines_said(self.installer.states)
        self._probed = True
        self._dirty.set()

    async def _look_again(self) -> None:
        """The machine and its weights may have changed. All is said anew then, in case that something was lost."""
        before = self._inventory
        try:
            self._inventory = await discover(settings_of(self._config), before)
        except DiscoveryRefused as error:
            log.error("this machine changed under its configuration; what was known stays", reason=str(error))
        for field in fields(Inventory):
            old, new = getattr(before, field.name), getattr(self._inventory, field.name)
            if old != new:
                log.info("this machine changed", what=field.name, old=old, new=new)
        self._said = None
        self._dirty.set()

    async def _look_at_links(self) -> None:
        if await links_changed(settings_of(self._config), self._inventory):
            await self._look_again()

    async def _look_for_weights(self) -> None:
        """In a thread: the folders may lie on a file system that does not answer."""
        self._weights_held(await asyncio.to_thread(self.weights.held))

    async def _look_at_vitals(self) -> None:
        """In a thread as well: a node whose disk does not answer still beats, and what it serves goes on serving."""
        vitals = await asyncio.to_thread(read_vitals, self._config.weights_dir)
        self._vitals = replace(vitals, loads=self.converge.loads())

    def _weights_held(self, held: tuple[str, ...]) -> None:
        self._held = held
        self._dirty.set()

    # -- between the stream's thread and this loop

    def _hop(self, act: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(act)

    def _on_loop(self, read: Callable[[], T]) -> T:
        async def on_loop() -> T:
            return read()

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(timeout=30)


async def _every(pause_s: float, look: Callable[[], Awaitable[None]], *, at_once: bool = False) -> None:
    """Looks after every pause. A look that fails is said, and nothing else ends with it."""
    pause = 0.0 if at_once else pause_s
    while True:
        await asyncio.sleep(pause)
        pause = pause_s
        try:
            await look()
        except Exception:
            log.exception("a fault of the agent's own; what was known stays", look=getattr(look, "__name__", ""))


def _what_changed(said: Observed | None, now: Observed) -> Observed:
    """``now`` with None wherever nothing is new: frames stay small."""
    if said is None:
        return now
    return replace(
        now,
        inventory=now.inventory if now.inventory != said.inventory else None,
        probed=now.probed if now.probed != said.probed else None,
        engines=now.engines if now.engines != said.engines else None,
        shards=now.shards if now.shards != said.shards else None,
        weights=now.weights if now.weights != said.weights else None,
    )


def _sidecar_programs(config: AgentConfig) -> dict[str, tuple[str, ...]]:
    ray = config.engines.vllm.ray_bin if config.engines.vllm else None
    return {} if ray is None else {"vllm": (str(ray),)}


async def serve(config: AgentConfig) -> None:
    """Runs an agent until SIGTERM or SIGINT. Raises AgentRefused."""
    # Whoever kills a frozen agent by SIGABRT, as service managers do, finds in its log where each thread stood.
    faulthandler.enable()
    notify = Notify.take_from(os.environ)
    for folder, key in ((config.weights_dir, "weights_dir"), (config.supervisor.work_dir, "supervisor.work_dir")):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AgentRefused(
                f"{key}: {folder} can't be made: {error.strerror}; name another in the agent's file"
            ) from error
    await _settle(config)
    try:
        inventory = await discover(settings_of(config))
    except DiscoveryRefused as error:
        raise AgentRefused(str(error)) from error
    for warning in inventory.warnings:
        log.warning(warning)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await Agent(config, inventory, notify).run(stop)
    except IdentityError as error:
        gone = isinstance(error.__cause__, FileNotFoundError)
        anew = f". Where it is lost: {_new_identity(config)} makes it anew" if gone else ""
        raise AgentRefused(f"{error}{anew}") from error
    except (LinkError, SupervisorError) as error:
        raise AgentRefused(str(error)) from error


async def _settle(config: AgentConfig) -> None:
    """Whatever stopped the agent before: the newest certificate that is whole is the one that it starts with."""
    try:
        await asyncio.to_thread(IdentityStore(config.supervisor.work_dir / IDENTITY).settle)
    except PkiError as error:
        log.warning("the certificates that are kept here can't be put in order", why=str(error))


def _new_identity(config: AgentConfig) -> str:
    node = config.node_id or socket.gethostname()
    # A name that a node has is given by no token but one that replaces it; where nobody has it, that is as good.
    return (
        f"`llmgw ctl node token {node} --replace` and then `llmgw agent join` here, or "
        f"`llmgw ctl cert issue-client {node} --force` where the authority is,"
    )
