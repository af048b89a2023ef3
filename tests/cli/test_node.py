"""``llmgw node``: its options are those of its page, and what can't be meant so is refused before anything is done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llmgw.cli.app import app
from llmgw.onboarding.node_file import BadFabric, Overrides, node_file, parse_fabrics
from llmgw.onboarding.release import Build, NoBinary, asset_of, build_to_install
from llmgw.pki.authority import Authority

PAGE = Path(__file__).parents[2] / "docs/node-onboarding.md"
SERVERS = ("--server", "https://10.0.0.1:7443")
ONBOARD = {
    *("--node", "--addr", "--server", "--fabric", "--mgmt-addr", "--mgmt-if", "--llamacpp-bin", "--vllm-bin"),
    *("--sglang-python", "--nvidia-smi", "--ib-root", "--pki", "--binary", "--releases", "--ssh-user", "--ssh-port"),
    *("--ssh-option", "--wait", "--dry-run"),
}
PROVISION = {
    *("--vmid", "--name", "--ip", "--gateway", "--dns", "--cores", "--memory", "--disk", "--storage", "--bridge"),
    *("--vlan", "--image", "--image-sha256", "--cpu", "--ssh-user", "--ssh-keys", "--gpu", "--api", "--api-token"),
    *("--api-ca", "--api-node", "--wait", "--dry-run"),
}


def options_of(command: str) -> set[str]:
    node = typer.main.get_command(app).commands["node"]  # type: ignore[attr-defined]
    return {option for parameter in node.commands[command].params for option in parameter.opts} - {"--help"}


def options_on_page(section: str) -> set[str]:
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `--")]
    return {option for row in rows for option in re.findall(r"--[a-z0-9-]+", row)}


@pytest.mark.parametrize(
    ("command", "section", "expected"),
    [("onboard", "llmgw-onboard-node", ONBOARD), ("provision", "llmgw-provision-node", PROVISION)],
)
def test_the_options_are_those_of_the_page(command: str, section: str, expected: set[str]) -> None:
    assert options_of(command) == expected
    assert options_on_page(section) == expected


def test_add_has_the_options_of_both() -> None:
    said_once = {"--node", "--addr"}
    assert options_of("add") == (ONBOARD | PROVISION | {"--provision-only", "--onboard-only"}) - said_once


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["node", *words], env={"COLUMNS": "200", "LLMGW_RELEASES": ""})
    return result.exit_code, " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_a_missing_option_is_a_usage_error() -> None:
    code, said = run("onboard", "--node", "n1", "--addr", "10.0.0.2")
    assert code == 2
    assert "Missing option '--server'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fabric", "a", "--fabric", "b"), "would take the same adapters (mlx5_0, mlx5_1)"),
        (("--fabric", "a:mlx5_0", "--fabric", "a:mlx5_1"), "--fabric a is given twice"),
        (("--fabric", "a:mlx5_0", "--fabric", "b:mlx5_0"), "adapter mlx5_0 is under two fabrics, a and b"),
        (("--fabric", "a", "--fabric", "b:mlx5_1"), "adapter mlx5_1 is under two fabrics, a and b"),
        (("--fabric", "a:"), "is not NAME or NAME:ADAPTER,ADAPTER"),
        (("--fabric", "a:mlx5_0,mlx5_0"), "names an adapter twice"),
        (("--server", "http://10.0.0.1:7443"), "10.0.0.1:7443"),
        (("--server", ","), "https://HOST:PORT is expected"),
        (("--node", "no such"), "no such"),
        (("--ssh-port", "70000"), "Invalid value for '--ssh-port'"),
    ],
)
def test_what_can_not_be_meant_so(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, output = run("onboard", "--node", "n1", "--addr", "10.0.0.2", *SERVERS, "--pki", str(tmp_path), *words)
    assert code == 2
    assert said in output


def test_without_an_authority(tmp_path: Path) -> None:
    code, said = run("onboard", "--node", "n1", "--addr", "10.0.0.2", *SERVERS, "--pki", str(tmp_path))
    assert code == 1
    assert f"no authority in {tmp_path}; run 'llmgw ctl cert init-ca' first" in said


def test_without_a_binary(tmp_path: Path) -> None:
    Authority.create(tmp_path, cluster="lab")
    code, said = run("onboard", "--node", "n1", "--addr", "10.0.0.2", *SERVERS, "--pki", str(tmp_path))
    assert code == 1
    assert "no llmgw binary; pass --binary" in said


def test_the_steps_are_printed_and_none_is_done(tmp_path: Path) -> None:
    Authority.create(tmp_path, cluster="lab")
    binary = tmp_path / "llmgw"
    binary.write_text("#!/bin/sh\necho llmgw v9.8.7\n")
    binary.chmod(0o755)
    words = ("onboard", "--node", "n1", "--addr", "192.0.2.1", *SERVERS, "--pki", str(tmp_path), "--dry-run")
    code, said = run(*words, "--binary", str(binary))
    assert code == 1
    assert "llmgw v9.8.7 is a release, and where releases are is not known here: give --releases URL" in said
    code, said = run(*words, "--binary", str(binary), "--releases", "https://releases.test")
    assert code == 0
    assert "[4/9] Install llmgw v9.8.7 [5/9] Write /etc/llmgw/agent.yaml [6/9]" in said


# -- which build


def test_of_a_release_only_the_version_counts(tmp_path: Path) -> None:
    assert build_to_install(None, "v1.2.3", None) == Build(version="v1.2.3")
    assert build_to_install(None, "v1.2.3", tmp_path / "llmgw").is_release
    assert asset_of("v1.2.3", "aarch64") == "llmgw-v1.2.3-linux-arm64"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("#!/bin/sh\necho curl 8.1\n", "is no llmgw: "),
        ("#!/bin/sh\necho llmgw v1.2.3; exit 1\n", "is no llmgw: "),
        ("#!/nowhere\n", "does not run here: "),
        (None, "there is no such file"),
    ],
)
def test_what_is_no_build(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "llmgw"
    if content is not None:
        file.write_text(content)
        file.chmod(0o755)
    with pytest.raises(NoBinary, match=re.escape(said)):
        build_to_install(file, "v1.2.3", None)


def test_a_build_that_is_no_release_is_copied(tmp_path: Path) -> None:
    file = tmp_path / "llmgw"
    file.write_text("#!/bin/sh\n# linux-arm64\necho llmgw v1.2.3+4.abcdef0\n")
    file.chmod(0o755)
    build = build_to_install(file, "v1.2.3", None)
    assert (build.version, build.file, build.architecture) == ("v1.2.3+4.abcdef0", file, "aarch64")


# -- the agent's file


def test_only_what_was_said_is_written() -> None:
    text = node_file("n1", ["https://10.0.0.1:7443"], Overrides(), says_id=False)
    assert [line.split(":")[0] for line in text.splitlines() if not line.startswith("#")] == ["server", "tls"]


def test_all_that_can_be_said() -> None:
    overrides = Overrides(
        fabrics=parse_fabrics(["ib-a:mlx5_0,mlx5_1", "ib-b:mlx5_2"]),
        mgmt_addr="10.0.0.2",
        mgmt_interface="eth0",
        llamacpp_bin="/opt/llama-server",
        vllm_bin="/opt/vllm",
        sglang_python="/opt/python",
        nvidia_smi="/opt/nvidia-smi",
        ib_root="/opt/ib",
    )
    from llmgw.config import parse_agent

    config = parse_agent(node_file("n1", ["https://a:1", "https://b:2"], overrides, says_id=True), "agent.yaml")
    assert config.servers == ("https://a:1", "https://b:2")
    assert (config.node_id, config.mgmt_addr, config.mgmt_interface) == ("n1", "10.0.0.2", "eth0")
    assert [(fabric.name, tuple(fabric.hcas)) for fabric in config.fabrics] == [
        ("ib-a", ("mlx5_0", "mlx5_1")),
        ("ib-b", ("mlx5_2",)),
    ]
    assert {name: str(path) for name, path in config.engines.programs.items()} == {
        "llamacpp": "/opt/llama-server",
        "vllm": "/opt/vllm",
        "sglang": "/opt/python",
    }
    assert (config.discovery.nvidia_smi, str(config.discovery.ib_root)) == ("/opt/nvidia-smi", "/opt/ib")


def test_two_fabrics_without_adapters() -> None:
    with pytest.raises(BadFabric, match="--fabric a and --fabric b would take the same adapters"):
        parse_fabrics(["a", "b"])
