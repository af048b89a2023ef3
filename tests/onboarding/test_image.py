"""The image that a machine begins with: it comes whole, as its publisher states it, or not at all."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from llmgw.onboarding.image import SMALL, WITH_DRIVERS, Image, ImageRefused, fetch_image, image_of, stated
from llmgw.pki.authority import Authority

DATA = b"QFI\xfb" + bytes(range(256)) * 2000
SHA256, SHA512 = hashlib.sha256(DATA).hexdigest(), hashlib.sha512(DATA).hexdigest()
NAME = "debian-12-genericcloud-amd64.qcow2"


@asynccontextmanager
async def mirror(
    folder: Path, files: dict[str, bytes | list[int]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """A mirror over TLS. A list of numbers: the file breaks off after so many bytes, once for each."""
    Authority.create(folder / "pki", "mirror").issue_server(["127.0.0.1"], folder / "pki")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "pki/ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pki/server.pem", folder / "pki/server-key.pem")

    async def serve(request: web.Request) -> web.StreamResponse:
        data = files.get(request.match_info["name"])
        if isinstance(data, list):
            if data:
                response = web.StreamResponse(headers={"Content-Length": str(len(DATA))})
                await response.prepare(request)
                await response.write(DATA[: data.pop()])
                assert request.transport is not None
                request.transport.close()
                return response
            data = DATA
        return web.Response(body=data) if data is not None else web.Response(status=404)

    app = web.Application()
    app.add_routes([web.get("/{name}", serve)])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def say() -> Callable[[str], None]:
    return lambda words: None


@pytest.mark.parametrize(
    ("name", "listed", "algorithm"), [("SHA512SUMS", SHA512, "sha512"), ("SHA256SUMS", SHA256, "sha256")]
)
async def test_it_is_what_the_list_beside_it_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None], name: str, listed: str, algorithm: str
) -> None:
    sums = f"{'0' * len(listed)}  other.qcow2\n{listed}  {NAME}\n".encode()
    async with mirror(tmp_path, {NAME: DATA, name: sums}, monkeypatch) as url:
        image = await stated(image_of(f"{url}/{NAME}", None))
        assert (image.algorithm, image.digest) == (algorithm, listed)
        path = await fetch_image(image, tmp_path / "cache", say)
    assert path.read_bytes() == DATA
    # Again, without a mirror: it is kept.
    assert await fetch_image(image, tmp_path / "cache", say) == path
    path.write_bytes(DATA[:-1])
    with pytest.raises(ImageRefused, match="was expected and"):
        await fetch_image(image, tmp_path / "cache", say)


async def test_nothing_states_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mirror(tmp_path, {NAME: DATA, "SHA256SUMS": f"{SHA256}  other\n".encode()}, monkeypatch) as url:
        with pytest.raises(ImageRefused, match="add --image-sha256"):
            await stated(image_of(f"{url}/{NAME}", None))


async def test_another_image_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    async with mirror(tmp_path, {NAME: DATA + b"!"}, monkeypatch) as url:
        with pytest.raises(ImageRefused, match=f"sha256 {SHA256} was expected and"):
            await fetch_image(image_of(f"{url}/{NAME}", SHA256), tmp_path / "cache", say)
    assert list((tmp_path / "cache").iterdir()) == []


async def test_a_download_that_breaks_off_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    monkeypatch.setattr("llmgw.onboarding.image.RETRY_S", 0.01)
    async with mirror(tmp_path, {NAME: [1000, 70000]}, monkeypatch) as url:
        path = await fetch_image(image_of(f"{url}/{NAME}", SHA256), tmp_path / "cache", say)
        assert path.read_bytes() == DATA
        with pytest.raises(ImageRefused, match="404"):
            await fetch_image(image_of(f"{url}/gone.qcow2", SHA256), tmp_path / "cache", say)


async def test_an_image_of_this_machine(tmp_path: Path, say: Callable[[str], None]) -> None:
    file = tmp_path / NAME
    file.write_bytes(DATA)
    assert await fetch_image(image_of(str(file), None), tmp_path / "cache", say) == file
    assert await fetch_image(image_of(str(file), SHA256.upper()), tmp_path / "cache", say) == file
    with pytest.raises(ImageRefused, match="0" * 64):
        await fetch_image(image_of(str(file), "0" * 64), tmp_path / "cache", say)


@pytest.mark.parametrize(
    ("named", "sha256", "words"),
    [
        ("/nowhere/a.qcow2", None, "there is no image /nowhere/a.qcow2"),
        ("http://mirror.lab/a.qcow2", None, "add --image-sha256"),
        ("ftp://mirror.lab/a.qcow2", None, "an image comes from https://"),
        ("https://mirror.lab/a.iso", None, "it is no disk image"),
        (None, "abc", "64 hexadecimal digits are expected"),
    ],
)
def test_what_is_no_image(named: str | None, sha256: str | None, words: str) -> None:
    with pytest.raises(ImageRefused, match=words):
        image_of(named, sha256)


def test_what_is_taken_where_none_is_named() -> None:
    assert image_of(None, None) == Image(url=SMALL)
    # The small one has no drivers for hardware.
    assert image_of(None, None, hardware=True) == Image(url=WITH_DRIVERS)
    assert Image(url="https://x/noble-server-cloudimg-amd64.img", digest="ab" * 32).kept_as.endswith(
        f"-{'ab' * 8}.qcow2"
    )
