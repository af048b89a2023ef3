"""pip's configuration, as pip itself reads it: files of the machine, of the user, and the environment."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.child import Ended, run

LIMIT_S = 60.0
_DEFAULT_INDEX = re.compile(r"--index-url <url>[^()]*\(default\s+(https?://[^\s)]+)\)")


async def pip_settings(command: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options that hold for ``pip COMMAND``: ``index-url``, ``cert``, ...; lists with blanks between.

    Where there is no pip, what the environment says. Raises FetchFailed where the configuration can't be read.
    """
    ended = await _pip(["config", "list"], environment)
    if ended.status == 0:
        return read_settings(ended.output, command)
    if "No module named pip" in ended.output:
        named = ((name.partition("PIP_"), value) for name, value in environment.items())
        return {key.lower().replace("_", "-"): value for (before, found, key), value in named if found and not before}
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()] or ["nothing was said"]
    raise FetchFailed(f"pip's configuration can't be read: {lines[-1]}: see python -m pip config debug")


async def default_index(environment: Mapping[str, str] = os.environ) -> str:
    """The index that pip goes by where nothing is configured, which is pip's to say. Raises FetchFailed."""
    ended = await _pip(["download", "--help"], environment)
    found = _DEFAULT_INDEX.search(ended.output) if ended.status == 0 else None
    if found is None:
        raise FetchFailed("no package index is configured on this node: name one in pip's configuration (index-url)")
    return found[1]


async def _pip(arguments: list[str], environment: Mapping[str, str]) -> Ended:
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONWARNINGS": "ignore", "LC_ALL": "C.UTF-8"}
    return await run([sys.executable, "-I", "-m", "pip", *arguments], env={**environment, **quiet}, limit_s=LIMIT_S)


def read_settings(output: str, command: str) -> dict[str, str]:
    """From what ``pip config list`` prints: ``global.index-url='https://…'`` a line."""
    # The later one wins, as with pip.
    found: dict[str, dict[str, str]] = {"global": {}, command: {}, ":env:": {}}
    for line in output.splitlines():
        key, equals, quoted = line.partition("=")
        section, _, option = key.strip().rpartition(".")
        if not equals or section not in found:
            continue
        try:
            value = ast.literal_eval(quoted.strip())
        except (ValueError, SyntaxError):
            continue
        found[section][option.replace("_", "-")] = str(value)
    return {option: value for options in found.values() for option, value in options.items()}
