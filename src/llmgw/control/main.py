"""The control plane's process: opens the store, takes the lead, listens to peers and operators, keeps the gateway."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import structlog
import uvicorn

from llmgw.cluster.model import Cluster
from llmgw.config import HostPort, ServerConfig
from llmgw.control.api import Rooms, make_app
from llmgw.control.certificate_operations import Identities
from llmgw.control.crl_file import CrlFile
from llmgw.control.desk import Desk
from llmgw.control.errors import ApiError
from llmgw.control.joining import JoinOffice
from llmgw.control.keys import digest, make_admin_token
from llmgw.control.leadership import Deposed, Leadership
from llmgw.control.logs import Logs
from llmgw.control.own_identity import OwnIdentity
from llmgw.control.plane import Plane
from llmgw.control.reload import Reloader
from llmgw.control.serials import Serials
from llmgw.link.listener import ListenError
from llmgw.link.server import LinkServer, Peer
from llmgw.pki.names import IdentityError, PkiError
from llmgw.private_file import write_private
from llmgw.process.errors import ProcessError
from llmgw.process.kept import Kept, Program, llmgw_argv
from llmgw.store import open_store, state_dir
from llmgw.store.base import Lead, Saved, Store, StoreError
from llmgw.version import VERSION

log = structlog.get_logger()

KEEP_AGAIN_S = 10.0


class ServerRefused(Exception):
    """The control plane can't start; the message says why and what to do."""


