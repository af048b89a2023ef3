"""The disk image that a machine begins with: which, and how it is known to be the right one."""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urljoin, urlsplit

import aiohttp

from llmgw.agent.fetch.artifact import Access, FetchFailed, Say
from llmgw.agent.fetch.complaints import Broken, explain, shown
from llmgw.agent.fetch.transport import Transport, read

Algorithm = Literal["sha256", "sha512"]

DEBIAN = "https://cloud.debian.org/images/cloud/bookworm/latest/"
SMALL = DEBIAN + "debian-12-genericcloud-amd64.qcow2"
WITH_DRIVERS = DEBIAN + "debian-12-generic-amd64.qcow2"
"""What `genericcloud` leaves out are the drivers of real hardware, as a device that is passed through is."""

_LISTS: tuple[tuple[str, Algorithm], ...] = (("SHA256SUMS", "sha256"), ("SHA512SUMS", "sha512"))
_DIGITS = {"sha256": 64, "sha512": 128}
_FORMATS = {".qcow2": ".qcow2", ".img": ".qcow2", ".raw": ".raw", ".vmdk": ".vmdk"}
_CHUNK = 1 << 20
_TRIES = 3
RETRY_S = 1.0
"""Before the second try; twice that before the third."""
_STALL_S = 30.0
_MOST_LIST_BYTES = 1 << 20


class ImageRefused(Exception):
    """The image can't be used; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A file of this machine (``path``) or elsewhere (``url``): one of the two."""

    path: Path | None = None
    url: str | None = None
    algorithm: Algorithm = "sha256"
    digest: str | None = None
    """What its publisher states, or the reader; None only for a file of this machine."""

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else urlsplit(self.url or "").path.rpartition("/")[2]

    @property
    def kept_as(self) -> str:
        """A name by which the same image is found again, and another one never."""
        stem, dot, ending = self.name.rpartition(".")
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", stem if dot else self.name)
        return f"llmgw-{plain}-{(self.digest or '')[:16]}{_FORMATS[f'.{ending.lower()}']}"


def image_of(text: str | None, sha256: str | None, *, hardware: bool = False) -> Image:
    """What ``--image`` and ``--image-sha256`` name. Raises ImageRefused."""
    digest = _digits(sha256)
    named = text if text is not None else (WITH_DRIVERS if hardware else SMALL)
    if "://" not in named:
        path = Path(named).absolute()
        if not path.is_file():
            raise ImageRefused(f"there is no image {path}: a file of this machine or a URL is expected")
        return Image(path=path, digest=digest)
    parts = urlsplit(named)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ImageRefused(f"{shown(named)}: an image comes from https://, http:// or a file of this machine")
    if Path(parts.path).suffix.lower() not in _FORMATS:
        raise ImageRefused(f"{shown(named)} ends in none of {', '.join(_FORMATS)}: it is no disk image")
    if digest is None and parts.scheme == "http":
        raise ImageRefused(f"{shown(named)} is not encrypted, so nothing vouches for it: add --image-sha256")
    return Image(url=named, digest=digest)


async def stated(image: Image) -> Image:
    """The image with the digest that its publisher states beside it, where none was given. Raises ImageRefused."""
    if image.digest is not None or image.url is None:
        return image
    try:
        async with Transport(Access()) as transport:
            for name, algorithm in _LISTS:
                status, _, body, _ = await read(
                    transport, urljoin(image.url, name), {}, most_bytes=_MOST_LIST_BYTES, patience_s=_STALL_S
                )
                digest = _listed(body.decode("utf-8", "replace"), image.name, algorithm) if status == 200 else None
                if digest is not None:
                    return Image(url=image.url, algorithm=algorithm, digest=digest)
    except (Broken, FetchFailed) as error:
        raise ImageRefused(
            f"{error}. Where this machine reaches no such place: --image FILE, or --image URL --image-sha256 …"
        ) from None
    raise ImageRefused(
        f"beside {shown(image.url)} lies neither SHA256SUMS nor SHA512SUMS that names it: add --image-sha256"
    )


