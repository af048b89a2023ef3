"""``llmgw ctl cert``: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmgw.cli.cert import app, parse_lifetime
from llmgw.pki.names import PkiError


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    assert run("init-ca", "--dir", tmp_path / "pki", "--cluster", "lab")[0] == 0
    return tmp_path / "pki"


def test_an_authority(tmp_path: Path):
    status, out, err = run("init-ca", "--dir", tmp_path / "pki", "--cluster", "lab")
    assert (status, err) == (0, "")
    first, second, issuer, where, last = out.splitlines()
    assert re.fullmatch(
        rf"wrote {tmp_path}/pki/ca.pem and \S+/ca-key.pem \(cluster 'lab', until 20\d\d-\d\d-\d\d\)", first
    )
    assert second == f"keep {tmp_path}/pki/ca-key.pem secret: whoever reads it can be any node"
    assert issuer.startswith(f"wrote {tmp_path}/pki/issuer.pem and {tmp_path}/pki/issuer-key.pem (issuing key of 'lab'")
    assert where.startswith("they belong beside ca.pem on the control plane")
    assert last.startswith(f"next: llmgw ctl cert issue-server --dir {tmp_path}/pki --san ")
    status, out, err = run("init-ca", "--dir", tmp_path / "pki")
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/pki/ca-key.pem exists: there is an authority already")


def test_a_server(pki: Path, tmp_path: Path):
    out_dir = tmp_path / "s"
    names = ("--san", "10.0.0.1", "--san", "cp", "--name", "cp-1")
    arguments = ("issue-server", "--dir", pki, *names, "--out", out_dir)
    status, out, _ = run(*arguments)
    assert status == 0
    assert out.startswith(
        f"wrote {out_dir}/server.pem, {out_dir}/server-key.pem and {out_dir}/ca.pem "
        "(server 'cp-1' at 10.0.0.1, cp, until 20"
    )
    status, _, err = run(*arguments)
    assert status == 1
    assert err == (
        f"error: {out_dir}/server.pem exists already; nothing was changed: name another --out, or renew with --force\n"
    )
    assert run(*arguments, "--force")[0] == 0


def test_a_node_in_the_current_directory(pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("issue-client", "gpu-1", "--dir", pki, "--lifetime", "24h")
    assert status == 0
    assert out.splitlines()[0].startswith("wrote gpu-1.pem, gpu-1-key.pem and ca.pem (node 'gpu-1', until ")
    status, out, _ = run("show", "gpu-1.pem")
    assert status == 0
    shown = dict(re.findall(r"^([a-zA-Z0-9- ]+): +(.*)$", out, re.MULTILINE))
    assert (shown["name"], shown["cluster"], shown["roles"]) == ("gpu-1", "lab", "node gpu-1")
    assert shown["valid until"].endswith("(24 hours left)")
    assert shown["issued by"].startswith("'llmgw lab authority', key ")


def test_refusals(pki: Path, tmp_path: Path):
    for arguments, words in {
        ("issue-client", "../x", "--dir", str(pki)): "error: node id '../x' can't be used",
        ("issue-client", "x", "--dir", str(tmp_path)): "error: there is no authority in",
        ("issue-client", "x", "--dir", str(pki), "--lifetime", "5"): "error: --lifetime '5': such as 1y, 365d or 24h",
        ("show", str(pki / "ca-key.pem")): f"error: the certificate {pki}/ca-key.pem is a private key",
        ("show", str(pki / "none.pem")): f"error: the certificate {pki}/none.pem does not exist",
    }.items():
        status, out, err = run(*arguments)
        assert (status, out) == (1, "")
        assert err.startswith(words)
        assert err.count("\n") == 1
    written = sorted(path.name for path in tmp_path.rglob("*.pem"))
    assert written == ["ca-key.pem", "ca.pem", "issuer-key.pem", "issuer.pem"]


def test_an_authority_that_stays_offline_has_no_issuing_key_until_one_is_made(tmp_path: Path):
    pki, out = tmp_path / "pki", tmp_path / "cp"
    assert run("init-ca", "--dir", pki, "--no-issuer")[0] == 0
    assert sorted(path.name for path in pki.iterdir()) == ["ca-key.pem", "ca.pem"]
    status, said, _ = run("issue-issuer", "--dir", pki, "--out", out, "--lifetime", "1y")
    assert status == 0
    assert said.startswith(f"wrote {out}/issuer.pem and {out}/issuer-key.pem (issuing key of 'llmgw', until 20")
    assert (out / "issuer-key.pem").stat().st_mode & 0o777 == 0o600
    before = (out / "issuer.pem").read_bytes()
    status, _, err = run("issue-issuer", "--dir", pki, "--out", out)
    assert (status, (out / "issuer.pem").read_bytes()) == (1, before)
    assert "exists already; nothing was changed" in err
    assert run("issue-issuer", "--dir", pki, "--out", out, "--force")[0] == 0
    assert (out / "issuer.pem").read_bytes() != before


@pytest.mark.parametrize(("text", "days"), [("1y", 365.0), ("2y", 730.0), ("365d", 365.0), ("24h", 1.0)])
def test_lifetimes(text: str, days: float):
    assert parse_lifetime(text) == days * 86400


@pytest.mark.parametrize("text", ["", "y", "0y", "1.5y", "1 y", "-1d", "1000000000000d"])
def test_no_lifetimes(text: str):
    with pytest.raises(PkiError):
        parse_lifetime(text)
