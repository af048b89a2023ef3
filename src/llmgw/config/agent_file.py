"""``agent.yaml``: its keys, the rules over several of them, and how it becomes an AgentConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from llmgw.cluster.model import Fabric, PortRange
from llmgw.config.addresses import SERVER_URL
from llmgw.config.agent import (
    AgentConfig,
    AgentEngines,
    AgentTls,
    Discovery,
    LlamacppOnNode,
    SglangOnNode,
    SupervisorConfig,
    VllmOnNode,
)
from llmgw.config.check import Remark
from llmgw.config.faults import Refused
from llmgw.config.shape import (
    AdapterName,
    Building,
    FabricName,
    InterfaceName,
    Interval,
    Ip,
    Item,
    LabelKey,
    LabelValue,
    Launching,
    Located,
    NodeId,
    Patience,
    Ports,
    PositiveNumber,
    Program,
    Section,
    Server,
    Truth,
    count,
    whole,
)

NO_PLAINTEXT = "there is no plaintext mode"


def _one_or_many(value: object) -> object:
    """``server`` may be one address or a list of them."""
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [value]
    raise Refused(f"{SERVER_URL}, or a list of them")


class TlsFile(Section):
    TITLE = "tls"
    WORDS: ClassVar[Mapping[str, str]] = {
        "ca_cert": "ca",
        "ca_file": "ca",
        "cert_file": "cert",
        "certificate": "cert",
        "key_file": "key",
        "private_key": "key",
    }

    ca: Located = Field(description="the path of the authority's certificate (ca.pem)")
    cert: Located = Field(description="the path of this node's certificate (NODE.pem)")
    key: Located = Field(description="the path of this node's private key (NODE-key.pem)")


class FabricFile(Section):
    TITLE = "a fabric"
    WORDS: ClassVar[Mapping[str, str]] = {"adapters": "hcas", "devices": "hcas", "rate": "rate_gbps"}

    name: FabricName = Field(description="what the operator calls this network")
    hcas: Annotated[list[Item[AdapterName]], Field(min_length=1)] = Field(
        description="the adapters that are attached to it, such as [mlx5_0, mlx5_1]"
    )
    rate_gbps: PositiveNumber | None = None


class DiscoveryFile(Section):
    TITLE = "discovery"

    nvidia_smi: Program = None
    ib_root: Located = Path("/sys/class/infiniband")
    prefer_nvml: Truth = True


class VllmFile(Section):
    TITLE = "engines.vllm of a node"
    WORDS: ClassVar[Mapping[str, str]] = {"path": "bin", "binary": "bin", "ray": "ray_bin"}
    HINTS: ClassVar[Mapping[str, str]] = {
        "version": "which version nodes have is said in the control plane's file (`engines`)"
    }

    bin: Located | None = None
    launch_mode: Launching | None = None
    ray_bin: Located | None = None
    build: Building | None = None


class SglangFile(Section):
    TITLE = "engines.sglang of a node"
    WORDS: ClassVar[Mapping[str, str]] = {"bin": "python", "path": "python"}
    HINTS: ClassVar[Mapping[str, str]] = VllmFile.HINTS

    python: Located | None = None
    build: Building | None = None


class LlamacppFile(Section):
    TITLE = "engines.llamacpp of a node"
    WORDS: ClassVar[Mapping[str, str]] = {"path": "bin", "binary": "bin", "variant": "build"}
    HINTS: ClassVar[Mapping[str, str]] = VllmFile.HINTS

    bin: Located | None = None
    build: Building | None = None


class EnginesFile(Section):
    TITLE = "engines of a node"
    WORDS: ClassVar[Mapping[str, str]] = {"llama.cpp": "llamacpp", "llama": "llamacpp"}
    HINTS: ClassVar[Mapping[str, str]] = {"sim": "the simulated engine is part of llmgw: there is nothing to point at"}

    vllm: VllmFile | None = None
    sglang: SglangFile | None = None
    llamacpp: LlamacppFile | None = None


class SupervisorFile(Section):
    TITLE = "supervisor"

    work_dir: Located = Path("/var/lib/llmgw-agent")
    log_lines: Annotated[int, count(1, 100_000)] = 512
    stop_timeout: Patience = 60.0
    health_interval: Interval = 2.0


class AgentFile(Section):
    TITLE = "the agent's file"
    WORDS: ClassVar[Mapping[str, str]] = {
        "servers": "server",
        "control_plane": "server",
        "server_url": "server",
        "id": "node_id",
        "hostname": "node_id",
        "management_address": "mgmt_addr",
        "port_range": "ports",
    }
    HINTS: ClassVar[Mapping[str, str]] = {
        "tls": f"{NO_PLAINTEXT}: run `llmgw ctl cert issue-client NODE --dir PKI` where the authority is, "
        "bring the three files here, and name them: tls: {ca: …, cert: …, key: …}",
        "server": "such as server: https://10.0.0.140:7443",
        "token": "tokens are not kept in this file",
    }

    server: Annotated[list[Item[Server]], Field(min_length=1), BeforeValidator(_one_or_many)] = Field(
        description="the control plane's address, or a list of them"
    )
    tls: TlsFile = Field(description="this node's certificate files")
    node_id: NodeId | None = None
    mgmt_addr: Ip | None = None
    mgmt_interface: InterfaceName | None = None
    labels: dict[LabelKey, Item[LabelValue]] = Field(default_factory=dict)
    heartbeat_interval: Interval = 5.0
    reconnect_base: Interval = 1.0
    reconnect_max: Interval = 30.0
    fabrics: list[Item[FabricFile]] = Field(default_factory=list)
    discovery: DiscoveryFile = DiscoveryFile()
    model_dirs: list[Item[Located]] = Field(default_factory=list)
    weights_dir: Located = Path("/var/lib/llmgw-weights")
    engines_dir: Located = Path("/opt/llmgw/engines")
    ports: Ports = PortRange(20000, 29999)
    engines: EnginesFile = EnginesFile()
    supervisor: SupervisorFile = SupervisorFile()


def agent_rules(file: AgentFile) -> Iterator[Remark]:
    """What is wrong between values that are right by themselves."""
    if whole(file.server):
        yield from _servers(file)
    if whole(file.fabrics):
        yield from _fabrics(file.fabrics)
    if whole(file.engines):
        yield from _programs(file.engines)
    if whole(file.reconnect_base, file.reconnect_max) and file.reconnect_base > file.reconnect_max:
        expected = "a duration not longer than `reconnect_max`"
        yield Remark(path=("reconnect_base",), expected=expected, hint="the wait between tries grows from base to max")


def _programs(engines: EnginesFile) -> Iterator[Remark]:
    """An engine is installed, in one build or another, or its program is named."""
    for name, key, what in (
        ("llamacpp", "bin", "the path of llama-server"),
        ("vllm", "bin", "the path of vllm"),
        ("sglang", "python", "the path of the interpreter that has SGLang"),
    ):
        file = getattr(engines, name)
        if not whole(file) or file is None or not whole(*vars(file).values()):
            continue
        program = getattr(file, key)
        if program is not None and file.build is not None:
            hint = f"where `{key}` names a program nothing is installed: leave one of them out"
            yield Remark(path=("engines", name, "build"), expected=f"`build` or `{key}`, not both", hint=hint)
        if all(value is None for value in vars(file).values()) and name != "vllm":
            yield Remark(path=("engines", name), expected=f"`{key}`, {what}, or `build`, cpu or cuda")


def _servers(file: AgentFile) -> Iterator[Remark]:
    seen: dict[str, int] = {}
    for index, server in enumerate(file.server):
        if not whole(server):
            continue
        if not server.encrypted:
            why = "the certificates of `tls` are" if whole(file.tls) else "certificates are"
            hint = f"{NO_PLAINTEXT}, and {why} of no use over http://: write {server}"
            yield Remark(path=("server", index), expected="an address that begins with https://", hint=hint)
        first = seen.setdefault(str(server), index)
        if first != index:
            hint = f"it is server[{first}] already"
            yield Remark(path=("server", index), expected="each control plane once", hint=hint)


def _fabrics(fabrics: list[FabricFile]) -> Iterator[Remark]:
    names: dict[str, int] = {}
    holders: dict[str, str] = {}
    for index, fabric in enumerate(fabrics):
        if not whole(fabric):
            continue
        path = ("fabrics", index)
        if whole(fabric.name) and names.setdefault(fabric.name, index) != index:
            hint = f"fabrics[{names[fabric.name]}] has it already"
            yield Remark(path=(*path, "name"), expected="a name that no other fabric has", hint=hint)
        if whole(fabric.hcas):
            yield from _adapters(fabric, index, holders)


def _adapters(fabric: FabricFile, index: int, holders: dict[str, str]) -> Iterator[Remark]:
    name = f"`{fabric.name}`" if whole(fabric.name) else f"fabrics[{index}]"
    own: set[str] = set()
    for position, hca in enumerate(fabric.hcas):
        if not whole(hca):
            continue
        path = ("fabrics", index, "hcas", position)
        if hca in own:
            yield Remark(path=path, expected="each adapter once", hint=f"{name} lists it already")
        elif hca in holders:
            hint = f"{holders[hca]} has it already; a wrong one makes replicas start and hang at their first all-reduce"
            yield Remark(path=path, expected="an adapter that is on no other fabric", hint=hint)
        own.add(hca)
        holders.setdefault(hca, name)


def agent_config(file: AgentFile) -> AgentConfig:
    """The file with nothing wrong in it, as the rest of the program sees it."""
    return AgentConfig(
        servers=tuple(map(str, file.server)),
        tls=AgentTls(ca=file.tls.ca, cert=file.tls.cert, key=file.tls.key),
        node_id=file.node_id,
        mgmt_addr=file.mgmt_addr,
        mgmt_interface=file.mgmt_interface,
        labels=dict(file.labels),
        heartbeat_interval_s=file.heartbeat_interval,
        reconnect_base_s=file.reconnect_base,
        reconnect_max_s=file.reconnect_max,
        fabrics=tuple(Fabric(name=one.name, hcas=tuple(one.hcas), rate_gbps=one.rate_gbps) for one in file.fabrics),
        discovery=Discovery(
            nvidia_smi=file.discovery.nvidia_smi,
            ib_root=file.discovery.ib_root,
            prefer_nvml=file.discovery.prefer_nvml,
        ),
        model_dirs=tuple(file.model_dirs),
        weights_dir=file.weights_dir,
        engines_dir=file.engines_dir,
        ports=file.ports,
        engines=_engines(file.engines),
        supervisor=SupervisorConfig(
            work_dir=file.supervisor.work_dir,
            log_lines=file.supervisor.log_lines,
            stop_timeout_s=file.supervisor.stop_timeout,
            health_interval_s=file.supervisor.health_interval,
        ),
    )


def _engines(file: EnginesFile) -> AgentEngines:
    vllm, sglang, llamacpp = file.vllm, file.sglang, file.llamacpp
    return AgentEngines(
        vllm=_vllm(vllm) if vllm else None,
        sglang=SglangOnNode(python=sglang.python, build=sglang.build) if sglang else None,
        llamacpp=LlamacppOnNode(bin=llamacpp.bin, build=llamacpp.build) if llamacpp else None,
    )


def _vllm(file: VllmFile) -> VllmOnNode:
    return VllmOnNode(bin=file.bin, launch_mode=file.launch_mode, ray_bin=file.ray_bin, build=file.build)
