"""What connections keep to themselves, whom they trust and by which way they go."""

from __future__ import annotations

import base64
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from llmgw.agent.fetch.artifact import Access, FetchFailed
from llmgw.agent.fetch.complaints import Broken, explain, shown
from llmgw.agent.fetch.download import Limits, download
from llmgw.agent.fetch.transport import Transport, read
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of, in_words
from llmgw.pki.issuer import issue_issuer
from llmgw.pki.signing import name_of, pem_of
from llmgw.pki.signing_request import new_key, pem_of_key

from .origin import Answer, Origin, serving

CONTENT = b"content"
SECRET = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Other": "1"}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def origin() -> Iterator[Origin]:
    with serving(Origin(CONTENT)) as served:
        yield served


@dataclass(frozen=True)
class Tls:
    ca: Path
    server: ssl.SSLContext


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority.create(folder / "pki", "lab")
    issued = authority.issue_server(["127.0.0.1", "localhost"], folder / "out", "cp-1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    return Tls(issued.ca, context)


async def get(url: str, access: Access = Access(), headers: dict[str, str] | None = None) -> bytes:  # noqa: B008
    async with Transport(access, patience_s=10) as transport:
        status, _, body, _ = await read(transport, url, headers or {}, most_bytes=1000)
        assert status == 200
        return body


# -- redirects


async def test_what_authorizes_goes_to_no_other_host(origin: Origin) -> None:
    with serving(Origin(CONTENT)) as other:
        origin.answers = [Answer(status=302, location=f"{other.url}/there")]
        assert await get(f"{origin.url}/a", headers=SECRET) == CONTENT
        sent = other.requests[0].headers
        assert (sent.get("authorization"), sent.get("cookie"), sent.get("x-other")) == (None, None, "1")
        assert origin.requests[0].headers["authorization"] == "Bearer secret"


async def test_it_stays_with_the_same_host_also_by_a_relative_redirect(origin: Origin) -> None:
    origin.answers = [Answer(status=307, location="../b?x=%2F"), Answer()]
    assert await get(f"{origin.url}/a/c", headers=SECRET) == CONTENT
    assert [request.path for request in origin.requests] == ["/a/c", "/b?x=%2F"]
    assert origin.requests[1].headers["authorization"] == "Bearer secret"


async def test_credentials_of_the_url_go_along_to_the_same_host_alone(origin: Origin) -> None:
    with serving(Origin(CONTENT)) as other:
        origin.answers = [Answer(status=302, location="/b"), Answer(status=302, location=f"{origin.url}/c")]
        origin.answers += [Answer(status=302, location=f"{other.url}/there")]
        assert await get(origin.url.replace("://", "://me:p%40ss@") + "/a") == CONTENT
        basic = "Basic " + base64.b64encode(b"me:p@ss").decode()
        assert [request.headers.get("authorization") for request in origin.requests] == [basic] * 3
        assert "authorization" not in other.requests[0].headers


async def test_it_does_not_come_back_by_a_detour(origin: Origin) -> None:
    with serving(Origin(CONTENT)) as other:
        origin.answers = [Answer(status=302, location=f"{other.url}/x"), Answer()]
        other.answers = [Answer(status=302, location=f"{origin.url}/y")]
        assert await get(f"{origin.url}/a", headers=SECRET) == CONTENT
        assert "authorization" not in origin.requests[1].headers


async def test_a_circle_ends(origin: Origin) -> None:
    origin.answers = [Answer(status=302, location="/a")]
    with pytest.raises(FetchFailed, match="redirects more than 10 times"):
        await get(f"{origin.url}/a")
    assert len(origin.requests) == 11


@pytest.mark.parametrize("location", ["ftp://h/x", "file:///etc/passwd", "http://[::1", "https://"])
async def test_a_redirect_to_nowhere(origin: Origin, location: str) -> None:
    origin.answers = [Answer(status=302, location=location)]
    with pytest.raises((FetchFailed, Broken), match=r"redirects to|is no URL|can't be asked"):
        await get(f"{origin.url}/a")


@pytest.mark.parametrize("location", ["http://mirror.example/x", "http://127.0.0.1:1/x"])
async def test_tls_is_not_left_for_an_open_connection(tls: Tls, location: str) -> None:
    """Not for this very machine either: what listens there is nothing for others to ask."""
    with serving(Origin(b""), tls=tls.server) as origin:
        origin.answers = [Answer(status=302, location=location)]
        with pytest.raises(FetchFailed, match=rf"redirects to {location}, which is not encrypted: refused"):
            await get(f"{origin.url}/a", Access(ca=tls.ca))


# -- trust


async def test_an_authority_of_the_environment(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with serving(Origin(CONTENT), tls=tls.server) as origin:
        assert await get(f"{origin.url}/a") == CONTENT


async def test_one_that_nobody_named_is_not_trusted(tls: Tls, tmp_path: Path) -> None:
    with serving(Origin(CONTENT), tls=tls.server) as origin:
        artifact = origin.artifact()
        with pytest.raises(FetchFailed, match="'llmgw lab authority', not trusted here"):
            await download(artifact, tmp_path, print, limits=Limits(pause_s=0))


async def test_a_host_that_the_machines_owner_trusts(tls: Tls) -> None:
    with serving(Origin(CONTENT), tls=tls.server) as origin:
        place = urlsplit(origin.url).netloc
        for host in (place, "127.0.0.1"):
            assert await get(f"{origin.url}/a", Access(trusted_hosts=(host,))) == CONTENT
        with pytest.raises(FetchFailed, match="not trusted here"):
            await get(f"{origin.url}/a", Access(trusted_hosts=("127.0.0.1:1",)))


NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)


def showing(folder: Path, chain: bytes, key: bytes) -> ssl.SSLContext:
    (folder / "shown.pem").write_bytes(chain + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "shown.pem")
    return context


def of_the_authority(authority: Authority, folder: Path, now: datetime = NOW, san: str = "127.0.0.1") -> ssl.SSLContext:
    issued = authority.issue_server([san, "mirror.lab"], folder / "of", "cp-1", lifetime_s=3600.0, now=now)
    return showing(folder, issued.cert.read_bytes(), issued.key.read_bytes())


def of_an_intermediate(authority: Authority, folder: Path, *, sent: bool) -> ssl.SSLContext:
    issuer = issue_issuer(authority, folder / "issuer")
    signed, key = issuer.issue_server("cp-1", ["127.0.0.1"], 3600.0, NOW)
    return showing(folder, signed.chain.encode() if sent else pem_of(signed.certificate), key)


def of_nobody(folder: Path) -> ssl.SSLContext:
    key, name = new_key(), name_of("box")
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(NOW - HOUR).not_valid_after(NOW + HOUR)
    return showing(folder, pem_of(builder.sign(key, hashes.SHA256())), pem_of_key(key))


async def refused(server: ssl.SSLContext, access: Access = Access(), host: str = "127.0.0.1") -> str:  # noqa: B008
    """What is said of a source that shows this; without its port, and the time that the clock says."""
    with serving(Origin(CONTENT), tls=server, host=host) as origin:
        with pytest.raises(FetchFailed) as caught:
            await get(f"{origin.url}/a", access)
        assert origin.requests == []
    words = re.sub(r"clock says \S+ \S+ UTC", "clock says NOW", str(caught.value))
    return words.replace(urlsplit(origin.url).netloc, "HOST")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki", "lab")


@pytest.fixture
def trusting(authority: Authority) -> Access:
    return Access(ca=authority.directory / "ca.pem")


async def test_a_certificate_that_is_signed_by_itself(tmp_path: Path) -> None:
    assert await refused(of_nobody(tmp_path)) == (
        "the certificate of HOST is signed by itself, and not trusted here: if it is the right one, name it in "
        "SSL_CERT_FILE, or for a package index in pip's configuration (cert)"
    )


async def test_a_chain_of_a_private_authority(authority: Authority, tmp_path: Path) -> None:
    leads = (
        "the certificate of HOST leads to an authority that is not trusted here ('llmgw lab authority'): if it is the "
        "right one, name its certificate in SSL_CERT_FILE, or for a package index in pip's configuration (cert)"
    )
    assert await refused(of_an_intermediate(authority, tmp_path, sent=True)) == leads
    issued = authority.issue_server(["127.0.0.1"], tmp_path / "out", "cp-1")
    whole = showing(tmp_path, issued.cert.read_bytes() + authority.roots_pem(), issued.key.read_bytes())
    assert await refused(whole) == leads


def nothing_sent_of(issuer: str) -> str:
    return (
        f"the certificate of HOST was issued by '{issuer}', not trusted here, and the server sends no certificate of "
        "that issuer: if it is an authority, name its certificate in SSL_CERT_FILE, or for a package index in pip's "
        "configuration (cert); if it is an intermediate of one, whoever runs HOST has to have its certificate sent "
        "along"
    )


async def test_an_intermediate_that_is_not_sent(authority: Authority, trusting: Access, tmp_path: Path) -> None:
    server = of_an_intermediate(authority, tmp_path, sent=False)
    assert await refused(server, trusting) == nothing_sent_of("llmgw lab issuer")


async def test_another_intermediate_than_the_one_that_signed(
    authority: Authority, trusting: Access, tmp_path: Path
) -> None:
    """As after it was replaced: of the same name."""
    signed, key = issue_issuer(authority, tmp_path / "one").issue_server("cp-1", ["127.0.0.1"], 3600.0, NOW)
    other = issue_issuer(authority, tmp_path / "other").certificate
    server = showing(tmp_path, pem_of(signed.certificate, other), key)
    assert await refused(server, trusting) == nothing_sent_of("llmgw lab issuer")


async def test_a_private_authority_that_needs_no_intermediate(authority: Authority, tmp_path: Path) -> None:
    assert await refused(of_the_authority(authority, tmp_path)) == nothing_sent_of("llmgw lab authority")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_certificate_for_another_name(
    authority: Authority, trusting: Access, tmp_path: Path, host: str
) -> None:
    assert await refused(of_the_authority(authority, tmp_path, san="10.0.0.9"), trusting, host) == (
        f"the certificate of HOST is for mirror.lab, 10.0.0.9, not for {host}: correct the address, or see what "
        "answers in its place: a proxy, or a page that wants a login"
    )


async def test_a_certificate_that_expired_an_hour_ago(authority: Authority, trusting: Access, tmp_path: Path) -> None:
    assert await refused(of_the_authority(authority, tmp_path, NOW - 2 * HOUR), trusting) == (
        f"HOST shows a certificate that expired on {in_words(NOW - HOUR)}, and this machine's clock says NOW: correct "
        "the clock (`timedatectl`) if it is wrong, else whoever runs HOST has to renew the certificate"
    )


async def test_a_certificate_that_is_not_valid_yet(authority: Authority, trusting: Access, tmp_path: Path) -> None:
    begins = in_words(NOW + HOUR - timedelta(minutes=5))
    assert await refused(of_the_authority(authority, tmp_path, NOW + HOUR), trusting) == (
        f"HOST shows a certificate that is not valid before {begins}, and this machine's clock says NOW: correct the "
        "clock (`timedatectl`) if it is wrong, else whoever runs HOST has to renew the certificate"
    )


def untrusted(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "said so"
    return error


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (10, "HOST shows a certificate that expired, and this machine's clock says NOW: "),
        (9, "HOST shows a certificate that is not valid yet, and this machine's clock says NOW: "),
        (62, "the certificate of HOST is not for mirror.lab: correct the address, or see "),
        (19, "the certificate of HOST leads to an authority that is not trusted here: if it is "),
        (
            20,
            "the certificate of HOST was issued by somebody, not trusted here, and the server sends no certificate of ",
        ),
        (23, "the certificate of HOST was not accepted (said so): whoever runs it has to mend that"),
    ],
)
def test_a_certificate_that_could_not_be_looked_at(code: int, words: str) -> None:
    """Behind a proxy, say."""
    said = re.sub(r"clock says \S+ \S+ UTC", "clock says NOW", str(explain(untrusted(code), "https://mirror.lab:1/a")))
    assert said.replace("mirror.lab:1", "HOST").startswith(words)


