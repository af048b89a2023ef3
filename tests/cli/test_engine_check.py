"""``llmgw ctl engine-check``: of helps, of programs, and which program it takes by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from llmgw.agent.install.places import Places
from llmgw.cli import engine_program
from llmgw.cli.ctl import ctl
from llmgw.cli.engine_program import NotChecked
from llmgw.cli.engine_report import run_check
from llmgw.cluster.catalog import EngineSpec
from llmgw.engines.asking import Question
from tests.cluster.engine import llama  # noqa: F401
from tests.engines.helps import WHOLE, recorded, renamed

from .terminal import seen, widest

LLAMA_HELP = WHOLE["llamacpp-b10068"][2]
VLLM_HELP = WHOLE["vllm-0.32.0"][2]


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever engines this machine has: a test names its own."""
    monkeypatch.setattr(engine_program, "AGENT_FILE", tmp_path / "no-agent.yaml")
    monkeypatch.setattr(engine_program, "NO_FILE_ENGINES_DIR", tmp_path / "no-engines")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(ctl, ["engine-check", *arguments], input=stdin)


def as_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "-o", "json").stdout)
    return answer


def help_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "help.txt"
    path.write_text(text)
    return str(path)


def program(path: Path, script: str) -> Path:
    """A program of its own, written in Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport os, pathlib, sys\n{script}\n")
    path.chmod(0o755)
    return path


def agent_file(tmp_path: Path, engines: str, engines_dir: Path | None = None) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(
        "server: https://10.0.0.1:7443\ntls: {ca: ca.pem, cert: n.pem, key: n-key.pem}\n"
        f"engines_dir: {engines_dir or tmp_path / 'engines'}\n{engines}"
    )
    return str(path)


# -- of a help


@pytest.mark.parametrize("name", WHOLE)
def test_real_helps_fit(tmp_path: Path, name: str) -> None:
    engine, _, text = WHOLE[name]
    result = run(engine, "--help-file", help_file(tmp_path, text))
    assert result.exit_code == 0, result.output
    assert "This build fits" in result.stdout


@pytest.mark.parametrize(
    ("name", "flag"), [("llamacpp-b11434", "--ctx-size"), ("vllm-0.32.0", "--nnodes"), ("sglang-0.5.23", "--tp-size")]
)
def test_a_planted_rename_is_found(name: str, flag: str) -> None:
    engine, _, text = WHOLE[name]
    result = run(engine, "--help-output", renamed(text, flag, f"{flag}-of-old"))
    assert result.exit_code == 1
    assert f"{flag} " in result.stdout
    assert f"the nearest is {flag}-of-old" in result.stdout
    assert f"This build does not fit: {flag}." in result.stdout


@pytest.mark.parametrize("name", WHOLE)
def test_a_help_that_is_cut_off_is_said_to_be_and_nothing_is_called_missing(name: str) -> None:
    engine, _, text = WHOLE[name]
    result = run(engine, "--help-file", "-", stdin="".join(text.splitlines(keepends=True)[:400]))
    assert result.exit_code == 2
    assert "the help may be cut off" in result.stdout
    assert "could not be looked up: give the whole help, or --bin PATH" in result.stdout
    assert "missing" not in result.stdout


def test_vllms_summary_is_known_as_one() -> None:
    result = run("vllm", "--help-output", recorded("vllm-0.32.0-summary"))
    assert result.exit_code == 2
    assert "the help may be cut off: it defines no flag at all" in result.stdout


def test_json_has_every_flag_and_the_exit_status(tmp_path: Path) -> None:
    planted = help_file(tmp_path, renamed(VLLM_HELP, "--nnodes", "--num-nodes"))
    answer = as_json("vllm", "--help-file", planted)
    assert (answer["engine"], answer["ok"], answer["exit_status"]) == ("vllm", False, 1)
    assert answer["helps"] == [{"program": "vllm", "lines": 2392, "flags": 317, "cut_short": None}]
    states = {flag["flag"]: flag for flag in answer["flags"]}
    assert states["--nnodes"]["state"] == "missing"
    assert states["--nnodes"]["nearest"][0] == "--num-nodes"
    assert states["--nnodes"]["passed"].startswith("over 2 nodes")
    assert states["--port"] == {
        "program": "vllm", "flag": "--port", "passed": "always", "state": "defined", "words": "", "nearest": [],
    }  # fmt: skip
    assert any("ray start and ray health-check" in warning for warning in answer["warnings"])


@pytest.mark.parametrize("width", [80, 200])
def test_what_people_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    planted = renamed(renamed(VLLM_HELP, "--nnodes", "--num-nodes"), "--headless", "--no-front")
    file = Path(help_file(tmp_path, planted))

    def prints() -> int:
        return run_check("vllm", bin=None, help_output=None, help_file=file, config=None, as_json=False)

    text = seen(monkeypatch, width, prints)
    assert widest(text) <= width
    assert "checked   17 flags that llmgw can pass: 14 defined, 1 left out, 2 missing" in text
    assert "This build does not fit: --nnodes, --headless." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lamacpp"], "lamacpp is no engine that llmgw knows: name llamacpp, vllm or sglang"),
        (["sim"], "sim is a part of llmgw itself"),
        (["vllm", "--help-output", "x", "--help-file", "y"], "leave one of them out"),
        (["vllm", "--help-file", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["vllm", "--bin", "/no/such/vllm"], "/no/such/vllm is not there"),
        (["vllm", "--bin", "/etc/passwd"], "/etc/passwd is not executable: chmod +x /etc/passwd"),
        (["vllm", "--bin", "/usr/bin"], "there is no vllm in the folder /usr/bin"),
        (["vllm", "--config", "/no/agent.yaml"], "/no/agent.yaml"),
        (["vllm"], "no-agent.yaml, none is installed under"),
    ],
)
def test_what_can_not_be_checked(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_its_own_help() -> None:
    result = run("--help")
    assert result.exit_code == 0, result.output
    assert all(option in result.stdout for option in ("--bin", "--help-output", "--help-file", "--config"))


# -- of a program


VLLM = """
seen = pathlib.Path(__file__).with_name("seen")
with seen.open("a") as file:
    print(*sys.argv[1:], os.environ.get("VLLM_TARGET_DEVICE"), file=file)
