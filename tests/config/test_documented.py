"""docs/configuration.md names every key that there is, and the defaults that it states are the ones that hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from llmgw.config import parse_agent, parse_server
from llmgw.config.agent_file import AgentFile
from llmgw.config.check import keys_of_file
from llmgw.config.server_file import ServerFile
from llmgw.config.shape import Section

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
SERVER, AGENT = PAGE.split("\n## agent.yaml\n")
ROW = re.compile(r"^\| `([a-z0-9_.\[\]A-Z]+)` \| ([^|]*) \| ([^|]*) \|", re.MULTILINE)


@pytest.mark.parametrize(("root", "text"), [(ServerFile, SERVER), (AgentFile, AGENT)], ids=["server", "agent"])
def test_every_key_is_documented(root: type[Section], text: str) -> None:
    documented = {part for key, _, _ in ROW.findall(text) for part in key.replace("[]", "").split(".")}
    in_words = {"cert", "key", "url", "sha256", "llamacpp", "vllm", "sglang"}
    assert {key for key, _ in keys_of_file(root)} - documented <= in_words
    assert documented - {key for key, _ in keys_of_file(root)} <= {"NAME"}


def stated(text: str) -> list[tuple[str, str]]:
    """Keys from the top of a file whose default is a value and nothing more."""
    return [(key, default[1:-1]) for key, _, default in ROW.findall(text) if re.fullmatch(r"`[^`]+`", default)]


def with_default(plain: dict[str, object], key: str, default: str) -> str:
    value: object = yaml.safe_load(default) if default in ("[]", "{}", "true") or default.isdecimal() else default
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return yaml.safe_dump(plain | value)


@pytest.mark.parametrize(("key", "default"), stated(SERVER.split("\n### engines")[0]))
def test_a_default_of_the_servers_file_is_what_leaving_it_out_means(key: str, default: str) -> None:
    plain: dict[str, object] = {"models": []}
    assert parse_server(with_default(plain, key, default), "/f") == parse_server(yaml.safe_dump(plain), "/f")


@pytest.mark.parametrize(("key", "default"), stated(AGENT))
def test_a_default_of_the_agents_file_is_what_leaving_it_out_means(key: str, default: str) -> None:
    plain: dict[str, object] = {"server": "https://a", "tls": {"ca": "a", "cert": "b", "key": "c"}}
    assert parse_agent(with_default(plain, key, default), "/f") == parse_agent(yaml.safe_dump(plain), "/f")


@pytest.mark.parametrize(("key", "default"), stated(SERVER.split("\n### profiles")[1]))
def test_a_default_of_a_profile_is_what_leaving_it_out_means(key: str, default: str) -> None:
    profile: dict[str, object] = {"engine": "sim"} | ({"sim": {}} if key.startswith("sim.") else {})
    text = '{"models": [{"name": "a", "profiles": [%s]}]}'
    changed = yaml.safe_load(with_default(profile, key, default))
    flow = [yaml.safe_dump(each, default_flow_style=True, width=10_000).strip() for each in (profile, changed)]
    assert parse_server(text % flow[0], "/f") == parse_server(text % flow[1], "/f")