def test_the_certificate_that_expired_is_the_issuers(authority: Authority) -> None:
    own = facts_of(authority.certificate)
    issuers = replace(own, not_after=NOW - HOUR)
    words = str(explain(untrusted(10), "https://mirror.lab/a", chain=(own, issuers)))
    assert words.startswith(f"mirror.lab shows a certificate that expired on {in_words(NOW - HOUR)}, and ")


async def test_plain_http_behind_https(origin: Origin) -> None:
    with pytest.raises(FetchFailed, match=r"no TLS with 127.0.0.1:\d+ .*is it an https:// address\?"):
        await get(origin.url.replace("http:", "https:"))


async def test_a_bundle_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"ca.pem\) can't be read: No such file"):
        await get("https://127.0.0.1:1", Access(ca=tmp_path / "ca.pem"))


# -- credentials


async def test_credentials_of_the_url_and_of_netrc(origin: Origin, tmp_path: Path) -> None:
    await get(origin.url.replace("://", "://me:p%40ss@") + "/a")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login you password word\n")
    await get(f"{origin.url}/b")
    await get(f"{origin.url}/c", headers={"Authorization": "Bearer x"})
    sent = [request.headers["authorization"] for request in origin.requests]
    assert sent == [
        "Basic " + base64.b64encode(b"me:p@ss").decode(),
        "Basic " + base64.b64encode(b"you:word").decode(),
        "Bearer x",
    ]


