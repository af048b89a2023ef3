"""A package index on loopback, and wheels made for it."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def make_wheel(package: str, version: str, files: Mapping[str, tuple[bytes, int]], *, stored: bool = False) -> Wheel:
    """A wheel that pip takes. ``files`` maps paths to content and mode."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    tags = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {**files, f"{info}/METADATA": (metadata, 0o644), f"{info}/WHEEL": (tags, 0o644)}
    record = "".join(f"{name},sha256={_urlsafe(content)},{len(content)}\n" for name, (content, _) in members.items())
    members[f"{info}/RECORD"] = (f"{record}{info}/RECORD,,\n".encode(), 0o644)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED) as archive:
        for name, (content, mode) in members.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = archive.compression
            archive.writestr(entry, content)
    return Wheel(package, version, f"{stem}-py3-none-any.whl", buffer.getvalue())


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@dataclass
class Index:
    """What the index serves, and how badly. Change it while it runs."""

    url: str = ""
    wheels: list[Wheel] = field(default_factory=list)
    status: int | None = None
    """Answer everything with this status."""
    silent: bool = False
    """Take connections and never answer."""
    cut_after: int | None = None
    """Close the connection after so many bytes of a wheel, which is gone when the rest is asked for."""
    hold_after: int | None = None
    """Send so many bytes of a wheel, and then nothing, until released."""
    released: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    downloads: int = 0
    starts: list[int] = field(default_factory=list)
    """At which byte each download began."""


def _handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if index.silent:
                index.holding.set()
                index.released.wait(30)
                self.close_connection = True
            elif index.status is not None:
                self.send_error(index.status)
            elif self.path.startswith("/simple/"):
                self._page(self.path.removeprefix("/simple/").strip("/"))
            else:
                self._file(self.path.removeprefix("/files/"))

        def _page(self, package: str) -> None:
            found = [wheel for wheel in index.wheels if wheel.package == package]
            if not found:
                self.send_error(404)
                return
            links = "".join(f'<a href="/files/{wheel.name}#sha256={wheel.sha256}">{wheel.name}</a>' for wheel in found)
            page = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def _file(self, name: str) -> None:
            content = next(wheel.content for wheel in index.wheels if wheel.name == name)
            index.downloads += 1
            if index.cut_after is not None and "Range" in self.headers:
                self.send_error(404)
                return
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            index.starts.append(start)
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", "application/octet-stream")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            content = content[start:]
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                if index.cut_after is not None:
                    self.wfile.write(content[: index.cut_after])
                    self.close_connection = True
                elif index.hold_after is not None:
                    self.wfile.write(content[: index.hold_after])
                    index.holding.set()
                    index.released.wait(30)
                    self.wfile.write(content[index.hold_after :])
                else:
                    self.wfile.write(content)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(index: Index) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(index))
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        index.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points pip at this index, and at nothing else."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "10")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    served = Index()
    # pip starts in a second less where its bytecode is kept from test to test.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "pycache"))
    with serving(served):
        use(served, monkeypatch)
        yield served
