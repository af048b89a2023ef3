"""The files that are published, and what they say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from llmgw.cluster.catalog import EngineSpec, SimOptions
from llmgw.cluster.model import Fabric, PortRange
from llmgw.config import HostPort, load_agent, load_server, parse_agent, parse_server
from llmgw.config.agent import AgentTls, Discovery, LlamacppOnNode, SglangOnNode, SupervisorConfig, VllmOnNode
from llmgw.config.server import DrainPolicy, FrontTls, GatewayConfig, Listen, NodesPolicy, ServerTls, Timeouts
from llmgw.engines.builds import DEFAULT_ENGINES

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
PKI = Path("/etc/llmgw/pki")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_each_published_example_loads(path: Path) -> None:
    load = load_agent if path.name.startswith("agent") else load_server
    assert load(path)


def test_the_whole_of_server_yaml() -> None:
    config = load_server(EXAMPLES / "server.yaml")
    assert config.cluster == "lab"
    assert config.listen == Listen(
        gateway=HostPort("0.0.0.0", 8080),
        admin=HostPort("127.0.0.1", 8081),
        agents=HostPort("0.0.0.0", 7443),
        metrics=HostPort("127.0.0.1", 9464),
    )
    assert config.advertise == ("https://10.0.0.140:7443",)
    assert config.tls == ServerTls(
        ca=PKI / "ca.pem", cert=PKI / "server.pem", key=PKI / "server-key.pem", lifetime_s=86400.0
    )
    assert config.store == "sqlite:////var/lib/llmgw/llmgw.db"
    assert config.nodes == NodesPolicy(suspect_after_s=15.0, lost_after_s=30.0)
    assert config.drain == DrainPolicy(in_flight_s=600.0)
    assert config.gateway == GatewayConfig(
        workers=1,
        tls=FrontTls(cert=PKI / "gateway.pem", key=PKI / "gateway-key.pem"),
        body_limit_bytes=256 * 1024 * 1024,
        queue=100,
        hold_for_s=300.0,
        timeouts=Timeouts(queue_s=60.0, first_token_s=600.0, between_tokens_s=60.0, total_s=1800.0),
    )


def test_the_catalog_of_server_yaml() -> None:
    catalog = load_server(EXAMPLES / "server.yaml").catalog
    assert catalog.engines == (
        EngineSpec(name="llamacpp", version="b10991", source="github"),
        EngineSpec(name="vllm", version="0.33.0", source="index"),
    )
    qwen, gemma, rehearsal = catalog.models
    assert (qwen.name, qwen.aliases, qwen.task, qwen.replicas) == ("qwen3-32b", ("default",), "generate", 2)
    assert qwen.source == "hf://Qwen/Qwen3-32B@9216db5781bf21249d130ec9da846c4624c16137"
    two, one = qwen.profiles
    assert (two.name, two.engine, two.nodes, two.gpus_per_node) == ("two-nodes", "vllm", 2, 4)
    assert (two.tensor_parallel, two.pipeline_parallel, two.max_concurrency) == (4, 2, 64)
    assert (two.node_selector, two.args) == ({"rack": "r12"}, ("--max-model-len", "32768"))
    assert (one.nodes, one.tensor_parallel, one.pipeline_parallel) == (1, 8, 1)
    (on_cpu,) = gemma.profiles
    assert (on_cpu.name, on_cpu.memory_bytes, on_cpu.context, on_cpu.parallel) == ("llamacpp", 2**30, 8192, 4)
    assert (on_cpu.gpus_per_node, on_cpu.tensor_parallel, on_cpu.pipeline_parallel) == (0, 1, 1)
    (sim,) = rehearsal.profiles
    assert rehearsal.source is None
    assert (sim.tensor_parallel, sim.pipeline_parallel) == (4, 2)
    assert sim.sim == SimOptions(load_time_s=2.0, first_token_s=0.05, token_interval_s=0.01)


def test_models_alone_make_the_example_but_for_names_and_front_tls() -> None:
    plain = parse_server("models: []", "/etc/llmgw/server.yaml")
    example = load_server(EXAMPLES / "server.yaml")
    assert plain.cluster == "llmgw"
    assert plain.advertise == ()
    assert plain.gateway.tls is None
    for field in ("listen", "tls", "store", "nodes", "drain"):
        assert getattr(plain, field) == getattr(example, field)
    for field in ("workers", "body_limit_bytes", "queue", "hold_for_s", "timeouts"):
        assert getattr(plain.gateway, field) == getattr(example.gateway, field)


def test_engines_left_out_are_the_default_build_and_an_empty_section_is_none() -> None:
    assert parse_server("models: []", "f").catalog.engines == DEFAULT_ENGINES
    assert parse_server("models: []\nengines: {}", "f").catalog.engines == ()


def test_an_engine_from_a_mirror_and_one_from_an_index() -> None:
    text = "models: []\nengines:\n  llamacpp: {version: b1, source: {url: 'http://mirror/x.tgz', sha256: %s}}\n" % (
        "AB" * 32
    ) + ("  sglang: {version: 0.5.23, package: sglang-ours}\n")
    llamacpp, sglang = parse_server(text, "f").catalog.engines
    assert llamacpp == EngineSpec(name="llamacpp", version="b1", source="http://mirror/x.tgz", sha256="ab" * 32)
    assert sglang == EngineSpec(name="sglang", version="0.5.23", source="index", package="sglang-ours")


def test_the_whole_of_agent_full_yaml() -> None:
    config = load_agent(EXAMPLES / "agent-full.yaml")
    etc, lib = Path("/etc/llmgw"), Path("/var/lib")
    assert config.servers == ("https://10.0.0.140:7443",)
    assert config.tls == AgentTls(ca=etc / "ca.pem", cert=etc / "agent.pem", key=etc / "agent-key.pem")
    assert (config.node_id, config.mgmt_addr, config.mgmt_interface) == ("gpu-a-01", "10.0.0.11", "eth0")
    assert config.labels == {"rack": "r12"}
    assert (config.heartbeat_interval_s, config.reconnect_base_s, config.reconnect_max_s) == (5.0, 1.0, 30.0)
    assert config.fabrics == (Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), rate_gbps=200.0),)
    assert config.discovery == Discovery(nvidia_smi=None, ib_root=Path("/sys/class/infiniband"), prefer_nvml=True)
    assert config.model_dirs == (lib / "llmgw-models", Path("/mnt/lustre/models"))
    assert (config.weights_dir, config.engines_dir) == (lib / "llmgw-weights", Path("/opt/llmgw/engines"))
    assert config.ports == PortRange(20000, 29999)
    venvs = Path("/opt/venvs")
    assert config.engines.vllm == VllmOnNode(
        bin=venvs / "vllm/bin/vllm", launch_mode="ray", ray_bin=venvs / "vllm/bin/ray"
    )
    assert config.engines.sglang == SglangOnNode(python=venvs / "sglang/bin/python")
    assert config.engines.llamacpp == LlamacppOnNode(bin=Path("/opt/llama.cpp/llama-server"))
    assert config.supervisor == SupervisorConfig(
        work_dir=lib / "llmgw-agent", log_lines=512, stop_timeout_s=60.0, health_interval_s=2.0
    )


def test_what_the_minimal_agent_leaves_out_is_what_the_full_one_states() -> None:
    minimal, full = (
        asdict(load_agent(EXAMPLES / "agent-minimal.yaml")),
        asdict(load_agent(EXAMPLES / "agent-full.yaml")),
    )
    assert minimal["servers"] == ("https://10.0.0.140:7443", "https://10.0.0.141:7443")
    stated = {"servers", "node_id", "mgmt_addr", "mgmt_interface", "labels", "fabrics", "model_dirs", "engines"}
    assert {key for key, value in minimal.items() if value != full[key]} == stated


def test_relative_paths_start_at_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "server.yaml").write_text("models: []\ntls: {ca: pki/ca.pem}\nstore: sqlite:///db/llmgw.db\n")
    monkeypatch.chdir(tmp_path)
    config = load_server("etc/server.yaml")
    assert config.tls.ca == tmp_path / "etc/pki/ca.pem"
    assert config.store == f"sqlite:///{tmp_path}/etc/db/llmgw.db"


def test_programs_by_name_stay_names_and_by_path_are_located() -> None:
    text = "server: https://a\ntls: {ca: a, cert: b, key: c}\ndiscovery: {nvidia_smi: %s}"
    assert parse_agent(text % "nvidia-smi", "/etc/agent.yaml").discovery.nvidia_smi == "nvidia-smi"
    assert parse_agent(text % "./fake", "/etc/agent.yaml").discovery.nvidia_smi == "/etc/fake"


def test_an_address_without_a_port_means_the_agents_port() -> None:
    config = parse_agent("server: https://control.lab\ntls: {ca: a, cert: b, key: c}", "f")
    assert config.servers == ("https://control.lab:7443",)


def test_profiles_without_a_name_are_called_after_their_engine() -> None:
    text = """
