from __future__ import annotations

import pytest

from llmgw.config import parse_server, restart_needed

BASE = parse_server("models: []", "/etc/llmgw/server.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "engines: {}",
        "nodes: {lost_after: 1m}",
        "drain: {in_flight: 1h}",
        "gateway: {queue: 1}",
        "gateway: {hold_for: 1m}",
        "gateway: {timeouts: {total: 1h}}",
    ],
)
def test_a_reload_takes(text: str) -> None:
    assert restart_needed(BASE, parse_server(f"models: []\n{text}", "/etc/llmgw/server.yaml")) == ()


def test_a_reload_takes_models() -> None:
    new = parse_server("models: [{name: a, profiles: [{engine: sim}]}]", "/etc/llmgw/server.yaml")
    assert restart_needed(BASE, new) == ()


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("cluster: lab", ("cluster",)),
        ("advertise: [https://a]", ("advertise",)),
        ("listen: {gateway: '0.0.0.0:80', metrics: '127.0.0.1:81'}", ("listen.gateway", "listen.metrics")),
        ("tls: {key: other.pem}", ("tls.key",)),
        ("tls: {lifetime: 1h}", ("tls.lifetime",)),
        ("store: sqlite:////elsewhere.db", ("store",)),
        ("gateway: {workers: 2, queue: 1}", ("gateway.workers",)),
        ("gateway: {body_limit: 1MiB}", ("gateway.body_limit",)),
        ("gateway: {tls: {cert: a, key: b}}", ("gateway.tls",)),
        ("nodes: {lost_after: 1m}\nstore: sqlite:////elsewhere.db\ncluster: lab", ("cluster", "store")),
    ],
)
def test_a_restart_is_needed_for(text: str, keys: tuple[str, ...]) -> None:
    new = parse_server(f"models: []\n{text}", "/etc/llmgw/server.yaml")
    assert restart_needed(BASE, new) == keys
    assert restart_needed(new, BASE) == keys


def test_front_certificates_that_change_are_named_as_one() -> None:
    first = parse_server("models: []\ngateway: {tls: {cert: a, key: b}}", "/etc/s.yaml")
    second = parse_server("models: []\ngateway: {tls: {cert: c, key: b}}", "/etc/s.yaml")
    assert restart_needed(first, second) == ("gateway.tls",)
