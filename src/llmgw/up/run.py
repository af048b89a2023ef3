"""Brings a cluster of one up, watches over it, and takes it down."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgw.agent.discovery import discover, settings_of
from llmgw.client import AdminClient, AdminError, Context, write_context
from llmgw.config import AgentConfig, load_agent, load_server
from llmgw.engines.builds import DEFAULT_ENGINES, build, fits
from llmgw.process.detached import find
from llmgw.process.errors import ProcessError
from llmgw.process.kept import Kept, Program, llmgw_argv
from llmgw.process.ports import port_holder
from llmgw.up import layout
from llmgw.up.layout import Home, Ports, Serve, UpRefused

ADMIN_UP_S = 30.0
POLL_S = 0.2
STOPPED_S = 90.0
PROCESS_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Up:
    """A cluster that is up."""

    endpoint: str
    key: str
    models: tuple[str, ...]
    home: Home
    adopted: bool


@dataclass(slots=True)
class Progress:
    """How far it is, for people: a list of (what, words), told whenever it changes."""

    tell: Callable[[list[tuple[str, str]]], None]
    say: Callable[[str], None]
    last: list[tuple[str, str]] = field(default_factory=list)

    def put(self, rows: list[tuple[str, str]]) -> None:
        if rows != self.last:
            self.last = rows
            self.tell(rows)


class ClusterOfOne:
    def __init__(self, home: Home, serve: Serve, gateway_port: int | None, asked: bool, progress: Progress) -> None:
        self._home = home
        self._serve = serve
        self._gateway_port = gateway_port
        self._asked = asked
        self._progress = progress
        self._known: Context | None = None
        """Where the control plane answers. Kept, so that a file spoilt meanwhile is not in the way of the end."""
        self._started = False
        self._server = self._kept("the control plane", "server", home.server_file)
        self._agent = self._kept("the agent", "agent", home.agent_file)

    async def up(self) -> Up:
        """Returns once a model is ready. Raises UpRefused where it can't get there by waiting."""
        home = self._home
        layout.check_serve(self._serve)
        home.make()
        node = layout.node_name()
        ports = layout.choose_ports(home, self._gateway_port)
        layout.make_identity(home, node)
        ours = layout.write_files(home, ports, self._serve, node, self._asked)
        server, agent = load_server(home.server_file), load_agent(home.agent_file)
        if ours and self._serve.engine == "llamacpp":
            await _check_fit(agent)
        adopted = await self._start(ports)
        client = await self._client(f"http://{server.listen.admin}")
        try:
            key = await self._client_key(client)
            models = tuple(spec.name for spec in server.catalog.models)
            await self._ready(client)
        finally:
            client.close()
        scheme = "https" if server.gateway.tls else "http"
        return Up(f"{scheme}://{server.listen.gateway}/v1", key, models, home, adopted)

    async def watch(self) -> None:
        """Starts again whichever of the processes ends; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._server.keep())
            group.create_task(self._agent.keep())

    async def down(self) -> None:
        """Engines first, then the agent, the gateway, and the control plane."""
        if self._known is not None:
            client = AdminClient(self._known)
            try:
                await asyncio.to_thread(client.post, "halt")
                await self._engines_stopped(client)
            except AdminError as error:
                self._progress.say(f"the control plane could not be asked to stop the engines: {error}")
            finally:
                client.close()
        await self.end_processes()

    async def take_back(self) -> None:
        """After a refusal: ends what this attempt has started, and nothing that ran before."""
        if self._started:
            await self.end_processes()

    async def end_processes(self) -> None:
        """Ends the processes as they are; engines that still run are left running."""
        gateway = self._gateway()
        for kept in (self._agent, self._server, gateway):
            try:
                await kept.stop(PROCESS_STOP_S)
            except ProcessError as error:
                self._progress.say(str(error))

    def engines_left(self) -> list[str]:
        """Engines that still run, for people: what an end at once leaves behind."""
        records = (self._home.root / "agent").glob("**/record.json")
        found = []
        for path in records:
            try:
                handle = find(path.parent)
            except ProcessError:
                continue
            if handle is not None and handle.running():
                found.append(f"{Path(handle.record.argv[0]).name} (pid {handle.pid})")
        return found

    # -- up

    def _kept(self, name: str, command: str, config: Path) -> Kept:
        home = self._home
        program = Program(
            name=name,
            folder=home.run / command,
            argv=llmgw_argv(command, "--config", str(config)),
            env=dict(os.environ),
            log_path=home.logs / f"{command}.log",
        )
        return Kept(program, self._progress.say)

    def _gateway(self) -> Kept:
        """The gateway belongs to the control plane; it is found by its records, and never started here."""
        program = Program(
            name="the gateway",
            folder=self._home.state / "gateway-process",
            argv=(),
            env={},
            log_path=self._home.state / "gateway.log",
        )
        return Kept(program, self._progress.say)

    async def _start(self, ports: Ports) -> bool:
        running = await asyncio.to_thread(self._server.find)
        if not running:
            _check_ports(ports, gateway_runs=await asyncio.to_thread(self._gateway().find))
        try:
            adopted = await self._server.ensure()
            self._started = not adopted
            await self._agent.ensure()
        except ProcessError as error:
            raise UpRefused(str(error)) from error
        return adopted

    def _context(self) -> Context:
        home = self._home
        server = load_server(home.server_file)
        return Context(f"http://{server.listen.admin}", home.admin_token.read_text().strip())

    async def _client(self, address: str) -> AdminClient:
        """The admin client, once the control plane answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ADMIN_UP_S
        while True:
            self._progress.put([("control plane", "starting")])
            if self._home.admin_token.exists():
                client = AdminClient(self._context())
                try:
                    await asyncio.to_thread(client.get, "status")
                except AdminError as error:
                    client.close()
                    if error.status is not None:
                        raise UpRefused(f"the control plane at {address} refuses: {error}") from error
                else:
                    self._known = self._context()
                    write_context(self._known, self._home.context)
                    return client
            self._check_alive(self._server, "the control plane", "server")
            if loop.time() > deadline:
                raise UpRefused(
                    f"the control plane did not answer within {ADMIN_UP_S:g} s; see {self._home.logs}/server.log"
                )
            await asyncio.sleep(POLL_S)

    def _check_alive(self, kept: Kept, what: str, name: str) -> None:
        if kept.pid is None:
            words = "\n".join(kept.last_lines()) or "it said nothing"
            raise UpRefused(
                f"{what} ended at its start; its last words (all of them in {self._home.logs}/{name}.log):\n{words}"
            )

    async def _client_key(self, client: AdminClient) -> str:
        """The key of last time where the control plane still knows it, or a new one."""
        known = layout.client_key(self._home)
        keys = await asyncio.to_thread(client.get, "keys")
        if known and any(key["name"] == "up" and key["revoked_at"] is None for key in keys):
            return known
        made = await asyncio.to_thread(client.post, "keys", {"name": "up"})
        layout.keep_client_key(self._home, made["key"])
        return str(made["key"])

    async def _ready(self, client: AdminClient) -> None:
        """Waits until every model that should run does, telling how far it is."""
        while True:
            nodes, models, replicas, status = [
                await asyncio.to_thread(client.get, what) for what in ("nodes", "models", "replicas", "status")
            ]
            self._progress.put(_rows(nodes, models, replicas, status))
            if _all_ready(models, status):
                return
            self._check_alive(self._server, "the control plane", "server")
            self._check_alive(self._agent, "the agent", "agent")
            await asyncio.sleep(POLL_S)

    # -- down

    async def _engines_stopped(self, client: AdminClient) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOPPED_S
        while True:
            nodes = await asyncio.to_thread(client.get, "nodes")
            left = [shard for node in nodes for shard in node["shards"]]
            replicas = await asyncio.to_thread(client.get, "replicas")
            if not left and not replicas:
                return
            self._progress.put([(shard["id"], f"{shard['state']}: {shard['why']}") for shard in left])
            if loop.time() > deadline:
                self._progress.say(f"engines did not stop within {STOPPED_S:g} s: {', '.join(_pids(left))}")
                return
            await asyncio.sleep(POLL_S)


