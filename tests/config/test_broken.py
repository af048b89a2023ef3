"""Broken files, and the whole message that each of them gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.config import ConfigError, load_agent, load_server, parse_server

BROKEN = Path(__file__).parent / "broken"
FILES = sorted(path.relative_to(BROKEN) for path in BROKEN.glob("*/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.with_suffix("")))
def test_a_broken_file_is_refused_in_these_words(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BROKEN / file.parent)
    load = {"server": load_server, "agent": load_agent}[str(file.parent)]
    with pytest.raises(ConfigError) as caught:
        load(file.name)
    assert f"{caught.value}\n" == (BROKEN / file).with_suffix(".txt").read_text()


def test_each_broken_file_has_its_message_and_none_is_left_over() -> None:
    assert len(FILES) > 100
    assert {path.with_suffix(".txt") for path in BROKEN.glob("*/*.yaml")} == set(BROKEN.glob("*/*.txt"))


def test_faults_can_be_read_one_by_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_server(BROKEN / "server" / "misspelt-engine.yaml")
    (fault,) = caught.value.faults
    assert (fault.line, fault.column, fault.path) == (4, 25, "models[0].profiles[0].engine")
    assert fault.found == '"vlm"'
    assert fault.hint == "did you mean `vllm`?"


def test_faults_come_in_the_order_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        load_server(BROKEN / "server" / "everything-at-once.yaml")
    places = [(fault.line, fault.column) for fault in caught.value.faults]
    assert places == sorted(places)
    assert len(places) == 13


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.with_suffix("")))
def test_no_message_shows_a_password(file: Path) -> None:
    assert "hunter2" not in (BROKEN / file).with_suffix(".txt").read_text()
    assert "ter2" not in (BROKEN / file).with_suffix(".txt").read_text()


def test_a_thousand_faults_are_all_found_and_the_first_ones_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server("models:\n" + "- 5\n" * 1000, "f.yaml")
    assert [fault.path for fault in caught.value.faults] == [f"models[{index}]" for index in range(1000)]
    assert str(caught.value).startswith("f.yaml can't be used: 1000 faults\nf.yaml:2:3: models[0]\n")
    assert str(caught.value).endswith("\n… and 800 more")
