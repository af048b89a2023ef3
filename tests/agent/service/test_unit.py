"""The text of the unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.service import config_of, unit
from llmgw.agent.service.unit import MARK

ROOT = Path(__file__).parents[3]
BINARY, CONFIG = Path("/usr/local/bin/llmgw"), Path("/etc/llmgw/agent.yaml")


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    assert len({line.partition("=")[0] for line in lines}) == len(lines), "a setting stands there twice"
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def test_the_example_is_the_unit() -> None:
    assert (ROOT / "deploy/systemd/llmgw-agent.service").read_text() == unit(BINARY, CONFIG)


def test_it_is_the_service_that_is_documented() -> None:
    text = unit(BINARY, CONFIG)
    assert text.startswith(MARK)
    said = settings(text)
    assert (
        said.items()
        >= {
            "ExecStart": "/usr/local/bin/llmgw agent --config /etc/llmgw/agent.yaml",
            "Wants": "network-online.target",
            "After": "network-online.target",
            "Type": "notify",
            "NotifyAccess": "main",
            "KillMode": "process",
            "Restart": "on-failure",
            "RestartSec": "2s",
            "StartLimitIntervalSec": "0",
            "StateDirectory": "llmgw-agent",
            "WantedBy": "multi-user.target",
        }.items()
    )
    assert float(said["WatchdogSec"]) >= 30


def test_what_would_keep_engines_from_running_is_off_and_said_why() -> None:
    text = unit(BINARY, CONFIG)
    for name in (
        "ProtectSystem",
        "PrivateTmp",
        "ProtectHome",
        "PrivateDevices",
        "DeviceAllow",
        "ProtectClock",
        "ProtectKernelModules",
        "RestrictNamespaces",
        "RestrictSUIDSGID",
        "MemoryDenyWriteExecute",
        "SystemCallFilter",
        "User",
    ):
        assert name not in settings(text)
        assert name in text


NAMES = st.text(
    st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp", "Zs"), blacklist_characters="/\0") | st.just(" "),
    min_size=1,
    max_size=20,
).filter(lambda name: name.strip(". "))


@given(NAMES, NAMES)
def test_any_path_is_found_again(binary: str, config: str) -> None:
    assert config_of(unit(Path("/opt") / binary, Path("/etc") / config)) == Path("/etc") / config


@pytest.mark.parametrize("text", ["", "[Service]\nExecStart=/bin/true\n", "[Service]\nExecStart=/bin/x 'agent\n"])
def test_a_unit_may_name_no_file(text: str) -> None:
    assert config_of(text) is None
