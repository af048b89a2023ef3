from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.engines.flags import read_flags, read_help

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


FORMS = """Usage: x [OPTIONS]

Options:
  --cache / --no-cache            Keep what was read.
  --[no-]mmap                     Map the file.
  --level [low|high]              How much.
  --mode ['mp', 'ray']
                        Which.
  --token [TOKEN]       May stand alone.
  --names NAME [NAME ...]
  --kind {a,b,None}     One of three.
  --parser {a,b} or any name that is registered
  --poll <0...100>
  -a, --all             Everything.
  --old N               the argument has been removed. use --new
"""


def test_forms_of_other_programs() -> None:
    flags = read_flags(FORMS)
    assert flags["--cache"] is flags["--no-cache"]
    assert flags["--mmap"] is flags["--no-mmap"]
    assert flags["-a"] is flags["--all"]
    assert flags["--level"].choices == ("low", "high")
    assert flags["--mode"].choices == ("mp", "ray")
    assert flags["--kind"].choices == ("a", "b", "None")
    assert not any(flags[name].choices for name in ("--parser", "--poll", "--token", "--names", "--all"))


def test_a_value_may_be_needed_allowed_or_neither() -> None:
    flags = read_flags(FORMS)
    needed = {name: flags[name].needs_value for name in flags if flags[name].takes_value}
    assert needed == {
        "--level": True,
        "--mode": True,
        "--token": False,
        "--names": True,
        "--kind": True,
        "--parser": True,
        "--poll": True,
    }


def test_a_repository_in_brackets_is_a_value_that_is_needed() -> None:
    assert read_flags(help_of("b10068"))["--hf-repo"].needs_value


def test_lines_and_removed_flags() -> None:
    read = read_help(FORMS)
    assert read.flags["--all"].line == 14
    assert read.flags["--all"].definition == "-a, --all"
    assert set(read.removed) == {"--old"}
    assert read.removed["--old"].description.endswith("use --new")


def test_a_mention_is_of_the_very_flag() -> None:
    read = read_help("  --port-range A,B  not --port\n  --my--port\n")
    assert read.mention("--port") == 1
    assert read.mention("--port-range") == 1
    assert read.mention("--range") is None
    assert read_help("  --port-range\n  --import-port").mention("--port") is None


def test_colours_and_line_ends_of_other_systems() -> None:
    flags = read_flags("\x1b[1;36m  --port\x1b[0m PORT  the port\r\n  -h, --help  this\r\n")
    assert flags["--port"].metavar == "PORT"
    assert "--help" in flags


@given(st.text())
@settings(deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    for name, flag in read_flags(text).items():
        assert name in flag.names
