"""The REST API: who may ask it, and what it says to who may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.onboarding.proxmox import ProxmoxError
from llmgw.onboarding.proxmox_api import Api
from llmgw.pki.authority import Authority
from tests.onboarding.provisioning import SECRET, TOKEN_ID, Site, free_port, over_api, site


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    tokens = {TOKEN_ID: {"secret": SECRET}, "llmgw@pve!small": {"secret": SECRET, "may": ["VM.Audit"]}}
    return site(tmp_path, monkeypatch, tokens=tokens)


async def test_it_finds_out_which_node_answers(at: Site) -> None:
    async with over_api(at) as proxmox, proxmox:
        assert proxmox.node == "pve1"
        assert proxmox.command("terminal", "144") == "qm terminal 144 (on pve1)"


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (f"{TOKEN_ID}=wrong", "invalid token value!"),
        (f"llmgw@pve!nobody={SECRET}", "no such token 'nobody' for user 'llmgw@pve'"),
    ],
)
async def test_a_token_that_is_not_accepted(at: Site, token: str, words: str) -> None:
    async with over_api(at, token=token) as proxmox:
        with pytest.raises(ProxmoxError) as refused:
            await proxmox.__aenter__()
    assert words in str(refused.value)
    assert refused.value.kind == "denied"
    assert "wrong" not in str(refused.value)
    assert SECRET not in str(refused.value)


async def test_a_token_that_may_not(at: Site) -> None:
    async with over_api(at, token=f"llmgw@pve!small={SECRET}") as proxmox, proxmox:
        with pytest.raises(ProxmoxError) as refused:
            await proxmox.create(144, {"name": "n"}, ())
        # What it may not see is not looked at; it is no reason to end.
        assert await proxmox.bridges() is None
    assert "Permission check failed (/vms/144, VM.Allocate)" in str(refused.value)
    assert "privilege separation" in str(refused.value)
    assert refused.value.look == "pveum user token permissions llmgw@pve small"
    assert SECRET not in str(refused.value)


async def test_parameters_that_are_wrong_are_named(at: Site) -> None:
    async with over_api(at) as proxmox, proxmox:
        with pytest.raises(ProxmoxError, match=r"Parameter verification failed\. \(cores: type check"):
            await proxmox.create(144, {"name": "n", "cores": "many"}, ())


async def test_a_certificate_that_nobody_vouches_for(at: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Authority.create(other, "elsewhere")
    async with over_api(at, ca=other / "ca.pem") as proxmox:
        with pytest.raises(ProxmoxError, match=r"/etc/pve/pve-root-ca\.pem from the host and name it with --api-ca"):
            await proxmox.__aenter__()
    assert at.api.requests == []


async def test_nobody_answers(at: Site) -> None:
    proxmox = Api(f"https://127.0.0.1:{free_port()}", f"{TOKEN_ID}={SECRET}")
    with pytest.raises(ProxmoxError) as refused:
        await proxmox.__aenter__()
    assert refused.value.kind == "unreachable"


@pytest.mark.parametrize(
    "url", ["http://pve1:8006", "https://", "https://pve1:8006/other", "ftp://pve1", "https://a:b"]
)
def test_what_is_no_address_of_it(url: str) -> None:
    with pytest.raises(ProxmoxError, match="the token is not sent unencrypted"):
        Api(url, f"{TOKEN_ID}={SECRET}")


def test_what_is_no_token() -> None:
    with pytest.raises(ProxmoxError, match="USER@REALM!ID=SECRET is expected") as refused:
        Api("pve1", "hunter2")
    assert "hunter2" not in str(refused.value)


async def test_it_is_no_proxmox(at: Site) -> None:
    async with over_api(at) as proxmox, proxmox:
        with pytest.raises(ProxmoxError, match="No '/other' handler defined"):
            await proxmox.read("/other")
