from __future__ import annotations

import pytest

from llmgw.config import ConfigError
from llmgw.config.document import MAX_BYTES, Mark, path_text, read, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("8:30", "8:30"),
        ("0.0.0.0:8080", "0.0.0.0:8080"),
        ("20000-29999", "20000-29999"),
        ("0.33.0", "0.33.0"),
        ("b10991", "b10991"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 30, "9" * 30),
        ("=", "="),
        ("0.33", 0.33),
        ("1e3", 1000.0),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_what_a_plain_scalar_means(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_quotes_make_text() -> None:
    assert read("""a: "1"\nb: 'true'\nc: !!str 5\nd: |\n  x\n""", "f").value == {
        "a": "1",
        "b": "true",
        "c": "5",
        "d": "x\n",
    }


def test_values_know_where_they_are() -> None:
    document = read("models:\n  - name: a\n    replicas: 0.10\n", "f")
    assert document.marks["models", 0, "replicas"] == Mark(3, 15)
    assert document.key_marks["models", 0, "replicas"] == Mark(3, 5)
    assert document.found(("models", 0, "replicas")) == "the number 0.10"


def test_an_alias_is_what_it_stands_for() -> None:
    assert read("a: &x {b: [1]}\nc: *x\n", "f").value == {"a": {"b": [1]}, "c": {"b": [1]}}


def test_paths_are_readable() -> None:
    assert path_text(("models", 0, "node_selector", "a b", "c-d")) == 'models[0].node_selector["a b"].c-d'


def test_all_faults_of_the_notation_are_found() -> None:
    document = read("a: 1\na: 2\n1: x\n? [b]\n: c\n<<: {}\nd: !x y\n", "f")
    assert [(fault.line, fault.path) for fault in document.faults] == [(2, "a"), (3, ""), (4, ""), (6, ""), (7, "d")]
    assert document.value == {"a": 1, "d": "y"}


def refusal(text: str) -> str:
    """The message that a text is refused with; empty where it is not."""
    try:
        read(text, "f")
    except ConfigError as error:
        return str(error)
    return ""


BOMBS = {
    "nested aliases": "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 20) if i else 'x'}]\n" for i in range(25)),
    "wide aliases": "a: &a [" + "x, " * 5000 + "x]\nb: [" + "*a, " * 5000 + "*a]\n",
    "brackets": "[" * 100_000,
    "braces": "{" * 100_000,
    "dashes": "- " * 100_000,
    "keys": "? " * 100_000,
    "colons": ": " * 100_000,
    "anchors": "".join(f"&a{i} " for i in range(100_000)),
    "quotes": '"' + "\\u0041" * 150_000,
    "a long line": "a" * MAX_BYTES,
    "a long number": "a: " + "9" * 500_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_quickly(text: str) -> None:
    """What grew with the square of such a text, or faster, would run into the limit that every test has."""
    assert len(refusal(text)) < 1000


@pytest.mark.parametrize(
    "text", ['a: "\\U99999999"', 'a: "\\ud800"', "%YAML 1." + "9" * 5000 + "\n---\na: 1", 'a: "\\0"']
)
def test_escapes_out_of_range_are_faults(text: str) -> None:
    try:
        document = read(text, "f")
    except ConfigError as error:
        str(error).encode()
    else:
        assert document.faults
        str(document.error(document.faults)).encode()
