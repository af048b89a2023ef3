"""Helps that real builds printed fit; with one flag renamed, removed or of other values, they don't."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.engines.asking import help_questions, version_question, whole
from llmgw.engines.check import Answer, Report, State, check
from llmgw.engines.flags import read_flags
from llmgw.engines.registry import ENGINES
from llmgw.engines.widest import Passed, widest

from .helps import OTHERS, WHOLE, recorded, renamed

FINE_WITHOUT = {State.INSTEAD, State.LEFT_OUT}


def of(name: str, help_text: str | None = None, version: str | None = None) -> Report:
    engine, known, text = WHOLE[name]
    return check(
        ENGINES[engine], text if help_text is None else help_text, version=known if version is None else version
    )


def answer(report: Report, flag: str, program: str = "") -> Answer:
    return next(each for each in report.answers if (each.flag.program, each.flag.name) == (program, flag))


def passed(name: str) -> Iterator[Passed]:
    """Flags that the engine of this help gets, and has."""
    engine, version, text = WHOLE[name]
    has = read_flags(text)
    yield from (flag for flag in widest(ENGINES[engine], version) if not flag.program and flag.name in has)


# -- whole helps


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("version_known", [True, False])
def test_real_helps_fit(name: str, version_known: bool) -> None:
    engine, version, text = WHOLE[name]
    report = check(ENGINES[engine], text, version=version if version_known else "", others=OTHERS[engine])
    assert report.ok, report.words
    assert report.words == ""
    assert report.cut_short is None
    assert report.unread == ()
    assert len(report.answers) == len(widest(ENGINES[engine], version if version_known else ""))


@pytest.mark.parametrize("name", WHOLE)
def test_every_flag_that_is_renamed_is_found_with_its_new_name(name: str) -> None:
    text = WHOLE[name][2]
    flags = list(passed(name))
    assert len(flags) >= 15
    for flag in flags:
        found = of(name, renamed(text, flag.name, f"{flag.name}-v2"))
        said = answer(found, flag.name)
        if said.state is State.INSTEAD:
            assert flag.instead, flag.name
            continue
        assert not found.ok, flag.name
        assert said.state is State.MISSING, (flag.name, said)
        assert said.nearest[0] == f"{flag.name}-v2", said
        assert found.faults == (said,), "only that one"
        assert f"{flag.name}-v2" in found.words


def test_hardly_any_flag_can_be_done_without() -> None:
    """Else a rename could pass unseen."""
    spared = {
        (engine, flag.name): flag.instead
        for engine in ("llamacpp", "vllm", "sglang")
        for flag in widest(ENGINES[engine])
    }
    assert {flag for flag, instead in spared.items() if instead} == {
        ("llamacpp", "--no-ui"),
        ("llamacpp", "--device"),
        ("vllm", "--runner"),
    }


@pytest.mark.parametrize("name", WHOLE)
def test_a_flag_of_another_program_is_found_too(name: str) -> None:
    engine, _, text = WHOLE[name]
    for program, help_text in OTHERS[engine].items():
        flag = next(flag for flag in widest(ENGINES[engine]) if flag.program == program)
        others = {**OTHERS[engine], program: renamed(help_text, flag.name, "--quite-another")}
        report = check(ENGINES[engine], text, others=others)
        assert [(each.flag.program, each.flag.name) for each in report.faults] == [(program, flag.name)]
        assert report.words.startswith(f"{program} {flag.name}: ")


def test_a_program_without_a_help_is_told_of() -> None:
    report = of("vllm-0.32.0")
    assert report.unread == ("ray start", "ray health-check")
    assert report.ok


# -- how a flag is looked up


def test_a_longer_flag_is_not_the_flag() -> None:
    said = answer(of("llamacpp-b10068", renamed(WHOLE["llamacpp-b10068"][2], "--port", "--port-range")), "--port")
    assert said.state is State.MISSING
    assert said.nearest[0] == "--port-range"
    assert "the nearest is --port-range (line 469: --port-range PORT)" in said.words


def test_a_flag_that_is_only_mentioned_is_missing() -> None:
    text = renamed(WHOLE["vllm-0.32.0"][2], "--max-num-seqs", "--max-sequences")
    text = text.replace("--max-sequences", "--max-sequences                        was --max-num-seqs", 1)
    said = answer(of("vllm-0.32.0", text), "--max-num-seqs")
    assert said.state is State.MISSING
    assert re.search(r"not defined \(only mentioned, in line \d+\)", said.words)


def test_a_flag_that_was_removed_is_quoted() -> None:
    text = re.sub(
        r"^(-np,   --parallel N  +).*$",
        r"\1the argument has been removed. use --slots-at-once",
        WHOLE["llamacpp-b10068"][2],
        flags=re.MULTILINE,
    )
    report = of("llamacpp-b10068", text)
    (said,) = report.removed
    assert said.flag.name == "--parallel"
    assert "the argument has been removed. use --slots-at-once" in said.words
    assert not report.ok


def test_a_deprecated_flag_fits_and_is_told_of() -> None:
    text = re.sub(
        r"^(  --enable-metrics +).*$", r"\1Deprecated. Use --metrics.", WHOLE["sglang-0.5.23"][2], flags=re.MULTILINE
    )
    report = of("sglang-0.5.23", text)
    assert report.ok
    said = answer(report, "--enable-metrics")
    assert said.state is State.DEPRECATED
    assert "Use --metrics." in said.words


@pytest.mark.parametrize(
    ("before", "after", "flag", "words"),
    [
        (
            "--ctx-size N ",
            "--ctx-size   ",
            "--ctx-size",
            "llmgw passes it with a value (32768), and here it takes none",
        ),
        ("--metrics     ", "--metrics N   ", "--metrics", "passes it alone, and here it needs a value: --metrics N"),
        ("--metrics        ", "--metrics [on|off]", "--metrics", "here it needs a value: --metrics [on|off]"),
        ("--fit [on|off]", "--fit [on|auto]", "--fit", "llmgw passes off, and here it takes one of on, auto"),
    ],
)
def test_a_flag_that_takes_other_values_is_found(before: str, after: str, flag: str, words: str) -> None:
    text = WHOLE["llamacpp-b10068"][2]
    assert before in text
    report = of("llamacpp-b10068", text.replace(before, after))
    (said,) = report.values
    assert (said.flag.name, report.ok) == (flag, False)
    assert words in said.words


def test_values_of_vllm_and_values_that_may_be_left_out() -> None:
    text = WHOLE["vllm-0.32.0"][2].replace("['external_launcher', 'mp', 'ray', 'uni']", "['external_launcher', 'uni']")
    (said,) = of("vllm-0.32.0", text).values
    assert said.words == "llmgw passes mp, ray, and here it takes one of external_launcher, uni"
    optional = WHOLE["vllm-0.32.0"][2].replace("  --headless    ", "  --headless [N]")
    assert of("vllm-0.32.0", optional).ok


# -- alternatives, and what not all versions have


def test_one_of_several_is_enough() -> None:
    only_old = WHOLE["llamacpp-b10068"][2].replace("--no-ui, --no-webui", "--no-webui")
    report = of("llamacpp-b10068", only_old)
    assert report.ok
    assert answer(report, "--no-ui").words == "not in this version: llmgw passes --no-webui"
    neither = of("llamacpp-b10068", only_old.replace("--no-webui", "--no-front"))
    assert [each.flag.name for each in neither.missing] == ["--no-ui"]
    assert neither.missing[0].words.startswith(
        "not defined, nor is --no-webui; the nearest is --no-ui-mcp-proxy (line 498"
    )


@pytest.mark.parametrize(
    ("flag", "version", "state"),
    [
        ("--shutdown-timeout", "0.17.1", State.LEFT_OUT),
        ("--shutdown-timeout", "0.18.0", State.MISSING),
        ("--shutdown-timeout", "0.32.0+cpu", State.MISSING),
        ("--shutdown-timeout", "", State.MISSING),
        ("--disable-log-requests", "0.32.0+cpu", State.LEFT_OUT),
        ("--disable-log-requests", "", State.LEFT_OUT),
        ("--disable-log-requests", "0.9.2", State.MISSING),
    ],
)
def test_what_a_version_need_not_have(flag: str, version: str, state: State) -> None:
    """Where the adapter goes by the version alone it does not ask for the flag, and there is nothing to answer."""
    text = renamed(WHOLE["vllm-0.32.0"][2], flag, "--quite-another")
    report = of("vllm-0.32.0", text, version)
    states = {each.flag.name: each.state for each in report.answers}
    assert states.get(flag, State.LEFT_OUT) is state


# -- helps that are a part of themselves


@pytest.mark.parametrize("name", WHOLE)
def test_a_help_that_is_cut_at_line_400_proves_nothing_missing(name: str) -> None:
    report = of(name, "".join(WHOLE[name][2].splitlines(keepends=True)[:400]))
    assert not report.ok
    assert report.cut_short is not None
    assert report.faults == ()
    assert report.unseen
    assert all("may be cut off" in each.words for each in report.unseen)
    assert "may be cut off" in report.words
    assert "missing" not in report.words


def test_a_definition_that_is_cut_in_two_proves_nothing_of_its_value() -> None:
    text = WHOLE["llamacpp-b10068"][2]
    end = text.index("--ctx-size N") + len("--ctx-size")
    assert answer(of("llamacpp-b10068", text[:end]), "--ctx-size").state is State.UNSEEN


@given(st.sampled_from(sorted(WHOLE)), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_wherever_a_help_is_cut_nothing_is_called_wrong(name: str, part: float) -> None:
    text = WHOLE[name][2]
    report = of(name, text[: int(part * len(text))])
    assert report.faults == ()
    assert report.ok or report.cut_short is not None


@given(st.sampled_from(sorted(WHOLE)), st.floats(0, 1))
@settings(deadline=None, max_examples=20)
def test_a_help_without_its_beginning_is_known_as_such(name: str, part: float) -> None:
    """Unless it is so short a piece that it holds everything."""
    lines = WHOLE[name][2].splitlines(keepends=True)
    documented = next(number for number, line in enumerate(lines) if re.match(r" {0,2}-h,", line))
    start = documented + 1 + int(part * (len(lines) - documented - 1))
    assert of(name, "".join(lines[start:])).cut_short is not None


def test_a_summary_is_no_help() -> None:
    """It names ``--help`` eight times, once at the beginning of a line."""
    summary = recorded("vllm-0.32.0-summary")
    assert not whole(summary)
    report = of("vllm-0.32.0", summary)
    assert report.cut_short == "it defines no flag at all"
    assert report.faults == ()


def test_a_search_for_the_word_all_is_no_help() -> None:
    """What ``--help=all`` was before 0.11.1."""
    found = "usage: vllm serve\n\n  --allow-credentials   Allow credentials.\n  --all2all-backend X   Which.\n"
    assert not whole(found)
    report = of("vllm-0.32.0", found)
    assert report.cut_short is not None
    assert "does not document --help itself" in report.cut_short
    assert report.faults == ()


def test_a_whole_help_is_whole() -> None:
    assert all(whole(text) for _, _, text in WHOLE.values())
    assert all(whole(text) for others in OTHERS.values() for text in others.values())


def test_no_text_at_all() -> None:
    for name in WHOLE:
        report = of(name, "")
        assert report.cut_short == "it defines no flag at all"
        assert {each.state for each in report.answers} <= {State.UNSEEN, State.LEFT_OUT}


@given(st.text())
@settings(deadline=None, max_examples=50)
def test_any_text_is_answered(text: str) -> None:
    report = of("llamacpp-b10068", text)
    assert len(report.answers) == len([flag for flag in widest(ENGINES["llamacpp"], "b10068") if not flag.program])


def test_the_help_of_another_engine_does_not_fit() -> None:
    assert not of("llamacpp-b10068", WHOLE["vllm-0.32.0"][2]).ok
    assert not of("vllm-0.32.0", WHOLE["sglang-0.5.23"][2]).ok


# -- how they are asked


def test_vllm_is_asked_for_all_and_told_what_to_suppose() -> None:
    first, second, third = help_questions("vllm", ("/opt/vllm/bin/vllm",))
    assert first.argv == ("/opt/vllm/bin/vllm", "serve", "--help=all")
    assert second.argv == ("/opt/vllm/bin/vllm", "serve", "--help")
    assert first.env == second.env == {"VLLM_TARGET_DEVICE": "cpu"}
    assert third.env == {}
    assert version_question("vllm", ("/opt/vllm/bin/vllm",)).env == {}


def test_questions_have_time() -> None:
    for engine, program in (("vllm", ("v",)), ("sglang", ("p", "-m", "sglang.launch_server")), ("llamacpp", ("l",))):
        questions = [*help_questions(engine, program), version_question(engine, program)]
        assert all(question.limit_s >= 300 for question in questions)
        assert all(question.argv[: len(program)] == program for question in help_questions(engine, program))


def test_sglang_says_its_version_by_another_command() -> None:
    assert version_question("sglang", ("/s/bin/sglang", "serve")).argv == ("/s/bin/sglang", "version")
    by_python = version_question("sglang", ("/s/bin/python", "-m", "sglang.launch_server"))
    assert by_python.argv[:2] == ("/s/bin/python", "-c")
