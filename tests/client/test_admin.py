"""The operator's client against servers that answer, refuse, break off or are something else altogether."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from llmgw.client import AdminClient, AdminError, Context

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def saying(status: int, text: str, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(text.encode())))
        request.end_headers()
        request.wfile.write(text.encode())

    return answer


def refusal(context: Context, path: str = "status") -> AdminError:
    with pytest.raises(AdminError) as error, AdminClient(context) as client:
        client.get(path)
    return error.value


def test_what_is_refused_comes_with_its_hint() -> None:
    error = {"error": {"message": "no", "type": "x", "code": "why", "hint": "do this"}}
    with server(saying(404, json.dumps(error))) as url:
        found = refusal(Context(url, "t"))
    assert (str(found), found.code, found.status) == ("no\ndo this", "why", 404)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "<html>a router's own page</html>"),
        (200, ""),
        (302, ""),
        (500, "Internal Server Error"),
        (502, '{"error": "bad gateway"}'),
        (404, "[]"),
        (404, '{"error": {}}'),
    ],
)
def test_something_else_on_that_port_is_said_so(status: int, text: str) -> None:
    with server(saying(status, text, location="http://127.0.0.1:9/")) as url:
        found = refusal(Context(url, "t"))
        for read in (
            lambda client: list(client.lines("shards/x/0/logs")),
            lambda client: client.download("backup", Path("/nonexistent/x")),
        ):
            if status >= 300:
                with pytest.raises(AdminError, match=str(status)), AdminClient(Context(url, "t")) as client:
                    read(client)
    assert f"answered {status} and nothing that llmgw would say" in str(found)
    assert "is that an llmgw control plane?" in str(found)


@pytest.mark.parametrize(
    ("server", "token", "words"),
    [
        ("http://[::1", "t", r"http://\[::1 is no address: .*\nit should be like http://127\.0\.0\.1:8081"),
        ("127.0.0.1:9", "t", "127.0.0.1:9 can't be reached"),
        ("ftp://127.0.0.1", "t", "ftp://127.0.0.1 can't be reached"),
        ("http://127.0.0.1:9", "t", "is the control plane running there"),
        ("http://127.0.0.1:9", "t\n", "was it copied whole, and nothing more"),
        ("http://127.0.0.1:9", "tökén", "was it copied whole, and nothing more"),
    ],
)
def test_a_context_that_leads_nowhere(server: str, token: str, words: str) -> None:
    with pytest.raises(AdminError, match=words) as error, AdminClient(Context(server, token)) as client:
        client.get("status")
    assert "tökén" not in str(error.value)


def test_an_authority_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(AdminError, match=r"the authority's certificate .*nowhere\.pem can't be read"):
        AdminClient(Context("https://127.0.0.1:9", "t", str(tmp_path / "nowhere.pem")))


@pytest.mark.parametrize("name", ["a?b", "a#b", "a b", "a%2Fb", "ä", "a;b&c=d"])
def test_a_name_goes_as_it_was_typed(name: str) -> None:
    paths: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        paths.append(request.path)
        saying(200, "{}")(request)

    with server(answer) as url, AdminClient(Context(url, "t")) as client:
        client.get(f"nodes/{name}", after="x")
    path, _, query = paths[0].partition("?")
    assert unquote(path) == f"/api/v1/nodes/{name}"
    assert query == "after=x"


def test_a_download_is_whole_or_not_there(tmp_path: Path) -> None:
    with server(saying(200, "the whole store")) as url, AdminClient(Context(url, "t")) as client:
        assert client.download("backup", tmp_path / "saved.db") == 15
    assert (tmp_path / "saved.db").read_text() == "the whole store"
    assert (tmp_path / "saved.db").stat().st_mode & 0o777 == 0o600

    def breaks(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", "1000")
        request.end_headers()
        request.wfile.write(b"a part of it")
        request.close_connection = True

    with server(breaks) as url, AdminClient(Context(url, "t")) as client, pytest.raises(AdminError):
        client.download("backup", tmp_path / "broken.db")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.db"]


def test_a_token_shows_in_no_repr() -> None:
    assert "secret" not in repr(Context("http://x", "secret"))
