"""``server.yaml`` but for its models: its keys, and how they become a ServerConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo

from llmgw.cluster.catalog import Catalog, EngineName, EngineSpec
from llmgw.config.addresses import HostPort
from llmgw.config.check import Remark
from llmgw.config.faults import Refused
from llmgw.config.hints import close_to
from llmgw.config.models_file import ModelFile, model_rules, model_spec
from llmgw.config.server import (
    DrainPolicy,
    FrontTls,
    GatewayConfig,
    Listen,
    NodesPolicy,
    ServerConfig,
    ServerTls,
    Timeouts,
)
from llmgw.config.shape import (
    Advertised,
    Building,
    ClusterName,
    Download,
    Duration,
    Item,
    Lifetime,
    ListenAt,
    Located,
    Package,
    Patience,
    Section,
    Sha256,
    Size,
    StoreUrl,
    Version,
    count,
    whole,
)
from llmgw.engines.builds import DEFAULT_ENGINES

PKI = Path("/etc/llmgw/pki")
MIB = 1024 * 1024

NAMED_SOURCES = ("github", "index")


class ListenFile(Section):
    TITLE = "listen"
    WORDS: ClassVar[Mapping[str, str]] = {"api": "admin", "nodes": "agents", "clients": "gateway", "http": "gateway"}

    gateway: ListenAt = HostPort("0.0.0.0", 8080)
    admin: ListenAt = HostPort("127.0.0.1", 8081)
    agents: ListenAt = HostPort("0.0.0.0", 7443)
    metrics: ListenAt = HostPort("127.0.0.1", 9464)


class ServerTlsFile(Section):
    TITLE = "tls"
    WORDS: ClassVar[Mapping[str, str]] = {
        "ca_file": "ca",
        "cert_file": "cert",
        "certificate": "cert",
        "key_file": "key",
        "private_key": "key",
    }

    ca: Located = PKI / "ca.pem"
    cert: Located = PKI / "server.pem"
    key: Located = PKI / "server-key.pem"
    lifetime: Lifetime = 86400.0


class NodesFile(Section):
    TITLE = "nodes"

    suspect_after: Patience | None = None
    lost_after: Patience = 30.0


class DrainFile(Section):
    TITLE = "drain"

    in_flight: Duration = 600.0


class FrontTlsFile(Section):
    TITLE = "gateway.tls"
    WORDS: ClassVar[Mapping[str, str]] = {"certificate": "cert", "cert_file": "cert", "key_file": "key"}
    HINTS: ClassVar[Mapping[str, str]] = {
        "cert": "without `tls` clients are served plain HTTP",
        "key": "without `tls` clients are served plain HTTP",
    }

    cert: Located = Field(description="the path of the certificate that clients see")
    key: Located = Field(description="the path of its private key")


class TimeoutsFile(Section):
    TITLE = "gateway.timeouts"

    queue: Patience = 60.0
    first_token: Patience = 600.0
    between_tokens: Patience = 60.0
    total: Patience = 1800.0


class GatewayFile(Section):
    TITLE = "gateway"
    WORDS: ClassVar[Mapping[str, str]] = {"processes": "workers", "max_body": "body_limit", "max_queue": "queue"}

    workers: Annotated[int, count(1, 256)] = 1
    tls: FrontTlsFile | None = None
    body_limit: Size = 256 * MIB
    queue: Annotated[int, count(0, 1_000_000)] = 100
    hold_for: Duration = 300.0
    timeouts: TimeoutsFile = TimeoutsFile()


class DownloadFile(Section):
    TITLE = "an engine's source"

    url: Download = Field(description="the URL of the archive")
    sha256: Sha256 = Field(description="the archive's SHA-256, as its publisher states it")


def _engine_source(value: object, info: ValidationInfo) -> str | DownloadFile:
    """``github``, ``index``, or where an archive is and what its SHA-256 is."""
    if isinstance(value, dict):
        return DownloadFile.model_validate(value, context=info.context)
    if isinstance(value, str) and value in NAMED_SOURCES:
        return value
    close = close_to(value, NAMED_SOURCES) if isinstance(value, str) else None
    hint = f"did you mean `{close}`?" if close else ""
    if isinstance(value, str) and "://" in value:
        hint = f"with its SHA-256: {{url: {value}, sha256: …}}"
    raise Refused("github, index or {url, sha256}", hint)


class EngineFile(Section):
    TITLE = "an engine"
    WORDS: ClassVar[Mapping[str, str]] = {"tag": "version", "release": "version", "variant": "build"}
    HINTS: ClassVar[Mapping[str, str]] = {
        "url": "it belongs in `source`: source: {url: …, sha256: …}",
        "sha256": "it belongs in `source`: source: {url: …, sha256: …}",
        "bin": "a program that a node has already is named in that node's agent.yaml",
    }

    version: Version = Field(description="the version that every node should have, such as b10991 or 0.33.0")
    source: Annotated[str | DownloadFile, PlainValidator(_engine_source)] = "github"
    package: Package | None = None
    build: Building | None = None


class PythonEngineFile(EngineFile):
    source: Annotated[str | DownloadFile, PlainValidator(_engine_source)] = "index"


class EnginesFile(Section):
    TITLE = "engines"
    WORDS: ClassVar[Mapping[str, str]] = {"llama.cpp": "llamacpp", "llama": "llamacpp"}
    HINTS: ClassVar[Mapping[str, str]] = {"sim": "the simulated engine is part of llmgw: there is nothing to install"}

    llamacpp: EngineFile | None = None
    vllm: PythonEngineFile | None = None
    sglang: PythonEngineFile | None = None


class ServerFile(Section):
    TITLE = "the control plane's file"
    WORDS: ClassVar[Mapping[str, str]] = {
        "model": "models",
        "database": "store",
        "db": "store",
        "cluster_name": "cluster",
        "name": "cluster",
        "address": "advertise",
        "bind": "listen",
    }
    HINTS: ClassVar[Mapping[str, str]] = {"models": "a cluster that serves nothing yet says models: []"}

    cluster: ClusterName = "llmgw"
    listen: ListenFile = ListenFile()
    advertise: list[Item[Advertised]] = Field(default_factory=list)
    tls: ServerTlsFile = ServerTlsFile()
    store: StoreUrl = "sqlite:////var/lib/llmgw/llmgw.db"
    nodes: NodesFile = NodesFile()
    drain: DrainFile = DrainFile()
    gateway: GatewayFile = GatewayFile()
    engines: EnginesFile | None = None
    models: list[Item[ModelFile]] = Field(description="the list of models that the cluster serves")


def server_rules(file: ServerFile) -> Iterator[Remark]:
    """What is wrong between values that are right by themselves."""
    if whole(file.listen):
        yield from _listeners(file.listen)
    if whole(file.advertise):
        yield from _advertised(file.advertise)
    nodes = file.nodes
    if (
        whole(nodes)
        and whole(nodes.suspect_after, nodes.lost_after)
        and (nodes.suspect_after or 0.0) > nodes.lost_after
    ):
        hint = "a node is suspect first, and lost when it stays silent"
        yield Remark(path=("nodes", "suspect_after"), expected="a duration not longer than `lost_after`", hint=hint)
    if whole(file.engines) and file.engines is not None:
        yield from _engine_packages(file.engines)
    if whole(file.models):
        yield from model_rules(file.models)


def _listeners(listen: ListenFile) -> Iterator[Remark]:
    places = [(name, getattr(listen, name)) for name in ListenFile.model_fields]
    for (first, ours), (second, theirs) in combinations(places, 2):
        if whole(ours, theirs) and ours.clashes(theirs):
            wrong = second if second in listen.model_fields_set else first
            other = first if wrong == second else second
            expected = "an address and port that nothing else of this file listens at"
            found, hint = f'"{getattr(listen, wrong)}"', f"listen.{other} is {getattr(listen, other)}"
            yield Remark(path=("listen", wrong), expected=expected, found=found, hint=hint)


def _advertised(advertise: list[str]) -> Iterator[Remark]:
    seen: dict[str, int] = {}
    for index, address in enumerate(advertise):
        if whole(address) and seen.setdefault(address, index) != index:
            hint = f"it is advertise[{seen[address]}] already"
            yield Remark(path=("advertise", index), expected="each address once", hint=hint)


def _engine_packages(engines: EnginesFile) -> Iterator[Remark]:
    for name, engine in _given(engines):
        if not whole(engine) or not whole(engine.package, engine.source):
            continue
        if engine.package is not None and engine.source != "index":
            yield Remark(path=("engines", name, "package"), expected="`package` only with source: index")


def _given(engines: EnginesFile) -> Iterator[tuple[EngineName, EngineFile]]:
    everything: tuple[tuple[EngineName, EngineFile | None], ...] = (
        ("llamacpp", engines.llamacpp),
        ("vllm", engines.vllm),
        ("sglang", engines.sglang),
    )
    for name, engine in everything:
        if engine is not None:
            yield name, engine


def server_config(file: ServerFile) -> ServerConfig:
    """The file with nothing wrong in it, as the rest of the program sees it."""
    listen, tls = file.listen, file.tls
    engines = DEFAULT_ENGINES if file.engines is None else tuple(_engine_spec(*each) for each in _given(file.engines))
    return ServerConfig(
        cluster=file.cluster,
        listen=Listen(gateway=listen.gateway, admin=listen.admin, agents=listen.agents, metrics=listen.metrics),
        advertise=tuple(file.advertise),
        tls=ServerTls(ca=tls.ca, cert=tls.cert, key=tls.key, lifetime_s=tls.lifetime),
        store=file.store,
        nodes=_nodes(file.nodes),
        drain=DrainPolicy(in_flight_s=file.drain.in_flight),
        gateway=_gateway(file.gateway),
        catalog=Catalog(models=tuple(map(model_spec, file.models)), engines=engines),
    )


def _engine_spec(name: EngineName, engine: EngineFile) -> EngineSpec:
    where: dict[str, Any] = {"source": engine.source}
    if isinstance(engine.source, DownloadFile):
        where = {"source": engine.source.url, "sha256": engine.source.sha256}
    return EngineSpec(name=name, version=engine.version, package=engine.package, build=engine.build, **where)


def _nodes(nodes: NodesFile) -> NodesPolicy:
    """Who states ``lost_after`` alone gets a suspicion that comes before it."""
    suspect_after_s = min(15.0, nodes.lost_after / 2) if nodes.suspect_after is None else nodes.suspect_after
    return NodesPolicy(suspect_after_s=suspect_after_s, lost_after_s=nodes.lost_after)


def _gateway(file: GatewayFile) -> GatewayConfig:
    times = file.timeouts
    return GatewayConfig(
        workers=file.workers,
        tls=FrontTls(cert=file.tls.cert, key=file.tls.key) if file.tls else None,
        body_limit_bytes=file.body_limit,
        queue=file.queue,
        hold_for_s=file.hold_for,
        timeouts=Timeouts(
            queue_s=times.queue,
            first_token_s=times.first_token,
            between_tokens_s=times.between_tokens,
            total_s=times.total,
        ),
    )
