"""Whatever servers do in a row, and whatever lies there: what comes is the right file, and in the end it comes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.download import Limits, StartAnew, download

from .origin import Answer, Origin, serving
from .test_download import Taking, leave_part

CONTENT = random.Random(5).randbytes(60_000)
FLIPPED = CONTENT[:30_000] + bytes([CONTENT[30_000] ^ 1]) + CONTENT[30_001:]
PLACES = st.integers(0, len(CONTENT))
ETAGS = st.sampled_from(['"one"', '"one"', '"two"', 'W/"one"', None])
ANSWERS = st.builds(
    Answer,
    status=st.sampled_from([None, None, None, None, 500, 416, 206]),
    content=st.sampled_from([None, None, None, FLIPPED, CONTENT[:50_000], CONTENT + b"more"]),
    etag=ETAGS,
    ranges=st.booleans(),
    cut_at=st.none() | PLACES,
    chunked=st.booleans(),
)
LIMITS = Limits(stall_s=10, pause_s=0, tries=6)


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    with serving(Origin(CONTENT)) as served:
        yield served


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    answers=st.lists(ANSWERS, max_size=6),
    part=st.none() | st.tuples(PLACES, ETAGS, st.booleans()),
    size=st.booleans(),
    sinking=st.booleans(),
)
async def test_chance(
    origin: Origin, answers: list[Answer], part: tuple[int, str | None, bool] | None, size: bool, sinking: bool
) -> None:
    artifact = origin.artifact(size=size)
    origin.answers = [*answers, Answer()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if part is not None:
            length, etag, right = part
            leave_part(folder, artifact, (CONTENT if right else FLIPPED)[:length], etag)
        for attempt in range(6):
            if attempt >= 3:
                origin.answers = [Answer()]  # it has come to itself
            sink = Taking() if sinking else None
            try:
                path = await download(artifact, folder, lambda words: None, sink=sink, limits=LIMITS)
            except StartAnew:
                assert sinking
                assert not list(folder.iterdir())
                continue
            except FetchFailed:
                assert not (folder / artifact.name).exists()
                continue
            assert path.read_bytes() == CONTENT
            assert sink is None or bytes(sink.taken) == CONTENT
            assert [each.name for each in folder.iterdir()] == [artifact.name]
            return
        raise AssertionError("a source that had come to itself did not give it")
