"""What is no text file at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.config import ConfigError, load_agent, load_server, parse_server
from llmgw.config.document import MAX_BYTES


def refusal(path: Path | str, content: bytes | None = None) -> str:
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_server(path)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_missing() -> None:
    assert refusal("server.yaml") == (
        "server.yaml can't be used: 1 fault\n"
        "server.yaml\n"
        "    expected  a file that can be read\n"
        "    found     no such file or directory\n"
        "    hint      name another one with --config"
    )


def test_a_directory() -> None:
    Path("conf.d").mkdir()
    assert refusal("conf.d") == (
        "conf.d can't be used: 1 fault\n"
        "conf.d\n"
        "    expected  a file\n"
        "    found     a directory\n"
        "    hint      name the file in it"
    )


@pytest.fixture
def _nobody() -> Iterator[None]:
    """Root may read everything: be somebody who may not."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_unreadable(request: pytest.FixtureRequest) -> None:
    Path("server.yaml").write_text("models: []")
    Path("server.yaml").chmod(0)
    request.getfixturevalue("_nobody")
    message = refusal("server.yaml")
    assert "found     permission denied" in message
    assert "hint      it must be readable by the user that llmgw runs as" in message


def test_a_pipe_is_not_waited_for() -> None:
    os.mkfifo("pipe")
    assert "found     something else (a device, pipe or socket)" in refusal("pipe")


def test_a_device_is_not_read_for_ever() -> None:
    assert "expected  a regular file" in refusal("/dev/zero")


def test_a_name_that_no_file_can_have() -> None:
    assert "embedded null byte" in refusal("server\0.yaml")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"---\n", b"---\n...\n", b"\xef\xbb\xbf"])
def test_empty(content: bytes) -> None:
    assert refusal("server.yaml", content) == (
        "server.yaml can't be used: 1 fault\n"
        "server.yaml\n"
        "    expected  keys and values\n"
        "    found     an empty file\n"
        "    hint      see docs/configuration.md for what it has to say"
    )


def test_not_utf8() -> None:
    assert refusal("server.yaml", "models: []\ncluster: Köln\n".encode("latin-1")) == (
        "server.yaml can't be used: 1 fault\n"
        "server.yaml:2:11\n"
        "    expected  text in UTF-8\n"
        "    found     the byte 0xF6\n"
        "    hint      save it as UTF-8; is this the right file?"
    )


def test_utf16() -> None:
    assert "found     the byte 0xFF" in refusal("server.yaml", "models: []\n".encode("utf-16"))


def test_binary() -> None:
    assert refusal("server.yaml", b"models: []\n\x7fELF\x02\x01\x01\x00") == (
        "server.yaml can't be used: 1 fault\n"
        "server.yaml:2:1\n"
        "    expected  a text file (YAML)\n"
        "    found     the control character U+007F\n"
        "    hint      is this the right file?"
    )


def test_too_long() -> None:
    assert "found     more" in refusal("server.yaml", b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=f"found     {MAX_BYTES + 1} characters"):
        parse_server("#" * (MAX_BYTES + 1), "server.yaml")


def test_a_byte_order_mark_is_no_fault() -> None:
    Path("server.yaml").write_bytes(b"\xef\xbb\xbfmodels: []\r\ncluster: lab\r\n")
    assert load_server("server.yaml").cluster == "lab"


def test_both_files_are_read_alike() -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        load_agent("agent.yaml")
