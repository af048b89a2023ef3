"""Who may ask for what, and which secrets go where."""

from __future__ import annotations

import pytest

from llmgw.cluster.model import Route
from llmgw.gateway.gateway import Gateway
from llmgw.gateway.settings import GatewaySettings

from .client import KEY, Client, ask
from .conftest import House, endpoint, key
from .engine import completion


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Authorization: Bearer sk-wrong",),
        ("Authorization: Bearer ",),
        (f"Authorization: Basic {KEY}",),
        (f"Authorization: {KEY}",),
        ("x-api-key: sk-wrong",),
        ("Authorization: Bearer replica-key",),
        ("Authorization: Bearer " + "x" * 10_000,),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/m")]
)
async def test_a_missing_or_wrong_key(house: House, method: str, path: str, headers: tuple[str, ...]) -> None:
    (engine,) = await house.serve(completion)
    answer = await house.ask(ask() if method == "POST" else b"", method=method, path=path, key=None, headers=headers)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert "x-api-key" in answer.error["message"] or "ctl key create" in answer.error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not engine.calls


@pytest.mark.parametrize(
    "headers", [(f"Authorization: Bearer {KEY}",), (f"authorization: bearer {KEY}",), (f"X-Api-Key: {KEY}",)]
)
async def test_a_key_in_either_header(house: House, headers: tuple[str, ...]) -> None:
    await house.serve(completion)
    assert (await house.ask(key=None, headers=headers)).status == 200


async def test_the_clients_secrets_stay_here(house: House) -> None:
    (engine,) = await house.serve(completion)
    await house.ask(headers=(f"X-Api-Key: {KEY}", "Cookie: session=1", "Proxy-Authorization: Basic xyz"))
    call = engine.calls[0]
    assert [value for name, value in call.headers if name == "authorization"] == ["Bearer replica-key"]
    assert [call.header(name) for name in ("x-api-key", "cookie", "proxy-authorization")] == [None] * 3
    assert KEY.encode() not in call.head + call.body


async def test_a_replica_without_a_key_gets_none(house: House) -> None:
    engine = await house.engine()
    await house.start(Route(model="m", endpoints=(endpoint(engine),)))
    open_engine = Route(
        model="m", endpoints=(endpoint(engine).__class__(replica="m-1", generation=1, url=engine.url, api_key=""),)
    )
    house.say(open_engine)
    assert (await house.ask()).status == 200
    assert engine.calls[0].header("authorization") is None


async def test_a_key_for_some_models(house: House) -> None:
    engine = await house.engine()
    routes = [
        Route(model="m", aliases=("default",), endpoints=(endpoint(engine),)),
        Route(model="org/other", endpoints=(endpoint(engine),)),
    ]
    await house.start(*routes, keys=(key(models=("m",)),))
    assert (await house.ask()).status == 200
    assert (await house.ask(ask(model="default"))).status == 200
    answer = await house.ask(ask(model="org/other"))
    assert (answer.status, answer.error["type"]) == (403, "permission_error")
    assert "may use: m" in answer.error["message"]
    assert "org/other" not in (await house.ask(ask(model="nobody"))).error["message"]
    listed = await house.ask(b"", method="GET", path="/v1/models")
    assert [entry["id"] for entry in listed.json()["data"]] == ["default", "m"]
    assert (await house.ask(b"", method="GET", path="/v1/models/org/other")).status == 404


async def test_a_revoked_key_is_refused_with_the_next_table(house: House) -> None:
    (engine,) = await house.serve(completion)
    client = await house.client()
    assert (await client.ask(ask())).status == 200
    house.say(Route(model="m", endpoints=(endpoint(engine),)), keys=(key("sk-another"),))
    assert (await client.ask(ask())).status == 401
    assert (await client.ask(ask(), key="sk-another")).status == 200


async def test_models(house: House) -> None:
    engine = await house.engine()
    await house.start(
        Route(model="Qwen/Qwen3-32B", aliases=("default",), endpoints=(endpoint(engine),)),
        Route(model="m", why_none="loading"),
    )
    listed = (await house.ask(b"", method="GET", path="/v1/models")).json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["Qwen/Qwen3-32B", "default", "m"]
    for path in ("/v1/models/Qwen/Qwen3-32B", "/v1/models/Qwen%2FQwen3-32B"):
        one = await house.ask(b"", method="GET", path=path)
        assert one.json() == {"id": "Qwen/Qwen3-32B", "object": "model", "created": 0, "owned_by": "llmgw"}
        assert one.headers["content-type"] == "application/json"
    alias = await house.ask(b"", method="GET", path="/v1/models/default")
    assert (alias.json()["id"], alias.json()["root"]) == ("default", "Qwen/Qwen3-32B")


@pytest.mark.parametrize("name", ["nobody", "M", "m ", "", "org/x"])
async def test_an_unknown_model_names_those_there_are(house: House, name: str) -> None:
    (engine,) = await house.serve(completion)
    answer = await house.ask(ask(model=name))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert answer.error["message"].endswith("models served: m")
    assert not engine.calls


async def test_before_the_first_table_no_key_is_called_wrong(tmp_path: object) -> None:
    from pathlib import Path

    gateway = Gateway(
        GatewaySettings(id="g", state_dir=Path(str(tmp_path)), listen_host="127.0.0.1", listen_port=0, drain_s=0)
    )
    await gateway.start()
    try:
        async with await Client.open(gateway.port) as client:
            answer = await client.ask(ask())
            assert (answer.status, answer.error["code"]) == (503, "no_routing_table")
            assert answer.headers["retry-after"] == "5"
    finally:
        await gateway.stop()