models:
  - name: a
    source: /models/a
    profiles:
      - {engine: vllm, gpus_per_node: 8}
      - {name: vllm-2, engine: vllm, gpus_per_node: 4}
      - {engine: vllm, gpus_per_node: 2}
      - {engine: sim}
"""
    (model,) = parse_server(text, "f").catalog.models
    assert [profile.name for profile in model.profiles] == ["vllm", "vllm-2", "vllm-3", "sim"]


@pytest.mark.parametrize(
    ("asked", "tensor", "pipeline"),
    [
        ("nodes: 2, gpus_per_node: 4", 4, 2),
        ("nodes: 2, gpus_per_node: 4, tensor_parallel: 8", 8, 1),
        ("nodes: 2, gpus_per_node: 4, pipeline_parallel: 4", 2, 4),
        ("nodes: 2, gpus_per_node: 4, pipeline_parallel: 1", 8, 1),
        ("gpus_per_node: 8", 8, 1),
        ("nodes: 2", 1, 1),
        ("nodes: 2, tensor_parallel: 2", 2, 1),
    ],
)
def test_parallelism_left_out_is_what_the_gpus_leave(asked: str, tensor: int, pipeline: int) -> None:
    text = f"models: [{{name: a, profiles: [{{engine: sim, {asked}}}]}}]"
    (profile,) = parse_server(text, "f").catalog.models[0].profiles
    assert (profile.tensor_parallel, profile.pipeline_parallel) == (tensor, pipeline)


@pytest.mark.parametrize(
    ("stated", "suspect_after_s", "heartbeat_s"),
    [("", 15.0, 5.0), ("nodes: {lost_after: 5s}", 2.5, 2.5 / 3), ("nodes: {lost_after: 10m}", 15.0, 5.0)],
)
def test_patience_follows_from_when_a_node_is_lost(
    tmp_path: Path, stated: str, suspect_after_s: float, heartbeat_s: float
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"{stated}\nmodels: []\n")
    nodes = load_server(file).nodes
    assert (nodes.suspect_after_s, nodes.heartbeat_s) == (suspect_after_s, heartbeat_s)
