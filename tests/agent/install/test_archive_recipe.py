"""How archives of an engine become its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.fetch.archive import Packing
from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.found import Found
from llmgw.agent.install.archive_recipe import ArchiveRecipe
from tests.agent.fetch.hostile import file, packed, tar
from tests.agent.fetch.origin import Origin, serving

PROGRAM = packed(Packing.TAR_GZ, tar(file(b"top/llama-server", b"#!/bin/sh\n", 0o755)))
RUNTIME = packed(Packing.TAR_GZ, tar(file(b"runtime/libcudart.so.12", b"cuda")))


async def test_an_archive_is_not_fetched_again_because_another_did_not_come(tmp_path: Path) -> None:
    program, runtime = Origin(PROGRAM, name="program.tar.gz"), Origin(RUNTIME, name="runtime.tar.gz")
    with serving(program), serving(runtime):
        whole = Found(artifacts=(program.artifact(), runtime.artifact()), variant="cuda-12.8-x86_64")
        lacking = replace(whole, artifacts=(program.artifact(), runtime.artifact(sha256="0" * 64)))
        for found in (lacking, whole):
            partial = tmp_path / found.artifacts[1].sha256[:8]
            partial.mkdir()
            recipe = ArchiveRecipe(engine="llamacpp", version="b1", found=found, downloads=tmp_path / "downloads")
            if found is lacking:
                with pytest.raises(FetchFailed, match="sha256"):
                    await recipe.put(partial, lambda state, words: None)
                continue
            await recipe.put(partial, lambda state, words: None)
    assert len(program.requests) == 1
    assert {path.name for path in partial.iterdir()} >= {"llama-server", "libcudart.so.12"}
    assert not (tmp_path / "downloads").exists()
