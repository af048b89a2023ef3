"""Why something does not run, in the words of whoever knows: through the real stream, `ctl why` and the gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab, eventually
from tests.cluster.streams import ask

UNPLACEABLE = """\
models:
  - name: big
    profiles: [{engine: sim, memory: 4TiB}]
  - name: gpus
    profiles: [{engine: sim, gpus_per_node: 2}]
  - name: labelled
    profiles: [{engine: sim, memory: 8MiB, node_selector: {rack: r12}}]
  - name: several
    profiles: [{engine: sim, nodes: 2, gpus_per_node: 4}]
  - name: vllm
    source: /models/org/name
    profiles: [{engine: vllm, gpus_per_node: 1}]
  - name: hub
    source: hf://org/name/model.gguf
    profiles: [{engine: llamacpp, memory: 1GiB}]
"""


def ctl(lab: Lab, *arguments: str) -> str:
    context = lab.context()
    env = {**os.environ, "LLMGW_SERVER": context.server, "LLMGW_TOKEN": context.token, "COLUMNS": "250"}
    command = [sys.executable, "-m", "llmgw", "ctl", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def test_each_refusal_names_what_is_short() -> None:
    lab = Lab.make(UNPLACEABLE, extra="gateway: {hold_for: 1s}\n")
    try:
        lab.server()
        lab.agent("n1", "labels: {rack: r11}\n")
        eventually(lambda: lab.get("nodes") and lab.get("nodes")[0]["state"] == "ready", "the node is ready")
        models = {model["name"]: model["why"] for model in lab.get("models")}
        assert "4 TiB needed" in models["big"]
        assert "GiB" in models["big"]
        assert "2" in models["gpus"]
        assert "GPU" in models["gpus"]
        assert "rack" in models["labelled"]
        assert "r11" in models["labelled"]
        assert "no node is on a fabric, and a replica over 2 nodes needs one" in models["several"]
        assert "n1: has no vllm" in models["vllm"]
        assert "hf://org/name/model.gguf" in models["hub"]
        assert "index:NAME==VERSION/FILE" in models["hub"]
        for name, words in models.items():
            tree = ctl(lab, "why", name)
            assert words.split(";")[0] in tree.replace("\n", " ")
        key = lab.key()
        answer = ask(lab, key, timeout_s=30, model="several")
        assert answer.status_code == 503
        assert "no replica of several is ready: 1 unplaced" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    finally:
        lab.close()


CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: QEMU Virtual CPU version 2.5+
flags\t\t: fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall
"""


def test_a_processor_without_avx2_is_warned_of_in_the_table(lab: Lab, tmp_path: Path) -> None:
    """What discovery finds on such a machine, sent by a node over the real stream, and shown to the operator."""
    import asyncio
    from dataclasses import replace

    from llmgw.agent.discovery import DiscoverySettings, discover, read_vitals
    from llmgw.link.client import ClientIdentity, LinkClient
    from llmgw.link.messages import Hello
    from llmgw.pki.authority import Authority

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    settings = DiscoverySettings(root=tmp_path, mgmt_addr="127.0.0.1", weights_dir=tmp_path)
    inventory = asyncio.run(discover(settings))
    inventory = replace(inventory, cpu=replace(inventory.cpu, architecture="x86_64"))
    Authority.load(lab.root / "pki").issue_client("old", tmp_path / "tls")
    identity = ClientIdentity(
        ca=tmp_path / "tls" / "ca.pem", cert=tmp_path / "tls" / "old.pem", key=tmp_path / "tls" / "old-key.pem"
    )
    lab.server()
    link = LinkClient(
        role="node",
        id="old",
        servers=(f"https://127.0.0.1:{lab.ports['agents']}",),
        tls=identity,
        hello=lambda: Hello(role="node", id="old", inventory=inventory, vitals=read_vitals(tmp_path), probed=True),
        vitals=lambda: read_vitals(tmp_path),
        on_frame=lambda frame: None,
        on_state=lambda state: None,
    )
    link.start()
    try:
        eventually(lambda: lab.get("nodes"), "the node is registered")
        table = ctl(lab, "nodes")
        assert " old: " in table
        assert "AVX2" in table
        assert "five times slower" in table
    finally:
        link.stop()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("server: http://127.0.0.1:7443\n", "plaintext"),
        ("server: https://127.0.0.1:7443\nnope: 1\n", "nope"),
    ],
)
def test_an_agent_refuses_a_file_in_words(lab: Lab, line: str, words: str) -> None:
    path = lab.agent_file("n1")
    text = path.read_text()
    path.write_text(text.replace(text.splitlines()[0] + "\n", line))
    for flags in (["--check"], []):
        command = [sys.executable, "-m", "llmgw", "agent", "--config", str(path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
