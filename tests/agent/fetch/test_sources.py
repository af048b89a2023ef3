"""GitHub's releases and mirrors, asked on loopback."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.download import Limits, download
from llmgw.agent.fetch.sources import Found, resolve
from llmgw.cluster.catalog import EngineSpec
from llmgw.config import parse_server
from tests.engines.test_builds import machine
from tests.engines.test_releases import LISTINGS, with_gpu

from .origin import Answer, Origin, serving

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"
SPEC = EngineSpec(name="llamacpp", version="b11434", source="github")
RELEASES = "/repos/ggml-org/llama.cpp/releases/tags/"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    """GitHub's REST API with the recorded listings."""
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    with serving(Origin(b"")) as origin:
        monkeypatch.setenv("LLMGW_GITHUB_API", origin.url)
        for path in LISTINGS.glob("*.json"):
            origin.pages[f"{RELEASES}{path.stem}"] = ("application/json", path.read_bytes())
        yield origin


def listing(tag: str) -> Any:
    return json.loads((LISTINGS / f"{tag}.json").read_text())


def change(api: Origin, name: str, **values: Any) -> None:
    """Another listing of b11434, in which one archive is different."""
    changed = listing("b11434")
    for asset in changed["assets"]:
        if asset["name"] == name:
            asset.update(values)
    api.pages[f"{RELEASES}b11434"] = ("application/json", json.dumps(changed).encode())


X64 = "llama-b11434-bin-ubuntu-x64.tar.gz"


async def test_one_request_says_all_of_a_build(api: Origin) -> None:
    found = await resolve(SPEC, machine())
    (artifact,) = found.artifacts
    stated = next(asset for asset in listing("b11434")["assets"] if asset["name"] == X64)
    assert (artifact.name, artifact.url) == (X64, stated["browser_download_url"])
    assert (f"sha256:{artifact.sha256}", artifact.size_bytes) == (stated["digest"], stated["size"])
    assert (found.variant, found.reads_as) == ("cpu-x86_64", "b11434")
    assert [request.path for request in api.requests] == [f"{RELEASES}b11434"]
    assert "authorization" not in api.requests[0].headers


async def test_cuda_brings_its_runtime(api: Origin) -> None:
    found = await resolve(SPEC, with_gpu("570.1"))
    assert [artifact.name.partition("-b")[0] for artifact in found.artifacts] == ["llama", "cudart-llama"]
    assert found.variant == "cuda-12.8-x86_64"


async def test_a_nodes_file_wins_over_the_clusters(api: Origin) -> None:
    spec = dataclasses.replace(SPEC, build="cuda")
    assert (await resolve(spec, with_gpu(), build="cpu")).variant == "cpu-x86_64"
    assert (await resolve(spec, with_gpu())).variant == "cuda-13.4-x86_64"


async def test_a_token_goes_to_the_api_alone(api: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_1")
    found = await resolve(SPEC, machine())
    assert api.requests[0].headers["authorization"] == "Bearer ghp_1"
    assert not found.artifacts[0].headers


async def test_a_release_without_digests_is_not_fetched_unchecked(api: Origin) -> None:
    old = EngineSpec(name="llamacpp", version="b5200", source="github")
    with pytest.raises(FetchFailed, match=r"states no sha256 for llama-b5200-bin-ubuntu-x64.zip.*source: \{url: https"):
        await resolve(old, machine())
    found = await resolve(dataclasses.replace(old, sha256="ab" * 32), machine())
    assert found.artifacts[0].sha256 == "ab" * 32


async def test_a_stated_hash_that_github_contradicts(api: Origin) -> None:
    with pytest.raises(FetchFailed, match=r"GitHub states sha256 [0-9a-f]{64} for .* and the cluster's file abab"):
        await resolve(dataclasses.replace(SPEC, sha256="ab" * 32), machine())


async def test_an_archive_that_is_still_coming(api: Origin) -> None:
    change(api, X64, state="starter")
    with pytest.raises(FetchFailed, match=f"{X64} of llamacpp b11434 is still being uploaded"):
        await resolve(SPEC, machine())


async def test_what_a_machine_can_not_run_is_refused_in_the_tables_words(api: Origin) -> None:
    with pytest.raises(FetchFailed, match=r"is built for glibc 2\.39 or newer, and this machine has glibc 2\.36"):
        await resolve(SPEC, with_gpu(libc="glibc 2.36"))
    with pytest.raises(FetchFailed, match=r"holds no archives \(yet\)"):
        await resolve(dataclasses.replace(SPEC, version="v0.6.0"), machine())


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (404, {}, r"there is no release b1 at 127\.0\.0\.1:\d+/ggml-org/llama.cpp: numbers are skipped.*curl http"),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "SOON"}, r"until \d\d:\d\d UTC \(in 23 minutes\)"),
        (429, {"retry-after": "60"}, r"takes no more requests from here until .* \(in 1 minute\).*GITHUB_TOKEN"),
        (429, {"retry-after": "Wed, 21 Oct"}, "takes no more requests from here: the release b1"),
        (403, {}, "it wants credentials"),
        (500, {}, r"can't be asked for: .* answered 500 .*or use `source: index`"),
    ],
)
async def test_an_api_that_refuses(api: Origin, status: int, headers: dict[str, str], words: str) -> None:
    soon = {name: str(int(time.time() + 23 * 60)) if value == "SOON" else value for name, value in headers.items()}
    api.answers = [Answer(status=status, headers=soon)]
    with pytest.raises(FetchFailed, match=words):
        await resolve(dataclasses.replace(SPEC, version="b1"), machine())