def _pids(shards: list[dict[str, Any]]) -> list[str]:
    return [f"{shard['id']} (pid {shard['pid']})" for shard in shards]


def _rows(nodes: Any, models: Any, replicas: Any, status: Any) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = [("control plane", "up")]
    rows += [
        ("node " + node["id"], node["state"] + (f": {node['why']}" if node["state"] != "ready" else ""))
        for node in nodes
    ]
    if not nodes:
        rows.append(("agent", "starting"))
    for node in nodes:
        for engine in node["engines"]:
            if engine["name"] != "sim":
                words = f": {engine['words']}" if engine["words"] else ""
                rows.append((engine["name"], f"{engine['state']}{words}"))
    if replicas:
        rows += [("model " + replica["model"], f"{replica['state']}: {replica['why']}") for replica in replicas]
    else:
        rows += [("model " + model["name"], model["why"] or "ready") for model in models]
    rows.append(("gateway", "connected" if status["gateways"] else "starting"))
    return rows


def _all_ready(models: Any, status: Any) -> bool:
    table = status["table_version"]
    served = any(gateway["table_acked"] == table for gateway in status["gateways"])
    return served and all(model["ready"] >= model["replicas"] for model in models)


async def _check_fit(agent: AgentConfig) -> None:
    """Says at once where this machine can't run the default build, rather than after a download."""
    if agent.engines.llamacpp is not None:
        return
    inventory = await discover(settings_of(agent))
    for spec in DEFAULT_ENGINES:
        row = build(spec.name, spec.version)
        if row is not None and (words := fits(row, inventory)):
            raise UpRefused(words)


def _check_ports(ports: Ports, *, gateway_runs: bool) -> None:
    for what, port in (("admin", ports.admin), ("agents", ports.agents)):
        if not layout.can_bind(port):
            raise UpRefused(_taken(what, port))
    for what, port in (("gateway", ports.gateway), ("metrics", ports.metrics)):
        if not gateway_runs and not layout.can_bind(port):
            raise UpRefused(_taken(what, port))


def _taken(what: str, port: int) -> str:
    way = (
        "--port N chooses another"
        if what == "gateway"
        else "remove ports.json from the directory to have new ports chosen"
    )
    return f"port {port} ({what}) is taken by {port_holder(port) or 'another process'}: end it, or {way}"


@contextmanager
def only_one(home: Home) -> Iterator[None]:
    """Holds the directory: two of them on one directory would fight over the same processes."""
    home.make()
    descriptor = os.open(home.root / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UpRefused(f"`llmgw up` runs already on {home.root}; end that one, or name another --dir") from None
        yield
    finally:
        os.close(descriptor)
