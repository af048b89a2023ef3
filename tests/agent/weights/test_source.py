from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from llmgw.agent.weights.source import FileSource, IndexSource, Source, WeightsRefused, parse
from llmgw.engines.builds import DEFAULT_MODEL_SOURCE


@pytest.mark.parametrize(
    ("source", "parsed"),
    [
        ("/models/a.gguf", FileSource(Path("/models/a.gguf"))),
        ("file:///models/a%20b.gguf", FileSource(Path("/models/a b.gguf"))),
        ("file://localhost/models/a.gguf", FileSource(Path("/models/a.gguf"))),
        ("index:llm-a==1.2.3/pkg/a.gguf", IndexSource("llm-a", "1.2.3", PurePosixPath("pkg/a.gguf"))),
        ("index:a==1.0+cpu/a.gguf", IndexSource("a", "1.0+cpu", PurePosixPath("a.gguf"))),
    ],
)
def test_sources(source: str, parsed: Source) -> None:
    assert parse(source) == parsed


def test_the_default_model_is_a_source() -> None:
    assert isinstance(parse(DEFAULT_MODEL_SOURCE), IndexSource)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://org/name@rev/file.gguf", "fetching hf://org/name@rev/file.gguf is not built yet: hf:// sources are not"),
        (
            "https://x/a.gguf",
            "https:// sources are not; use file:///PATH, an absolute path, or index:NAME==VERSION/FILE",
        ),
        ("s3://bucket/a", "s3:// sources are not"),
        ("a.gguf", "'a.gguf' is no source of weights: expected file:///PATH"),
        ("", "'' is no source of weights"),
        ("ftp://x/y", "is no source of weights"),
        ("file://host/a", "with three slashes"),
        ("file:a", "with three slashes"),
        ("index:a", "expected index:NAME==VERSION/FILE"),
        ("index:a==1", "expected index:NAME==VERSION/FILE"),
        ("index:a>=1/f", "expected index:NAME==VERSION/FILE"),
        ("index:-a==1/f", "expected index:NAME==VERSION/FILE"),
        ("index:a==--b/f", "expected index:NAME==VERSION/FILE"),
        ("index:a==1 --index-url x/f", "expected index:NAME==VERSION/FILE"),
        ("index:a==1/../../etc/passwd", "is no plain path inside a wheel"),
        ("index:a==1//f", "is no plain path inside a wheel"),
        ("index:a==1/f\n", "expected index:NAME==VERSION/FILE"),
    ],
)
def test_what_is_no_source_is_refused_in_words(source: str, words: str) -> None:
    with pytest.raises(WeightsRefused) as refused:
        parse(source)
    assert words in str(refused.value)
