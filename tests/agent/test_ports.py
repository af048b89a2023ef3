from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llmgw.agent import ports
from llmgw.process.ports import port_holder


@pytest.mark.parametrize(("theirs", "ours"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_a_port_that_somebody_listens_on(theirs: str, ours: str) -> None:
    with socket.socket() as other:
        other.bind((theirs, 0))
        other.listen()
        port = other.getsockname()[1]
        name = Path("/proc/self/comm").read_text().strip()
        assert ports.taken(ours, port) == f"port {port} is taken by pid {os.getpid()} ({name})"
    assert ports.taken(ours, port) is None


def test_a_port_that_is_bound_and_not_listened_on() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert ports.taken("127.0.0.1", port) == f"port {port} is taken by a process that the agent can not see"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6() -> None:
    try:
        other = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs IPv6")
    with other:
        words = ports.taken("::1", other.getsockname()[1])
    assert words is not None
    assert f"pid {os.getpid()}" in words


def test_an_address_of_another_machine_is_not_a_matter_of_ports() -> None:
    with pytest.raises(OSError, match="assign"):
        ports.taken("203.0.113.7", 20000)


def test_a_proc_that_can_not_be_read_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("  sl  local_address\n   0: 0100007F:4E20 0:0 0A\nnonsense\n")
    assert port_holder(20000, tmp_path) is None
    (tmp_path / "net" / "tcp").write_text(
        "head\n   0: 0100007F:4E20 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
    )
    assert port_holder(20000, tmp_path) is None
    (tmp_path / "812" / "fd").mkdir(parents=True)
    (tmp_path / "812" / "fd" / "3").symlink_to("socket:[4711]")
    assert port_holder(20000, tmp_path) == "pid 812 (unknown)"
    (tmp_path / "812" / "comm").write_text("nginx\n")
    assert port_holder(20000, tmp_path) == "pid 812 (nginx)"
    assert port_holder(20001, tmp_path) is None
