from __future__ import annotations

from llmgw.control.errors import NAMED, not_found


def test_what_is_known_is_named() -> None:
    assert not_found("node", "n9", ["n2", "n1"]).hint == "known: n1, n2"
    assert not_found("node", "n9", []).hint == "there is no node yet"


def test_of_many_names_the_one_that_was_probably_meant_comes_first() -> None:
    known = [f"gpu-{number:03d}" for number in range(NAMED + 80)]
    error = not_found("node", "gpu-O77", known)
    assert str(error) == "no node is called 'gpu-O77'"
    assert error.hint.startswith("did you mean gpu-077? known: gpu-000, gpu-001, ")
    assert error.hint.endswith(f"gpu-{NAMED - 1:03d} and 80 more")
    assert not_found("node", "zzzz", known).hint.startswith("known: gpu-000")