here = pathlib.Path(__file__).parent
if sys.argv[1:] == ["--version"]:
    print("INFO no driver was found", file=sys.stderr)
    print(VERSION)
elif os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
    print("RuntimeError: Failed to infer device type", file=sys.stderr)
    sys.exit(1)
elif sys.argv[1:] == ["serve", "--help=all"]:
    sys.stdout.write((here / ALL).read_text())
else:
    sys.stdout.write((here / PLAIN).read_text())
"""
"""vLLM as it answers where there is no GPU, with texts that it printed."""


def vllm_program(tmp_path: Path, *, version: str, on_all: str, plain: str) -> Path:
    folder = tmp_path / "vllm" / "bin"
    folder.mkdir(parents=True)
    (folder / "all.txt").write_text(on_all)
    (folder / "plain.txt").write_text(plain)
    names = f"VERSION, ALL, PLAIN = {version!r}, 'all.txt', 'plain.txt'"
    return program(folder / "vllm", f"{names}\n{VLLM}")


def test_vllm_is_asked_for_all_of_its_help_and_told_what_to_suppose_for_that_alone(tmp_path: Path) -> None:
    path = vllm_program(tmp_path, version="0.32.0+cpu", on_all=VLLM_HELP, plain=recorded("vllm-0.32.0-summary"))
    result = run("vllm", "--bin", str(path))
    assert result.exit_code == 0, result.output
    assert "engine    vllm 0.32.0+cpu" in result.stdout
    assert f"program   {path}" in result.stdout
    assert "as asked for (--bin)" in result.stdout
    assert path.with_name("seen").read_text().splitlines() == ["serve --help=all cpu", "--version None"]


def test_where_all_is_a_search_the_plain_help_is_taken(tmp_path: Path) -> None:
    search = "usage: vllm serve\n\n  --all2all-backend X   Which.\n"
    path = vllm_program(tmp_path, version="0.32.0", on_all=search, plain=VLLM_HELP)
    assert run("vllm", "--bin", str(path)).exit_code == 0


def test_what_an_operator_has_set_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    path = vllm_program(tmp_path, version="0.32.0", on_all=VLLM_HELP, plain="")
    run("vllm", "--bin", str(path))
    assert path.with_name("seen").read_text().splitlines()[-1] == "--version tpu"
    assert os.environ["VLLM_TARGET_DEVICE"] == "tpu"


def test_other_programs_are_looked_for_beside_it(tmp_path: Path) -> None:
    path = vllm_program(tmp_path, version="0.32.0", on_all=VLLM_HELP, plain="")
    for command in ("start", "health-check"):
        (path.parent / f"{command}.txt").write_text(recorded(f"ray-2.60.0-{command}"))
    script = "sys.stdout.write(pathlib.Path(__file__).with_name(sys.argv[1] + '.txt').read_text())"
    program(path.with_name("ray"), script)
    answer = as_json("vllm", "--bin", str(path))
    assert [looked["program"] for looked in answer["helps"]] == ["vllm", "ray start", "ray health-check"]
    assert answer["ok"]
    program(path.with_name("ray"), "sys.exit('ray: its Python is gone')")
    answer = as_json("vllm", "--bin", str(path))
    assert answer["ok"]
    assert any("ray: its Python is gone" in warning for warning in answer["warnings"])


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    path = program(tmp_path / "llama-server", "print('a line')\nsys.exit('libgomp.so.1: cannot open shared object')")
    result = run("llamacpp", "--bin", str(path))
    assert result.exit_code == 2
    assert f"{path} --help ended with status 1:" in result.stderr
    assert "libgomp.so.1: cannot open shared object" in result.stderr


def test_a_program_that_says_nothing_of_its_flags(tmp_path: Path) -> None:
    path = program(tmp_path / "llama-server", "")
    result = run("llamacpp", "--bin", str(path))
    assert result.exit_code == 2
    assert "ended well, and printed nothing" in result.stderr


async def test_a_program_that_does_not_end_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    """What it started holds its output, and must not be waited for."""
    script = f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    question = Question(argv=(str(program(tmp_path / "llama-server", script)),), limit_s=0.5)
    with pytest.raises(NotChecked, match=r"llama-server did not end within 0\.5 s"):
        await engine_program._answer(question)


def test_a_program_that_prints_without_end_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "_MOST_BYTES", 70_000)
    script = f"print({LLAMA_HELP!r}) if sys.argv[1] == '--help' else None\nprint('x' * 10_000_000)"
    result = run("llamacpp", "--bin", str(program(tmp_path / "llama-server", script)))
    assert result.exit_code == 0, result.output


def test_a_version_that_is_not_said_is_told_of(tmp_path: Path) -> None:
    script = f"sys.exit('no') if sys.argv[1] == '--version' else print({LLAMA_HELP!r})"
    result = run("llamacpp", "--bin", str(program(tmp_path / "llama-server", script)))
    assert result.exit_code == 0
    assert "it did not say its version; it counts as a recent llamacpp" in result.stdout


# -- which one


def printing(path: Path, text: str) -> Path:
    return program(path, f"print('version: 77 (abc)') if sys.argv[1] == '--version' else print({text!r})")


def begun(engines_dir: Path, version: str) -> Path:
    """A folder as an agent leaves it that was killed before it gave it its name."""
    partial = Places(engines_dir, engines_dir).begin("llamacpp", f"{version}-cpu-0123456789ab", 0)
    printing(partial / "bin" / "llama-server", LLAMA_HELP)
    return partial


def installed(engines_dir: Path, version: str) -> Path:
    spec = EngineSpec(name="llamacpp", version=version, source="index")
    folder = Places(engines_dir, engines_dir).finish(begun(engines_dir, version), spec, "cpu").folder
    return folder / "bin" / "llama-server"


def test_the_agents_own_choice_comes_before_what_is_installed_and_that_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines_dir = tmp_path / "engines"
    on_path = printing(tmp_path / "on-path" / "llama-server", LLAMA_HELP)
    older, newer = installed(engines_dir, "b1"), installed(engines_dir, "b2")
    named = printing(tmp_path / "own" / "llama-server", LLAMA_HELP)
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")

    own = agent_file(tmp_path, f"engines: {{llamacpp: {{bin: {named}}}}}\n", engines_dir)
    answer = as_json("llamacpp", "--config", own)
    assert answer["program"] == [str(named)]
    assert answer["chosen"] == f"named by {own} (engines.llamacpp.bin)"

    plain = agent_file(tmp_path, "", engines_dir)
    answer = as_json("llamacpp", "--config", plain)
    assert answer["program"] == [str(newer)]
    assert answer["chosen"] == "installed b2, the newest"
    assert any(f"b1 is installed too; to check it: --bin {older}" in warning for warning in answer["warnings"])

    none = agent_file(tmp_path, "", tmp_path / "empty")
    answer = as_json("llamacpp", "--config", none)
    assert answer["program"] == [str(on_path)]
    assert answer["chosen"] == "found on PATH, from where llmgw itself takes no engine"


def test_a_folder_that_an_agent_has_not_finished_is_none(tmp_path: Path) -> None:
    engines_dir = tmp_path / "engines"
    printing(engines_dir / "llamacpp" / "b3-cpu-0123456789ab" / "bin" / "llama-server", LLAMA_HELP)
    begun(engines_dir, "b4")
    result = run("llamacpp", "--config", agent_file(tmp_path, "", engines_dir))
    assert result.exit_code == 2
    assert f"none is installed under {engines_dir}, and llama-server is not on PATH" in result.stderr


def test_an_agents_file_with_faults_is_not_passed_over(tmp_path: Path) -> None:
    result = run("llamacpp", "--config", agent_file(tmp_path, "engines: {llamacpp: {bim: /x}}\n"))
    assert result.exit_code == 2
    assert "bim" in result.stderr
    assert "Mend it, or name the engine's program: --bin PATH" in result.stderr


def test_sglang_is_started_by_its_python(tmp_path: Path) -> None:
    text = WHOLE["sglang-0.5.23"][2]
    script = f"print('sglang version: 0.5.23') if sys.argv[1] == '-c' else print({text!r})"
    path = program(tmp_path / "sglang" / "bin" / "python", script)
    own = agent_file(tmp_path, f"engines: {{sglang: {{python: {path}}}}}\n")
    answer = as_json("sglang", "--config", own)
    assert answer["program"] == [str(path), "-m", "sglang.launch_server"]
    assert (answer["version"], answer["ok"]) == ("0.5.23", True)
    assert "engines.sglang.python" in answer["chosen"]


# -- the real one


def test_the_real_llama_server_fits(llama: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    path, _ = llama
    for arguments in (["--bin", str(path)], ["--bin", str(path.parent)]):
        answer = as_json("llamacpp", *arguments)
        assert answer["ok"], answer
        assert answer["program"] == [str(path)]
        assert [looked["program"] for looked in answer["helps"]] == ["llamacpp", "ggml-rpc-server"]
        assert answer["warnings"] == []
    engines_dir = next(parent for parent in path.parents if parent.name == "engines")
    answer = as_json("llamacpp", "--config", agent_file(tmp_path, "", engines_dir))
    assert answer["program"] == [str(path)]
    assert answer["chosen"] == "installed b10068"