async def fetch_image(image: Image, folder: Path, say: Say) -> Path:
    """Where the image lies on this machine, checked; one from elsewhere is kept in ``folder`` under its own digest.

    Raises ImageRefused.
    """
    if image.path is not None:
        await _check_file(image.path, image)
        return image.path
    kept = folder / image.kept_as
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if kept.is_file():
            await _check_file(kept, image)
            say(f"{image.name} is here already")
            return kept
        draft = kept.with_name(f".{kept.name}.part")
        await _download(image, draft, say)
        draft.rename(kept)
    except OSError as error:
        raise ImageRefused(f"{image.name} can't be kept in {folder}: {error.strerror or error}") from None
    return kept


async def _download(image: Image, draft: Path, say: Say) -> None:
    assert image.url is not None
    async with Transport(Access(), patience_s=_STALL_S) as transport:
        for number in range(1, _TRIES + 1):
            try:
                got = await _once(transport, image, draft, say)
                break
            except (Broken, FetchFailed) as error:
                draft.unlink(missing_ok=True)
                if number == _TRIES or isinstance(error, FetchFailed):
                    raise ImageRefused(f"{shown(image.url)} did not come: {error}") from None
                say(f"{error}: trying again")
                await asyncio.sleep(number * RETRY_S)
    if got != image.digest:
        draft.unlink()
        raise ImageRefused(_other(image, got))


async def _once(transport: Transport, image: Image, draft: Path, say: Say) -> str:
    assert image.url is not None
    digest = hashlib.new(image.algorithm)
    async with transport.get(image.url, {}) as response:
        if response.status >= 500:
            raise Broken(f"its server answers {response.status}")
        if response.status != 200:
            raise FetchFailed(f"its server answers {response.status} {response.reason}")
        total, done, shown_percent = response.content_length, 0, 0
        with draft.open("wb") as file:
            while piece := await _piece(response, image.url):
                done += len(piece)
                await asyncio.to_thread(file.write, piece)
                digest.update(piece)
                percent = 100 * done // total if total else 0
                if percent >= shown_percent + 20:
                    shown_percent = percent
                    say(f"downloading {image.name}: {percent} % of {(total or 0) >> 20} MiB")
        if total is not None and done != total:
            raise Broken(f"it ended after {done} of {total} bytes")
    return digest.hexdigest()


async def _piece(response: aiohttp.ClientResponse, url: str) -> bytes:
    try:
        async with asyncio.timeout(_STALL_S):
            return await response.content.read(_CHUNK)
    except TimeoutError:
        raise Broken(f"no byte for {_STALL_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise explain(error, url) from None


def sha256_of(path: Path) -> str:
    return _digest_of(path, "sha256")


async def _check_file(path: Path, image: Image) -> None:
    if image.digest is None:
        return
    try:
        got = await asyncio.to_thread(_digest_of, path, image.algorithm)
    except OSError as error:
        raise ImageRefused(f"{path} can't be read: {error.strerror}") from None
    if got != image.digest:
        raise ImageRefused(f"{path}: {_other(image, got)}")


def _digest_of(path: Path, algorithm: Algorithm) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _other(image: Image, got: str) -> str:
    return (
        f"{image.name} is not the image that it should be: {image.algorithm} {image.digest} was expected and {got} came"
    )


def _listed(text: str, name: str, algorithm: Algorithm) -> str | None:
    """The digest of ``name`` in a list as sha256sum writes it."""
    for line in text.splitlines():
        digest, _, listed = line.partition(" ")
        if listed.strip().lstrip("*") == name and re.fullmatch(rf"[0-9a-f]{{{_DIGITS[algorithm]}}}", digest):
            return digest
    return None


def _digits(sha256: str | None) -> str | None:
    if sha256 is None:
        return None
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", sha256):
        raise ImageRefused(f"--image-sha256: 64 hexadecimal digits are expected, and {sha256!r} has {len(sha256)}")
    return sha256.lower()
