from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.cli.check import check_agent, check_server

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def test_a_good_servers_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_server(EXAMPLES / "server.yaml") == 0
    told = "ok (cluster lab, 3 models, 4 profiles; engines: llamacpp b10991, vllm 0.33.0)"
    assert capsys.readouterr() == (f"{EXAMPLES / 'server.yaml'}: {told}\n", "")


def test_a_good_agents_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_agent(EXAMPLES / "agent-full.yaml") == 0
    fabric = "1 fabric: ib-a (mlx5_0, mlx5_1, mlx5_2, mlx5_3)"
    told = f"ok (node gpu-a-01; to https://10.0.0.140:7443; {fabric}; engines of its own: vllm, sglang, llamacpp)"
    assert capsys.readouterr() == (f"{EXAMPLES / 'agent-full.yaml'}: {told}\n", "")


@pytest.mark.parametrize("check", [check_server, check_agent])
def test_a_bad_file_is_told_on_stderr(check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("zzqqzz: 1\n")
    assert check(path) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{path} can't be used: ")
    assert "the unknown key `zzqqzz`" in err
