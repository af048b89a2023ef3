"""pip's settings as uv's, and uv's complaints in words."""

from __future__ import annotations

import pytest

from llmgw.agent.fetch.pip_settings import read_settings
from llmgw.agent.install import pip_config
from llmgw.agent.install.uv import explain

LISTED = """
:env:.find-links='/opt/wheels /opt/more'
:env:.timeout='180'
global.cert='/nowhere/ca.pem'
global.extra-index-url='file:///opt/one/simple\\nfile:///opt/two/simple'
global.index-url='https://mirror.example/simple'
global.trusted-host='a.example b.example'
install.index-url='https://of-install.example/simple'
freeze.index-url='https://of-freeze.example/simple'
WARNING: something else
"""


def test_what_pip_goes_by_is_told_to_uv() -> None:
    settings = read_settings(LISTED, "install")
    assert pip_config.for_uv(settings, {}) == {
        "UV_DEFAULT_INDEX": "https://of-install.example/simple",
        "UV_EXTRA_INDEX_URL": "file:///opt/one/simple file:///opt/two/simple",
        "UV_FIND_LINKS": "/opt/wheels,/opt/more",
        "SSL_CERT_FILE": "/nowhere/ca.pem",
        "UV_INSECURE_HOST": "a.example b.example",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_what_uv_was_told_itself_stays() -> None:
    settings = read_settings(LISTED, "install")
    own = {"UV_INDEX_URL": "https://own.example", "UV_FIND_LINKS": "/own", "SSL_CERT_FILE": "/own/ca.pem"}
    added = pip_config.for_uv(settings, own)
    assert not {"UV_DEFAULT_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE"} & set(added)


@pytest.mark.parametrize(("value", "added"), [("true", {"UV_NO_INDEX": "true"}), ("0", {}), ("false", {})])
def test_no_index_is_a_truth(value: str, added: dict[str, str]) -> None:
    assert pip_config.for_uv({"no-index": value}, {}) == added


async def test_only_where_packages_come_from_is_taken_from_the_agents_environment() -> None:
    own = {
        "PATH": "/usr/bin:/bin",
        "UV_FIND_LINKS": "/own",
        "UV_TARGET": "/elsewhere",
        "UV_TORCH_BACKEND": "auto",
        "UV_INDEX_COMPANY_PASSWORD": "p",
        "PYTHONPATH": "/elsewhere",
        "VIRTUAL_ENV": "/elsewhere",
        "HTTPS_PROXY": "http://proxy.example",
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    made = await pip_config.environment(own)
    assert made["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert (made["UV_FIND_LINKS"], made["UV_INDEX_COMPANY_PASSWORD"]) == ("/own", "p")
    assert made["HTTPS_PROXY"] == "http://proxy.example"
    assert not {"UV_TARGET", "UV_TORCH_BACKEND", "PYTHONPATH", "VIRTUAL_ENV"} & set(made)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "  × Failed to download `shared==1.0`\n  ╰─▶ Hash mismatch for `shared==1.0`\n\n"
            f"      Expected:\n        sha256:{'a' * 64}\n\n      Computed:\n        sha256:{'b' * 64}",
            f"shared==1.0 is not the file that the lock names: sha256 {'a' * 64} was expected and {'b' * 64} came",
        ),
        (
            "error: Request failed after 3 retries\n  Caused by: Failed to fetch: `https://i.example/simple/a/`\n"
            "  Caused by: error sending request for url (https://i.example/simple/a/)\n"
            "  Caused by: client error (Connect)\n  Caused by: dns error: failed to lookup address information",
            "a name can't be resolved (https://i.example/simple/a/)",
        ),
        (
            "error: Failed to fetch: `https://i.example/simple/a/`\n  Caused by: invalid peer certificate: Unknown",
            "a certificate is not trusted here: name the authority in pip's configuration (cert) (https://i.example/",
        ),
        (
            "  × No solution found when resolving dependencies:\n  ╰─▶ Because there is no version of shared==1.0 and "
            "you require\n      shared==1.0, we can conclude that your requirements are unsatisfiable.",
            "no index or find-links that this node's pip or uv is configured with has a wheel of shared==1.0",
        ),
        ("error: No space left on device (os error 28)", "the disk became full: make room"),
        ("error: something new\n  Caused by: a reason", "error: something new: Caused by: a reason"),
        ("", "uv was killed by SIGKILL"),
    ],
)
def test_complaints_say_what_to_do(said: str, words: str) -> None:
    assert explain(said.splitlines(), "was killed by SIGKILL").startswith(words)
