from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.discovery import DiscoveryRefused, DiscoverySettings, discover, settings_of
from llmgw.agent.discovery.infiniband import NO_SUBNET_MANAGER
from llmgw.cluster.model import Fabric, PortRange
from llmgw.config import load_agent

from .machines import write_machine, write_nvidia_smi, write_port, write_script


def settings_for(root: Path, **stated: object) -> DiscoverySettings:
    base = DiscoverySettings(
        root=root,
        ib_root=root / "sys/class/infiniband",
        nvidia_smi=str(root / "nvidia-smi"),
        prefer_nvml=False,
        servers=("https://127.0.0.1:7443",),
        weights_dir=root,
    )
    return replace(base, **stated)  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    root = write_machine(tmp_path)
    write_nvidia_smi(root, {"*": (0, "h100x8.csv")})
    for number in range(4):
        write_port(root / "sys/class/infiniband", f"mlx5_{number}", numa_node=str(number // 2))
    return root


async def test_a_whole_machine(machine: Path) -> None:
    stated = settings_for(
        machine,
        fabrics=(Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1")),),
        labels={"rack": "r12"},
        ports=PortRange(30000, 30999),
        launch_modes={"vllm": "mp"},
    )
    found = await discover(stated)
    assert (found.hostname, found.os, found.kernel) == (
        "gpu-a-01",
        "Debian GNU/Linux 12 (bookworm)",
        "6.8.0-60-generic",
    )
    assert (found.cpu.model, found.cpu.cores) == ("AMD EPYC 9354 32-Core Processor", 64)
    assert found.memory_bytes == 1056270840 * 1024
    assert (found.mgmt_addr, found.mgmt_interface) == ("127.0.0.1", "lo")
    assert (len(found.gpus), found.gpu_source, found.driver) == (8, "nvidia-smi", "570.124.06")
    assert [hca.name for hca in found.hcas] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert found.fabrics == (Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1"), rate_gbps=400.0),)
    assert (found.labels, found.ports, found.launch_modes) == (
        {"rack": "r12"},
        PortRange(30000, 30999),
        {"vllm": "mp"},
    )
    assert found.warnings == ()


async def test_this_machine() -> None:
    found = await discover(DiscoverySettings())
    assert found.memory_bytes > 0
    assert found.cpu.cores >= 1
    assert found.hostname == os.uname().nodename
    assert found.os != "unknown"


async def test_the_same_machine_is_an_equal_value_every_time(machine: Path) -> None:
    write_script(machine / "nvidia-smi", "exec sleep 60")
    write_port(machine / "sys/class/infiniband", "mlx5_0", state="2: INIT")
    stated = settings_for(machine, probe_limit_s=0.2)
    first = await discover(stated)
    assert first == await discover(stated)
    assert any("probe hung" in warning for warning in first.warnings)
    assert any(NO_SUBNET_MANAGER in warning for warning in first.warnings)


async def test_a_machine_that_says_nothing_is_still_described(tmp_path: Path) -> None:
    found = await discover(settings_for(tmp_path, nvidia_smi=None))
    assert found.os == "unknown"
    assert found.memory_bytes > 0
    assert found.gpus == ()
    assert any("machine-id" in warning for warning in found.warnings)


async def test_all_that_is_wrong_is_said_and_stops_nothing(machine: Path) -> None:
    write_machine(machine, cpu="kvm64")
    write_nvidia_smi(machine, {"*": (9, "rc9.txt")})
    (machine / "etc/machine-id").write_text("uninitialized\n")
    write_port(machine / "sys/class/infiniband", "mlx5_3", state="2: INIT")
    found = await discover(settings_for(machine, mgmt_addr="203.0.113.9"))
    for words in ("no AVX2", "machine-id", "modprobe nvidia", NO_SUBNET_MANAGER, "mgmt_addr 203.0.113.9"):
        assert sum(words in warning for warning in found.warnings) == 1, words
    assert (len(found.hcas), found.gpus) == (4, ())


async def test_an_adapter_that_the_machine_lacks_is_refused_at_the_start_and_said_later(machine: Path) -> None:
    stated = settings_for(machine, fabrics=(Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_9")),))
    with pytest.raises(DiscoveryRefused, match="fabric ib-a names the adapter mlx5_9"):
        await discover(stated)
    before = await discover(settings_for(machine))
    found = await discover(stated, before)
    assert any("fabric ib-a names the adapter mlx5_9" in warning for warning in found.warnings)


async def test_gpus_whose_driver_hangs_are_kept_as_not_usable_until_it_answers(machine: Path) -> None:
    stated = settings_for(machine)
    before = await discover(stated)
    write_script(machine / "nvidia-smi", "exec sleep 60")
    hung = await discover(replace(stated, probe_limit_s=0.3), before)
    assert [gpu.uuid for gpu in hung.gpus] == [gpu.uuid for gpu in before.gpus]
    assert {gpu.problem for gpu in hung.gpus} == {"the driver did not answer the last probe"}
    assert hung.gpu_source == "nvidia-smi"
    write_nvidia_smi(machine, {"*": (0, "h100x8.csv")})
    assert await discover(stated, hung) == before


async def test_two_hundred_runs_leak_no_descriptor_thread_or_process(machine: Path) -> None:
    stated = settings_for(machine)
    for _ in range(5):
        await discover(stated)

    def held() -> tuple[int, int, int]:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)

    # The event loop's own pool of threads grows up to its size; what a run adds beyond that would be a leak.
    before = held()
    for _ in range(200):
        await discover(stated)
    after = held()
    assert after[0] == before[0]
    assert after[2] == before[2] == 0
    assert after[1] - before[1] <= 8


def test_settings_come_from_the_agents_file(tmp_path: Path) -> None:
    for name in ("ca.pem", "agent.pem", "agent-key.pem"):
        (tmp_path / name).write_text("")
    (tmp_path / "agent.yaml").write_text(
        f"""
server: [https://10.0.0.140:7443, https://10.0.0.141:7443]
tls: {{ca: {tmp_path}/ca.pem, cert: {tmp_path}/agent.pem, key: {tmp_path}/agent-key.pem}}
mgmt_addr: 10.0.0.11
mgmt_interface: eth0
labels: {{rack: r12}}
fabrics: [{{name: ib-a, hcas: [mlx5_0], rate_gbps: 200}}]
discovery: {{nvidia_smi: "", ib_root: /tmp/ib, prefer_nvml: false}}
weights_dir: /srv/weights
ports: 25000-25999
engines: {{vllm: {{launch_mode: ray}}}}
"""
    )
    found = settings_of(load_agent(tmp_path / "agent.yaml"))
    assert found.servers == ("https://10.0.0.140:7443", "https://10.0.0.141:7443")
    assert (found.mgmt_addr, found.mgmt_interface, dict(found.labels)) == ("10.0.0.11", "eth0", {"rack": "r12"})
    assert found.fabrics == (Fabric(name="ib-a", hcas=("mlx5_0",), rate_gbps=200),)
    assert not found.nvidia_smi
    assert (found.ib_root, found.prefer_nvml, found.weights_dir) == (Path("/tmp/ib"), False, Path("/srv/weights"))
    assert (found.ports, dict(found.launch_modes)) == (PortRange(25000, 25999), {"vllm": "ray"})