# -- proxies


@dataclass
class Proxy:
    url: str = ""
    asked: list[str] = field(default_factory=list)
    credentials: list[str | None] = field(default_factory=list)
    status: int = 200


@contextmanager
def proxying() -> Iterator[Proxy]:
    """A proxy that answers in every place's stead."""
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            proxy.asked.append(self.path)
            proxy.credentials.append(self.headers.get("Proxy-Authorization"))
            self.send_response(proxy.status)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

        def do_CONNECT(self) -> None:
            proxy.asked.append(f"CONNECT {self.path}")
            self.send_error(407)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_the_environments_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("://", "://me:pass@"))
        monkeypatch.delenv("REQUEST_METHOD", raising=False)
        monkeypatch.setenv("http_proxy", proxy.url.replace("://", "://me:pass@"))
        assert await get("http://mirror.example/x") == CONTENT
        assert proxy.asked == ["http://mirror.example/x"]
        assert proxy.credentials == ["Basic " + base64.b64encode(b"me:pass").decode()]


async def test_but_not_for_those_that_it_is_not_for(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "other.example,127.0.0.1")
        assert await get(f"{origin.url}/a") == CONTENT
        assert proxy.asked == []


async def test_pips_proxy_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying() as proxy:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert await get("http://mirror.example/x", Access(proxy=proxy.url)) == CONTENT


