"""The official client against the gateway: what applications see."""

from __future__ import annotations

import openai
import pytest

from llmgw.cluster.model import Route

from .client import KEY
from .conftest import House
from .engine import COMPLETION, DONE, Call, chunk

MESSAGES = [{"role": "user", "content": "hello"}]


def client(house: House, key: str = KEY, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{house.gateway.port}/v1", api_key=key, max_retries=retries)


async def complete(house: House, stream: bool = False, model: str = "m", **how: object) -> object:
    async with client(house, **how) as api:  # type: ignore[arg-type]
        return await api.chat.completions.create(model=model, messages=MESSAGES, stream=stream)  # type: ignore[arg-type]


async def text_of(house: House) -> str:
    async with client(house) as api:
        stream = await api.chat.completions.create(model="m", messages=MESSAGES, stream=True)  # type: ignore[arg-type]
        return "".join([part.choices[0].delta.content or "" async for part in stream])


async def test_a_plain_completion(house: House) -> None:
    await house.serve(lambda call: call.json(200, COMPLETION))
    async with client(house) as api:
        raw = await api.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
        completion = raw.parse()
    assert completion.choices[0].message.content == "hello"
    assert completion._request_id == raw.headers["x-request-id"]


async def test_a_stream(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        for event in (b": ping\n\n", chunk("hel"), chunk("lo 京🙂"), chunk("", finish="stop"), DONE):
            await call.piece(event)
        await call.end()

    await house.serve(script)
    assert await text_of(house) == "hello 京🙂"


async def test_leaving_a_stream(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.until_gone()

    (engine,) = await house.serve(script)
    async with client(house) as api:
        stream = await api.chat.completions.create(model="m", messages=MESSAGES, stream=True)  # type: ignore[arg-type]
        async for _ in stream:
            break
        await stream.close()
        await engine.calls[0].until_gone()
    await house.at_rest()


async def test_an_engine_that_dies_is_an_error_and_not_an_end(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one") + b'data: {"cho')
        call.close()

    await house.serve(script)
    with pytest.raises(openai.APIError) as raised:
        await text_of(house)
    assert "replica m-0 failed" in raised.value.message
    assert raised.value.code == "engine_failed"


async def test_an_early_end_is_an_error(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.end()

    await house.serve(script)
    with pytest.raises(openai.APIError, match="before it was complete"):
        await text_of(house)


async def test_the_older_error_form_in_a_stream_is_an_error(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(b'data: {"object": "error", "message": "out of memory", "type": "X", "code": 500}\n\n')
        await call.piece(DONE)
        await call.end()

    await house.serve(script)
    with pytest.raises(openai.APIError, match="out of memory"):
        await text_of(house)


async def test_models(house: House) -> None:
    engine = await house.engine()
    await house.start(Route(model="org/m", aliases=("default",), why_none="loading"))
    async with client(house) as api:
        assert [model.id async for model in api.models.list()] == ["default", "org/m"]
        assert (await api.models.retrieve("org/m")).id == "org/m"
    assert not engine.calls


async def test_embeddings(house: House) -> None:
    vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
    document = {"object": "list", "data": [vector], "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    await house.serve(lambda call: call.json(200, document))
    async with client(house) as api:
        found = await api.embeddings.create(model="m", input="x", encoding_format="float")
    assert found.data[0].embedding == [0.5, 0.25]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_refusal(house: House, status: int, kind: type[openai.APIStatusError], stream: bool) -> None:
    error = {"message": "no", "type": "t", "param": "p", "code": "c"}
    await house.serve(lambda call: call.json(status, {"error": error}))
    with pytest.raises(kind) as raised:
        await complete(house, stream)
    assert {name: getattr(raised.value, name) for name in ("type", "param", "code")} == {
        "type": "t",
        "param": "p",
        "code": "c",
    }
    assert raised.value.request_id is not None
    assert raised.value.request_id.startswith("req-")


@pytest.fixture
async def served(house: House) -> House:
    await house.serve(lambda call: call.json(200, COMPLETION), hold_for_s=0.05)
    return house


async def test_a_wrong_key(served: House) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        await complete(served, key="sk-wrong")
    assert raised.value.code == "invalid_api_key"


async def test_an_unknown_model(served: House) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'nobody' here; models served: m"):
        await complete(served, model="nobody")


async def test_no_replica(served: House) -> None:
    served.say(Route(model="m", why_none="replica m-abcde is loading the model"))
    with pytest.raises(openai.InternalServerError, match="m-abcde is loading the model") as raised:
        await complete(served)
    assert raised.value.response.headers["retry-after"] == "5"


async def test_the_client_does_not_repeat_what_the_gateway_has(house: House) -> None:
    async def reset(call: Call) -> None:
        call.reset()

    engines = await house.serve(reset, reset, reset)
    with pytest.raises(openai.InternalServerError):
        await complete(house, retries=2)
    assert sum(len(engine.calls) for engine in engines) == 2
