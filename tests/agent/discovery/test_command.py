"""``llmgw agent discover``, as the function behind it and as the table that people read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from llmgw.agent.discovery import DiscoverySettings, discover, read_vitals
from llmgw.cli.discover import render, run_discover
from llmgw.cluster.model import Fabric

from .machines import write_machine, write_nvidia_smi, write_port

TLS = "tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}\n"


def test_json_has_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_discover(None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["inventory"]["memory_bytes"] > 0
    assert answer["inventory"]["ports"] == {"first": 20000, "last": 29999}
    assert answer["vitals"]["disk_bytes"] > 0
    assert len(answer["fingerprint"]) == 64
    assert answer["boot_id"]


def test_a_table_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_discover(None, as_json=False) == 0
    out = capsys.readouterr().out
    for name in ("Hostname", "Management", "Processor", "Memory", "Disk"):
        assert name in out


def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.yaml").write_text("servers: https://x\n")
    assert run_discover(tmp_path / "agent.yaml", as_json=True) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "agent.yaml:1" in err


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabric = "fabrics: [{name: ib-a, hcas: [mlx5_77]}]\n"
    (tmp_path / "agent.yaml").write_text(f"server: https://127.0.0.1:7443\n{TLS}{fabric}")
    assert run_discover(tmp_path / "agent.yaml", as_json=False) == 1
    assert "fabric ib-a names the adapter mlx5_77" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 200])
async def test_the_table_keeps_every_fact_at_every_width(tmp_path: Path, width: int) -> None:
    root = write_machine(tmp_path, cpu="kvm64")
    ib_root = root / "sys/class/infiniband"
    write_port(ib_root, "mlx5_0")
    write_port(ib_root, "mlx5_1", state="2: INIT")
    settings = DiscoverySettings(
        root=root,
        ib_root=ib_root,
        nvidia_smi=write_nvidia_smi(root, {"*": (0, "lost_gpu_3_cells.csv")}),
        prefer_nvml=False,
        servers=("https://127.0.0.1:7443",),
        fabrics=(Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1")),),
        labels={"rack": "r12"},
    )
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(render(await discover(settings), read_vitals(tmp_path), tmp_path))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for fact in ("mlx5_0/1", "mlx5_1/1", "ib-a", "127.0.0.1 on lo", "Common KVM processor", "rack=r12", "no AVX2"):
        assert fact in text
    for number in range(8):
        assert f"GPU-5c1d7a{number}0-33f1-8f6e-0b7a-9d2c4e6f8a1{number}" in text
    assert "GPU is lost" in " ".join(text.split())


async def test_fabrics_and_nvlink_groups_can_be_read(tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    ib_root = root / "sys/class/infiniband"
    write_port(ib_root, "mlx5_0")
    write_port(ib_root, "mlx5_1", state="1: DOWN", phys_state="2: Polling")
    write_port(ib_root, "mlx5_2")
    (write_port(ib_root, "mlx5_3") / "state").write_text("?")
    answers = {"topo\\ -m": (0, "../topo/a40x4_bridged.txt"), "*": (0, "h100x8.csv")}
    settings = DiscoverySettings(
        root=root,
        ib_root=ib_root,
        nvidia_smi=write_nvidia_smi(root, answers),
        prefer_nvml=False,
        servers=("https://127.0.0.1:7443",),
        fabrics=(
            Fabric(name="ib-a", hcas=("mlx5_0",)),
            Fabric(name="ib-b", hcas=("mlx5_1",)),
            Fabric(name="ib-c", hcas=("mlx5_2", "mlx5_3")),
        ),
    )
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(
        render(await discover(settings), read_vitals(tmp_path), tmp_path)
    )
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "NVLink group 0: GPUs 0-1; group 1: GPUs 2-3" in lines
    assert "ib-a mlx5_0/1 400 fe80:0000:0000:0000 yes" in lines
    assert "ib-b mlx5_1/1 - fe80:0000:0000:0000 no: mlx5_1/1 is DOWN" in lines
    assert "ib-c mlx5_2/1 400 fe80:0000:0000:0000 unverified: mlx5_3/1" in lines
