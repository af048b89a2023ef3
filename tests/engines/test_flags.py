from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.engines.flags import read_flags

from .shards import help_of

ARGPARSE = """usage: x [--port PORT]

options:
  -h, --help            show this help message and exit
  --port PORT, -p PORT  the port; not to be taken for --disable-log-
                        requests, nor --membind of numactl
  --headless            no front
--help=ModelConfig, --help=Frontend)
"""


def test_llama_server_definition_lines() -> None:
    flags = read_flags(help_of("b10068"))
    assert flags["--threads"].names == ("-t", "--threads")
    assert flags["--threads"].metavar == "N"
    assert flags["--flash-attn"].metavar == "[on|off|auto]"
    assert not flags["--metrics"].takes_value
    assert flags["--no-webui"].names == ("--ui", "--webui", "--no-ui", "--no-webui")
    assert flags["--no-kv-unified"] is flags["-kvu"]
    assert flags["--split-mode"].metavar == "{none,layer,row,tensor}"
    assert "--mlock" in flags


def test_flags_differ_between_builds() -> None:
    old, new = read_flags(help_of("b10068")), read_flags(help_of("b11434"))
    assert "--mlock" not in new
    assert "--load-mode" in new
    assert "--load-mode" not in old
    assert "--kv-unified-per-slot" in new


def test_a_removed_flag_counts_as_absent() -> None:
    text = help_of("b11434")
    assert "--draft-max" in text
    assert "--draft-max" not in read_flags(text)
    assert "--spec-draft-n-max" in read_flags(text)


def test_argparse_help_and_its_prose() -> None:
    flags = read_flags(ARGPARSE)
    assert set(flags) == {"-h", "--help", "--port", "-p", "--headless"}
    assert flags["--port"].metavar == "PORT"
    assert not flags["--headless"].takes_value


def test_a_prefix_of_a_flag_is_not_the_flag() -> None:
    flags = read_flags(help_of("b10068"))
    assert "--kv" not in flags
    assert "--thread" not in flags


@given(st.text())
@settings(deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    for name, flag in read_flags(text).items():
        assert name in flag.names