async def serve(path: Path, config: ServerConfig, *, new_admin_token: bool = False) -> None:
    """Runs a control plane until SIGTERM or SIGINT. Raises ServerRefused. The gateway it started goes on serving.

    ``new_admin_token``: make another admin token; the one before ends.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, log.info, "still starting: the file is being read anyway")
    try:
        async with AsyncExitStack() as stack:
            await _run(path, config, stop, stack, new_admin_token)
    except* (StoreError, ListenError, IdentityError, Deposed) as group:
        raise ServerRefused(str(_first(group))) from group
    except* ServerRefused as group:
        raise ServerRefused(str(_first(group))) from group


def _first(group: BaseExceptionGroup) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _run(path: Path, config: ServerConfig, stop: asyncio.Event, stack: AsyncExitStack, new_token: bool) -> None:
    _allow_many_peers()
    # First of all, since it writes nothing: a control plane that can't be dialled should leave nothing behind.
    own = OwnIdentity(config.tls)
    with suppress(PkiError, OSError):
        # One that was off until its own certificate expired renews it where it can; else the listener says why not.
        await own.look(datetime.now(UTC))
    folder = state_dir(config.store)
    store = await open_store(config.store)
    stack.push_async_callback(store.close)
    # The same after a restart. Nobody else can lead: the directory's lock is held.
    leadership = Leadership(store, f"{socket.gethostname()} ({config.listen.agents})", alone=True)
    lead = await leadership.wait()
    saved = await store.load()
    newest = await store.events(limit=1)
    plane = Plane(
        _cluster(config, saved),
        store=store,
        leadership=leadership,
        saved=saved,
        last_event=newest[-1].id if newest else None,
        heartbeat_s=config.nodes.heartbeat_s,
    )
    plane.note("control.started", "", f"llmgw v{VERSION} leads, epoch {lead.epoch}{_after(lead)}")
    logs = Logs()
    desk = Desk(plane, logs)
    keeper = GatewayKeeper(path, folder, plane)
    serials = Serials(plane, own.issuing)

    def peer_of(node: str) -> Peer | None:
        return link.peer(node, "node")

    def address_of(node: str) -> str:
        peer = peer_of(node)
        return peer.address if peer is not None else ""

    joining = JoinOffice(
        plane, serials, own, lifetime_s=config.tls.lifetime_s, servers=config.advertise, address_of=address_of
    )
    token_hash = await _admin_token(folder, store, lead.epoch, None if new_token else saved.admin_token_hash)
    link = LinkServer(
        listen=(config.listen.agents.host, config.listen.agents.port),
        tls=own.files,
        cluster=config.cluster,
        epoch=lead.epoch,
        delegate=desk,
        servers=config.advertise,
        heartbeat_s=config.nodes.heartbeat_s,
        allow_serial=serials.allow,
        serial_used=serials.used,
        joining=joining,
    )
    serials.on_revoked.append(link.close_refused)
    own.on_changed.append(link.take_up_files)
    await link.start()
    stack.push_async_callback(link.stop)

    def reloaded(new: ServerConfig) -> None:
        link.beat_every(new.nodes.heartbeat_s)
        keeper.reload(new)

    reloader = Reloader(path, config, plane, reloaded)
    crl = CrlFile(plane, own, folder / "crl.pem")
    identities = Identities(plane, serials, own, config.advertise, peer_of)
    app = make_app(Rooms(plane, desk, logs, reloader, token_hash, identities, crl))
    admin = await stack.enter_async_context(_admin_listener(app, config))
    own.on_changed.append(admin.take_up_files)
    async with asyncio.TaskGroup() as group:
        keeping = (plane.run(), keeper.keep(), own.keep(), crl.keep())
        tasks = [group.create_task(each) for each in keeping]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: group.create_task(_reload(reloader)) and None)
        _settle_memory()
        log.info(
            "the control plane is up",
            admin=str(config.listen.admin),
            agents=str(config.listen.agents),
            gateway=str(config.listen.gateway),
            admin_token_file=str(folder / "admin-token"),
        )
        await stop.wait()
        log.info("stopping; gateways and engines go on")
        await link.stop()
        for task in tasks:
            task.cancel()
    with suppress(StoreError):
        await leadership.resign()


def _after(lead: Lead) -> str:
    return f", after {lead.previous}: every node gets time to come here" if lead.taken_over else ""


def _settle_memory() -> None:
    """What was loaded at the start stays, and nodes are many small objects that live long: a collector that looks at
    all of them for every 700 new ones would pause a registration of hundreds by a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _allow_many_peers() -> None:
    """As many open files as the system lets this process have: each peer takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _cluster(config: ServerConfig, saved: Saved) -> Cluster:
    return Cluster(
        name=config.cluster,
        catalog=config.catalog,
        nodes={node.id: node for node in saved.nodes},
        replicas={replica.id: replica for replica in saved.replicas},
        drains={drain.node: drain for drain in saved.drains},
        engines={history.name: history for history in saved.engines},
        scale=saved.scale,
        replicas_made=saved.replicas_made,
        secret=saved.secret,
        suspect_after_s=config.nodes.suspect_after_s,
        lost_after_s=config.nodes.lost_after_s,
        in_flight_s=config.drain.in_flight_s,
    )


async def _reload(reloader: Reloader) -> None:
    try:
        log.info("configuration reloaded", changed=await reloader.reload())
    except ApiError as error:
        log.error("the changed configuration is refused; nothing was changed", reason=error.message)
    except Exception:
        # Nobody asked in a way that could be answered, and what runs must not end by it.
        log.exception("a fault of llmgw's own: the configuration was not reloaded")


class GatewayKeeper:
    """Keeps the gateway beside the control plane: adopted where one runs, never doubled."""

    def __init__(self, path: Path, folder: Path, plane: Plane) -> None:
        program = Program(
            name="the gateway",
            folder=folder / "gateway-process",
            argv=llmgw_argv("gateway", "--config", str(path.resolve())),
            env=dict(os.environ),
            log_path=folder / "gateway.log",
        )
        self._plane = plane
        self._kept = Kept(program, lambda words: plane.tell(lambda: plane.note("gateway.ended", "", words)))

    async def keep(self) -> None:
        try:
            adopted = await self._kept.ensure()
            words = f"gateway {'adopted' if adopted else 'started'}, pid {self._kept.pid}"
            self._plane.tell(lambda: self._plane.note("gateway.kept", "", words))
        except (ProcessError, OSError) as error:
            log.error("the gateway can't be started; trying again", reason=str(error))
        while True:
            try:
                await self._kept.keep()
            except Exception as error:
                # One that hangs in the kernel, say: the nodes are looked after all the same.
                log.exception("the gateway can't be looked after; trying again", reason=str(error))
                await asyncio.sleep(KEEP_AGAIN_S)

    def reload(self, config: ServerConfig) -> None:
        """Have the gateway take up the limits of the changed file."""
        self._kept.signal(signal.SIGHUP)


async def _admin_token(folder: Path, store: Store, epoch: int, known: str | None) -> str:
    """The admin token's hash, ``known`` or of one that is made and written now."""
    file = folder / "admin-token"
    if known is not None:
        if not file.exists():
            words = f"{file} is gone; its token still counts. `llmgw server --new-admin-token` makes another"
            log.warning(words)
        return known
    token = make_admin_token()
    await store.set_admin_token(epoch, digest(token))
    write_private(file, token + "\n")
    return digest(token)


class AdminServer(uvicorn.Server):
    """Signals are the control plane's own business."""

    def take_up_files(self) -> None:
        """Show the certificate that is in the files now, from the next connection on."""
        if self.config.ssl is not None and self.config.ssl_certfile is not None:
            self.config.ssl.load_cert_chain(self.config.ssl_certfile, self.config.ssl_keyfile)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _admin_listener(app: Callable[..., object], config: ServerConfig) -> AsyncIterator[AdminServer]:
    where = config.listen.admin
    tls = None if _is_loopback(where.host) else config.tls
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    settings.load()
    server = AdminServer(settings)
    listener = _bind(where)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield server
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(where: HostPort) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((where.host, where.port))
    except OSError as error:
        listener.close()
        raise ServerRefused(
            f"listen.admin: {where} can't be listened on: {error.strerror}; free it or name another"
        ) from error
    return listener
