"""What a cluster of one is made of: its directory, its files, and what it serves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import stat
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from llmgw.engines.builds import DEFAULT_MODEL_SOURCE
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of, read_certificate
from llmgw.private_file import write_private

DEFAULT_MODEL = "smollm2-135m-instruct"
GGUF_MAGIC = b"GGUF"
PORTS_TRIED = 100


class UpRefused(Exception):
    """A cluster of one can't be brought up; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    gateway: int
    admin: int
    agents: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """What is asked for: an engine, and a GGUF file where it is not the default model."""

    engine: str = "llamacpp"
    model: Path | None = None

    @property
    def name(self) -> str:
        if self.engine == "sim":
            return "sim"
        if self.model is None:
            return DEFAULT_MODEL
        return re.sub(r"[^a-z0-9._-]+", "-", self.model.stem.lower()).strip("-._") or "model"


class Home:
    """The paths under ``--dir``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pki = root / "pki"
        self.server_file = root / "server.yaml"
        self.agent_file = root / "agent.yaml"
        self.state = root / "state"
        self.admin_token = self.state / "admin-token"
        self.key = root / "key"
        self.context = root / "context.json"
        self.ports_file = root / "ports.json"
        self.run = root / "run"
        self.logs = root / "logs"

    def make(self) -> None:
        try:
            for folder in (self.root, self.state, self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UpRefused(
                f"{error.filename} can't be made: {error.strerror}; name another directory with --dir"
            ) from error


def check_serve(serve: Serve) -> None:
    """Refuses what can't be served, before anything is started."""
    if serve.engine not in ("llamacpp", "sim"):
        raise UpRefused(f"--engine {serve.engine}: `llmgw up` runs llamacpp or sim")
    if serve.model is None:
        return
    if serve.engine == "sim":
        raise UpRefused("--model and --engine sim exclude each other: the simulated engine reads no weights")
    try:
        with serve.model.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise UpRefused(f"--model {serve.model}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise UpRefused(f"--model {serve.model} is no GGUF file: it begins with {magic!r}, not with b'GGUF'")
    if os.geteuid() == 0 and not serve.model.stat().st_mode & stat.S_IROTH:
        raise UpRefused(
            f"--model {serve.model}: engines run as the user llmgw-engine, who may not read it: chmod a+r {serve.model}"
        )


def choose_ports(home: Home, gateway: int | None) -> Ports:
    """The ports of last time, or the usual ones where they are free, or the next free ones."""
    if home.ports_file.exists():
        try:
            known = Ports(**json.loads(home.ports_file.read_text()))
        except (ValueError, TypeError) as error:
            raise UpRefused(
                f"{home.ports_file} can't be read ({error}): remove it, and new ports are chosen"
            ) from error
        return known if gateway in (None, known.gateway) else _with_gateway(home, known, gateway or 0)
    taken: set[int] = set()
    ports = Ports(
        gateway=gateway if gateway is not None else _free(8080, taken),
        admin=_free(8081, taken),
        agents=_free(7443, taken),
        metrics=_free(9464, taken),
    )
    return _keep(home, ports)


def _with_gateway(home: Home, known: Ports, gateway: int) -> Ports:
    return _keep(home, Ports(gateway=gateway, admin=known.admin, agents=known.agents, metrics=known.metrics))


def _keep(home: Home, ports: Ports) -> Ports:
    write_private(home.ports_file, json.dumps(asdict(ports)) + "\n")
    return ports


def _free(first: int, taken: set[int]) -> int:
    for port in range(first, first + PORTS_TRIED):
        if port not in taken and can_bind(port):
            taken.add(port)
            return port
    raise UpRefused(f"no port from {first} to {first + PORTS_TRIED - 1} is free on 127.0.0.1")


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def make_identity(home: Home, node: str) -> None:
    """The authority, a server certificate for loopback, and this node's; what is there and lasts is kept."""
    if not (home.pki / "ca.pem").exists():
        Authority.create(home.pki, cluster="local")
    authority = Authority.load(home.pki)
    if (stale := _stale(home.pki / "server.pem")) is not False:
        authority.issue_server(["127.0.0.1", "localhost"], home.pki, node, renew=stale is True)
    if (stale := _stale(home.pki / f"{node}.pem")) is not False:
        authority.issue_client(node, home.pki, renew=stale is True)


def _stale(certificate: Path) -> bool | None:
    """None: there is none. True: it ends within a month."""
    if not certificate.exists():
        return None
    ends = facts_of(read_certificate(certificate, "the certificate")).not_after
    return ends - datetime.now(UTC) < timedelta(days=30)


def write_files(home: Home, ports: Ports, serve: Serve, node: str, asked: bool) -> bool:
    """Writes both configuration files, unless somebody edited them; returns whether server.yaml is ours.

    ``asked`` is True where flags say what to serve: then an edited file is a refusal, not something to overwrite.
    """
    if not _edited(home.agent_file):
        write_private(home.agent_file, _sealed(agent_yaml(home, ports, node)))
    ours = not _edited(home.server_file)
    if ours:
        write_private(home.server_file, _sealed(server_yaml(home, ports, serve)))
    elif asked:
        raise UpRefused(
            f"{home.server_file} was edited by hand, and the flags say what to serve: "
            "start without flags to serve what the file says, or move the file away"
        )
    return ours


_SEAL = "# Written by `llmgw up`, which keeps it up to date until somebody edits it. Checksum: "


def _sealed(body: str) -> str:
    return f"{_SEAL}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def _edited(path: Path) -> bool:
    if not path.exists():
        return False
    head, _, body = path.read_text(errors="replace").partition("\n")
    return head != _sealed(body).partition("\n")[0]


def server_yaml(home: Home, ports: Ports, serve: Serve) -> str:
    pki = home.pki
    return f"""\
cluster: local
listen:
  gateway: 127.0.0.1:{ports.gateway}
  admin: 127.0.0.1:{ports.admin}
  agents: 127.0.0.1:{ports.agents}
  metrics: 127.0.0.1:{ports.metrics}
advertise: ["https://127.0.0.1:{ports.agents}"]
tls:
  ca: {json.dumps(str(pki / "ca.pem"))}
  cert: {json.dumps(str(pki / "server.pem"))}
  key: {json.dumps(str(pki / "server-key.pem"))}
store: {json.dumps(f"sqlite:///{home.state}/llmgw.db")}
{_engines_yaml(serve)}
models:
{_model_yaml(serve)}"""


def _engines_yaml(serve: Serve) -> str:
    if serve.engine == "sim":
        return "engines: {}"
    return "# engines: left out, so the llama.cpp build that this release was checked against"


def _model_yaml(serve: Serve) -> str:
    if serve.engine == "sim":
        return """\
  - name: sim
    aliases: [default]
    profiles:
      - engine: sim
        memory: 64MiB
        sim: {load_time: 200ms, first_token: 50ms, token_interval: 10ms}
"""
    source = DEFAULT_MODEL_SOURCE if serve.model is None else f"file://{serve.model.resolve()}"
    return f"""\
  - name: {json.dumps(serve.name)}
    aliases: [default]
    source: {json.dumps(source)}
    profiles:
      - engine: llamacpp
        memory: {_memory_mib(serve)}MiB
        context: 2048
        parallel: 4
"""


def _memory_mib(serve: Serve) -> int:
    """The file once, and half a GiB for the context and the program."""
    file_bytes = serve.model.stat().st_size if serve.model else 100 << 20
    return (file_bytes >> 20) + 512


def agent_yaml(home: Home, ports: Ports, node: str) -> str:
    return f"""\
server: https://127.0.0.1:{ports.agents}
tls:
  ca: {json.dumps(str(home.pki / "ca.pem"))}
  cert: {json.dumps(str(home.pki / f"{node}.pem"))}
  key: {json.dumps(str(home.pki / f"{node}-key.pem"))}
node_id: {json.dumps(node)}
reconnect_max: 5s
weights_dir: {json.dumps(str(home.root / "weights"))}
engines_dir: {json.dumps(str(home.root / "engines"))}
supervisor:
  work_dir: {json.dumps(str(home.root / "agent"))}
  stop_timeout: 10s
"""


def client_key(home: Home) -> str | None:
    return home.key.read_text().strip() if home.key.exists() else None


def keep_client_key(home: Home, key: str) -> None:
    write_private(home.key, key + "\n")


def node_name() -> str:
    """This machine's name as a node id."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")
    return name or "node-" + secrets.token_hex(3)