async def test_a_proxy_that_wants_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url.replace("://", "://me:secret@"))
        with pytest.raises(
            FetchFailed, match=r"the proxy http://127.0.0.1:\d+ answered 407 .* for mirror.example"
        ) as no:
            await get("https://mirror.example/x")
        assert proxy.asked == ["CONNECT mirror.example:443"]
        assert "secret" not in str(no.value)


async def test_a_proxy_that_is_not_there_and_one_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "127.0.0.1:1")
    with pytest.raises(Broken, match=r"the proxy http://127.0.0.1:1 can't be reached .*HTTPS_PROXY"):
        await get("http://mirror.example/x")
    with pytest.raises(FetchFailed, match="socks5://h can't be used"):
        await get("http://mirror.example/x", Access(proxy="socks5://h"))


# -- words


@pytest.mark.parametrize("url", ["x", "ftp://h/x", "http://", "http://h:99999/x", "http://[::1/x"])
async def test_what_is_no_url(url: str) -> None:
    with pytest.raises(FetchFailed, match="is no URL of a file"):
        await get(url)


def test_urls_are_shown_without_their_secrets() -> None:
    assert shown("https://me:pass@h:1/a/b?token=x#y") == "https://h:1/a/b"
    assert shown("http://[::1") == "a URL that can't be read"


def test_faults_that_nobody_foresaw_are_said_as_they_are() -> None:
    assert str(explain(ValueError("odd"), "http://h/x")) == "http://h/x can't be asked: odd"
    assert str(explain(OSError(13, "Permission denied"), "http://h/x")) == "h: permission denied"