async def test_a_token_that_is_not_taken(api: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_1")
    api.answers = [Answer(status=401)]
    with pytest.raises(FetchFailed, match="does not take the GITHUB_TOKEN") as refused:
        await resolve(dataclasses.replace(SPEC, version="b1"), machine())
    assert "ghp_1" not in str(refused.value)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"assets": 1}', b'{"assets": [{"name": 1}, 2]}'])
async def test_an_answer_that_is_no_release(api: Origin, body: bytes) -> None:
    api.pages[f"{RELEASES}b11434"] = ("application/json", body)
    with pytest.raises(FetchFailed, match="with what is no release of GitHub's API: look at LLMGW_GITHUB_API"):
        await resolve(SPEC, machine())


async def test_nobody_at_the_api(api: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_GITHUB_API", "http://127.0.0.1:1")
    with pytest.raises(FetchFailed, match="can't be reached: the connection was refused; or use `source: index`"):
        await resolve(SPEC, machine())


async def test_engines_that_are_not_installed_from_there(api: Origin) -> None:
    with pytest.raises(FetchFailed, match="vllm is not installed from GitHub: say `source: index`"):
        await resolve(EngineSpec(name="vllm", version="0.33.0", source="github"), machine())


async def test_an_archive_of_a_release_comes_over_redirects(api: Origin, tmp_path: Path) -> None:
    """As GitHub has it: a release's archive lies at another host, at an address that is signed."""
    content = b"archive" * 1000
    with serving(Origin(content, name="signed", answers=[Answer(cut_at=4000), Answer()])) as store:
        change(
            api,
            X64,
            browser_download_url=f"{api.url}/download/{X64}",
            size=len(content),
            digest=f"sha256:{store.sha256}",
        )
        api.answers = [Answer(status=302, location=f"{store.url}/signed?sig=a%2Fb%3D&se=2026")]
        (artifact,) = (await resolve(SPEC, machine())).artifacts
        path = await download(artifact, tmp_path, print, limits=Limits(pause_s=0))
        assert path.read_bytes() == content
        assert [request.path for request in store.requests] == ["/signed?sig=a%2Fb%3D&se=2026"] * 2
        assert store.ranges == [None, "bytes=4000-"]


# -- mirrors


async def test_an_archive_that_the_file_names(tmp_path: Path) -> None:
    for url in (
        "https://mirror/dl/llama%20x.tar.zst?v=2",
        "http://mirror/llama%20x.tar.zst",
        "file:///srv/llama%20x.tar.zst",
    ):
        found = await resolve(EngineSpec(name="llamacpp", version="b1", source=url, sha256="ab" * 32), machine())
        (artifact,) = found.artifacts
        assert (artifact.name, artifact.url, artifact.sha256) == ("llama x.tar.zst", url, "ab" * 32)
        assert (found.variant, found.reads_as, found.binary) == ("archive-x86_64", "b1", None)
    found = await resolve(
        EngineSpec(name="llamacpp", version="ours-3", source="file:///x.zip", sha256="0" * 64), machine()
    )
    assert found.reads_as is None


async def test_what_is_no_source() -> None:
    with pytest.raises(FetchFailed, match="has no sha256 in the cluster's file"):
        await resolve(EngineSpec(name="llamacpp", version="b1", source="https://m/x.tgz"), machine())
    with pytest.raises(FetchFailed, match="is no source of engines"):
        await resolve(EngineSpec(name="llamacpp", version="b1", source="s3://m/x", sha256="0" * 64), machine())


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("{url: 'https://mirror/x.tar.gz', sha256: %s}", "https://mirror/x.tar.gz"),
        ("{url: 'file:///srv/x.tar.gz', sha256: %s}", "file:///srv/x.tar.gz"),
    ],
)
async def test_what_a_file_says_is_what_is_fetched(source: str, url: str) -> None:
    text = "models: []\nengines:\n  llamacpp: {version: b1, source: %s}\n" % (source % ("ab" * 32))
    (spec,) = parse_server(text, "f").catalog.engines
    found: Found = await resolve(spec, machine())
    assert found.artifacts[0].url == url


async def test_the_build_of_the_published_example_is_asked_of_github(api: Origin) -> None:
    text = (EXAMPLES / "server.yaml").read_text()
    spec = next(each for each in parse_server(text, "f").catalog.engines if each.name == "llamacpp")
    api.answers = [Answer(status=404)]
    with pytest.raises(FetchFailed, match="there is no release b10991 at"):
        await resolve(spec, machine())
