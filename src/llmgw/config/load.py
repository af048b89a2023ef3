"""From a file to a configuration, or to one error that says everything that is wrong with it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from llmgw.config import document
from llmgw.config.agent import AgentConfig
from llmgw.config.agent_file import AgentFile, agent_config, agent_rules
from llmgw.config.check import Remark, check_shape
from llmgw.config.faults import ConfigError, Fault
from llmgw.config.server import ServerConfig
from llmgw.config.server_file import ServerFile, server_config, server_rules
from llmgw.config.shape import Section

S = TypeVar("S", bound=Section)


def load_server(path: Path | str) -> ServerConfig:
    """Reads a control plane's file. Raises ConfigError, with all of its faults."""
    return parse_server(read_text(path), str(path))


def load_agent(path: Path | str) -> AgentConfig:
    """Reads an agent's file. Raises ConfigError, with all of its faults."""
    return parse_agent(read_text(path), str(path))


def parse_server(text: str, name: str) -> ServerConfig:
    """``text`` as a control plane's file of this ``name``, whose directory relative paths start from."""
    return server_config(_parse(text, name, ServerFile, AgentFile, server_rules))


def parse_agent(text: str, name: str) -> AgentConfig:
    """``text`` as an agent's file of this ``name``, whose directory relative paths start from."""
    return agent_config(_parse(text, name, AgentFile, ServerFile, agent_rules))


def _parse(text: str, name: str, root: type[S], other: type[Section], rules: Callable[[S], Iterable[Remark]]) -> S:
    read = document.read(text, name)
    file, faults = check_shape(read, root, other)
    faults = [*read.faults, *faults]
    if file is not None:
        faults += [read.fault(rule.path, rule.expected, found=rule.found, hint=rule.hint) for rule in rules(file)]
    if file is None or faults:
        raise read.error(faults)
    return file


def read_text(path: Path | str) -> str:
    """The text of a file. Raises ConfigError where there is none: missing, unreadable, no file, not UTF-8."""
    name = str(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _file_error(name, "a regular file", "something else (a device, pipe or socket)", "")
            content = file.read(document.MAX_BYTES + 1)
    except IsADirectoryError:
        raise _file_error(name, "a file", "a directory", "name the file in it") from None
    except (OSError, ValueError) as error:
        hint = _HINTS.get(type(error), "")
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise _file_error(name, "a file that can be read", (words or str(error)).lower(), hint) from None
    if len(content) > document.MAX_BYTES:
        raise _file_error(name, f"a file of at most {document.MAX_BYTES} bytes", "more", "is this the right file?")
    return _decode(name, content)


_HINTS: dict[type[Exception], str] = {
    FileNotFoundError: "name another one with --config",
    PermissionError: "it must be readable by the user that llmgw runs as",
}


def _without_waiting(path: str, flags: int) -> int:
    """Opens without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
        found = f"the byte 0x{content[error.start]:02X}"
        fault = Fault(
            file=name,
            line=line,
            column=column,
            expected="text in UTF-8",
            found=found,
            hint="save it as UTF-8; is this the right file?",
        )
        raise ConfigError(name, (fault,)) from None


def _file_error(name: str, expected: str, found: str, hint: str) -> ConfigError:
    return ConfigError(name, (Fault(file=name, expected=expected, found=found, hint=hint),))
