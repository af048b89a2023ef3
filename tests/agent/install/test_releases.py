"""The real llama-server from a release on GitHub, played on loopback: listing, digest, redirect, archive with links."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.fetch.contents import CONTENTS, damage
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState
from tests.agent.fetch.origin import Answer, Origin, serving

from .conftest import Installed
from .node import Engines
from .packing import ASSET

TAG = "b10068"
SPEC = EngineSpec(name="llamacpp", version=TAG)
LISTING = f"/repos/ggml-org/llama.cpp/releases/tags/{TAG}"
DOWNLOAD = f"/ggml-org/llama.cpp/releases/download/{TAG}/"


@pytest.fixture(scope="session")
def archive(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """As the project's own workflow packs it: one top folder, libraries once, links for their other names."""
    path = tmp_path_factory.mktemp("release") / ASSET.format(version=TAG)
    first: dict[bytes, str] = {}
    with gzip.GzipFile(path, "wb", compresslevel=1, mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for file in sorted(installed.binary.parent.iterdir(), key=lambda file: -len(file.name)):
            content = file.read_bytes()
            member = tar.gettarinfo(file, f"llama-{TAG}/{file.name}")
            member.mode = 0o755
            if content in first and ".so" in file.name:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, first[content], 0
                tar.addfile(member)
                continue
            first.setdefault(content, file.name)
            with file.open("rb") as opened:
                tar.addfile(member, opened)
    return path.read_bytes()


@pytest.fixture
def github(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    origin = Origin(archive, name=ASSET.format(version=TAG))
    with serving(origin):
        asset = {
            "name": origin.name,
            "size": len(archive),
            "state": "uploaded",
            "digest": f"sha256:{origin.sha256}",
            "browser_download_url": f"{origin.url}{DOWNLOAD}{origin.name}",
        }
        listing = json.dumps({"tag_name": TAG, "prerelease": True, "draft": False, "assets": [asset]})
        origin.pages[LISTING] = ("application/json", listing.encode())
        monkeypatch.setenv("LLMGW_GITHUB_API", origin.url)
        for name in ("GITHUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield origin


def redirected(origin: Origin, *answers: Answer) -> list[Answer]:
    """Each download is sent on first, as GitHub does."""
    on = Answer(status=302, location=f"{origin.url}/cdn/{origin.name}")
    return [each for answer in answers for each in (on, answer)]


def flipped(content: bytes) -> bytes:
    wrong = bytearray(content)
    wrong[len(wrong) // 2] ^= 1
    return bytes(wrong)


async def test_a_release_is_installed_and_answers(github: Origin, tmp_path: Path) -> None:
    github.answers = redirected(github, Answer())
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(SPEC) is EngineState.INSTALLED, engines.words
    assert [request.path for request in github.requests] == [LISTING, f"{DOWNLOAD}{github.name}", f"/cdn/{github.name}"]
    (name,) = engines.folders()
    place = engines.engines_dir / "llamacpp" / name
    assert name.endswith(f"-{github.sha256[:12]}")
    assert engines.program(TAG).argv == (str(place / "llama-server"),)
    assert (place / "libllama.so.0").is_symlink()
    assert (place / CONTENTS).is_file()
    assert damage(place) is None
    downloading = [engine.words for engine in engines.said if engine.state is EngineState.DOWNLOADING]
    assert f"downloading {github.name} (" in downloading[0]

    # Found again without a word to GitHub.
    again = Engines(tmp_path)
    assert await again.installer.ensure(SPEC) is EngineState.INSTALLED
    assert len(github.requests) == 3


async def test_a_download_that_is_cut_goes_on_from_there(github: Origin, tmp_path: Path) -> None:
    cut_at = len(github.content) * 6 // 10
    github.answers = redirected(github, Answer(cut_at=cut_at), Answer())
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(SPEC) is EngineState.INSTALLED, engines.words
    asked = [request for request in github.requests if request.path.startswith("/cdn/")]
    assert asked[0].headers.get("range") is None
    start = int(asked[1].headers["range"].removeprefix("bytes=").rstrip("-"))
    assert 0 < start <= cut_at
    assert github.sent_bytes <= len(github.content) + (cut_at - start) + len(github.pages[LISTING][1])
    (name,) = engines.folders()
    assert damage(engines.engines_dir / "llamacpp" / name) is None


async def test_a_flipped_byte_is_fetched_anew_once(github: Origin, tmp_path: Path) -> None:
    github.answers = redirected(github, Answer(content=flipped(github.content), etag=None), Answer())
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(SPEC) is EngineState.INSTALLED, engines.words
    (name,) = engines.folders()
    assert damage(engines.engines_dir / "llamacpp" / name) is None


async def test_a_byte_that_is_flipped_each_time_ends_with_both_hashes(github: Origin, tmp_path: Path) -> None:
    wrong = Origin(flipped(github.content))
    bad = Answer(content=wrong.content, etag=None)
    github.answers = redirected(github, bad, bad, bad)
    engines = Engines(tmp_path)
    assert await engines.installer.ensure(SPEC) is EngineState.FAILED
    assert github.sha256 in engines.words
    assert wrong.sha256 in engines.words
    assert sum(request.path.startswith("/cdn/") for request in github.requests) == 2
    assert engines.folders() == []
    assert not [path for path in engines.cache_dir.rglob("*") if path.is_file()]
