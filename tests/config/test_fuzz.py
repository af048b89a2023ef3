"""Whatever a file holds: a configuration, or a ConfigError that can be printed. Never anything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config import AgentConfig, ConfigError, ServerConfig, parse_agent, parse_server
from llmgw.config.agent_file import AgentFile
from llmgw.config.check import section_at
from llmgw.config.server_file import ServerFile

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
SERVER: dict[str, Any] = yaml.safe_load((EXAMPLES / "server.yaml").read_text())
AGENT: dict[str, Any] = yaml.safe_load((EXAMPLES / "agent-full.yaml").read_text())
KEYS = sorted({*ServerFile.model_fields, *AgentFile.model_fields, "name", "engine", "profiles", "bin", "<<", "x y"})

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["5s", "16GiB", "vllm", "sim", "https://a", "http://a", "/x", "20000-29999", "0.0.0.0:80", "~/x"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=4),
    max_leaves=12,
)
YAML_ISH = st.lists(
    st.sampled_from(
        [*"\n\t -:,[]{}#&*!|>'\"%@`?<", "\n  ", "- ", ": ", "<<: ", "&a ", "*a", "models", "name", "---\n", "1"]
    )
    | st.text(max_size=3),
    max_size=60,
).map("".join)


def tried(text: str) -> None:
    for parse, kind in ((parse_server, ServerConfig), (parse_agent, AgentConfig)):
        config, error = outcome(parse, text)
        assert isinstance(config, kind) is (error is None)
        if error is not None:
            assert error.faults
            assert all(fault.expected and fault.found for fault in error.faults)
            str(error).encode()


def outcome(parse: Callable[[str, str], object], text: str) -> tuple[object, ConfigError | None]:
    try:
        return parse(text, "f.yaml"), None
    except ConfigError as error:
        return None, error


@given(st.text())
@settings(deadline=None)
def test_any_text(text: str) -> None:
    tried(text)


@given(YAML_ISH)
@settings(deadline=None, max_examples=150)
def test_anything_that_looks_like_yaml(text: str) -> None:
    tried(text)


@given(VALUES)
@settings(deadline=None)
def test_any_values(value: object) -> None:
    tried(yaml.safe_dump(value, allow_unicode=True))


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of everything in a tree."""
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [found for key, each in inner for found in [(*path, key), *places(each, (*path, key))]]


@given(st.sampled_from(["server", "agent"]), st.data())
@settings(deadline=None, max_examples=150)
def test_an_example_with_a_few_values_changed(kind: str, data: st.DataObject) -> None:
    tree = copy.deepcopy(SERVER if kind == "server" else AGENT)
    for path in data.draw(st.lists(st.sampled_from(places(tree)), min_size=1, max_size=4)):
        holder: Any = tree
        try:
            for part in path[:-1]:
                holder = holder[part]
            holder[path[-1]] = data.draw(VALUES)
        except (KeyError, IndexError, TypeError):
            continue
    tried(yaml.safe_dump(tree, allow_unicode=True))


LEAVES = {
    kind: [path for path in places(tree) if section_at(root, path[:-1]) is not None and isinstance(path[-1], str)]
    for kind, tree, root in (("server", SERVER, ServerFile), ("agent", AGENT, AgentFile))
}


@given(st.sampled_from(["server", "agent"]), st.data())
@settings(deadline=None)
def test_every_fault_is_found_however_many_there_are(kind: str, data: st.DataObject) -> None:
    """Unknown keys beside any of the keys: each is named, and nothing else is found wrong."""
    tree = copy.deepcopy(SERVER if kind == "server" else AGENT)
    chosen = data.draw(st.sets(st.sampled_from([path for path in LEAVES[kind] if "labels" not in path]), min_size=1))
    holders = {path[:-1] for path in chosen if "node_selector" not in path[:-1]}
    for path in holders:
        holder: Any = tree
        for part in path:
            holder = holder[part]
        holder["zzqqzz"] = 1
    parse = parse_server if kind == "server" else parse_agent
    text = yaml.safe_dump(tree)
    if not holders:
        return
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert len(caught.value.faults) == len(holders)
    assert all(fault.path.endswith("zzqqzz") for fault in caught.value.faults)
