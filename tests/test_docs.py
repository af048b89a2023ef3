"""What the documents say exists: links, commands and configuration."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
import typer
from typer.main import get_command

from llmgw.cli.app import app
from llmgw.config import ConfigError, parse_agent, parse_server

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
YAML = re.compile(r"([^\n]*)\n+ *```ya?ml\n(.*?)```", re.DOTALL)
"""The line of text before a block, and the block."""
REST_OF_AGENT = "server: https://head.example:7443\ntls: {ca: ca.pem, cert: node.pem, key: node-key.pem}\n"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Every `llmgw …` line of a code block names a command and flags that there are."""
    for _, block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" #")[0].strip(), posix=True) if line.startswith("llmgw ") else []
            if words:
                _check(page, words[1:])


def _check(page: Path, words: list[str]) -> None:
    command = get_command(app)
    while words and isinstance(command, typer.core.TyperGroup) and not words[0].startswith("-"):
        found = command.commands.get(words[0])
        assert found is not None, f"{page.name}: llmgw has no command {words[0]!r}"
        command, words = found, words[1:]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--") and command.name != "sim":
            assert word.partition("=")[0] in flags, f"{page.name}: {command.name} has no {word}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_load(page: Path) -> None:
    """A yaml block begins with the name of its file, ``# server.yaml`` or ``# agent.yaml``, and may be a part of it.

    It loads; or it is refused, where the line of text right before it has the word "refused".
    """
    for before, indented in YAML.findall(page.read_text()):
        block = dedent(indented)
        if "refused" in before:
            with pytest.raises(ConfigError):
                _load(page, block)
        else:
            _load(page, block)


def _load(page: Path, block: str) -> None:
    name = block.partition("\n")[0].removeprefix("# ")
    keys = set(re.findall(r"^(\w+):", block, re.MULTILINE))
    match name:
        case "server.yaml":
            parse_server(block if "models" in keys else f"{block}models: []\n", name)
        case "agent.yaml":
            missing = [line for line in REST_OF_AGENT.splitlines() if line.partition(":")[0] not in keys]
            parse_agent("\n".join([block, *missing]), name)
        case _:
            pytest.fail(f"{page.name}: a yaml block begins with {name!r}, not with '# server.yaml' or '# agent.yaml'")


def test_the_files_of_the_guide_load() -> None:
    blocks = [text for kind, text in BLOCK.findall((ROOT / "docs" / "cluster.md").read_text()) if kind == "yaml"]
    assert len(blocks) == 2
    assert [spec.name for spec in parse_server(blocks[0], "server.yaml").catalog.models] == ["smollm2"]
    assert parse_agent(blocks[1], "agent.yaml").servers == ("https://10.0.0.140:7443",)
