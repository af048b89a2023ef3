"""How the adapters read versions, health, readiness, and refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.cluster.catalog import Profile, SimOptions, Task
from llmgw.engines.base import EngineUnhealthy
from llmgw.engines.openai import reads_other_files
from llmgw.engines.registry import EngineNotRun, engine

from .shards import shard

LLAMA = engine("llamacpp")
SIM = engine("sim")
PLAIN = Profile(name="p", engine="llamacpp")
LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("version: 1 (571d0d5)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "571d0d5"),
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\n", "7e4c0a9"),
        ("version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU 12.2.0\n", "b11434"),
        ("ggml_cuda_init: found 1 devices\nversion: 10216 (876a43211)\nbuilt with cc\n", "b10216"),
        ("version: b8681-Debian\n", "b8681"),
        ("version: 1 (unknown)\n", None),
        ("error while loading shared libraries: libgomp.so.1", None),
        ("", None),
    ],
)
def test_llamacpp_versions(output: str, version: str | None) -> None:
    assert LLAMA.read_version(output) == version


def test_sim_version() -> None:
    assert SIM.read_version("llmgw-sim 0.1.0\n") == "0.1.0"
    assert SIM.read_version("something else") is None


@pytest.mark.parametrize("name", ["llamacpp", "sim"])
def test_health(name: str) -> None:
    adapter = engine(name)
    assert adapter.read_health(200, b'{"status":"ok"}') is None
    assert adapter.read_health(503, LOADING) == "loading the model"
    assert adapter.read_health(503, b"busy") == "not ready: busy"
    with pytest.raises(EngineUnhealthy, match="/health answered 500: boom"):
        adapter.read_health(500, b'{"error":{"message":"boom"}}')
    with pytest.raises(EngineUnhealthy, match="404"):
        adapter.read_health(404, b"")


def answer(**fields: Any) -> bytes:
    return json.dumps({"model": "small", **fields}).encode()


@pytest.mark.parametrize(
    ("task", "body"),
    [
        ("generate", answer(choices=[{"text": "x"}])),
        ("generate", answer(choices=[{"text": ""}], usage={"completion_tokens": 1})),
        ("embed", answer(data=[{"embedding": [0.1, 2]}])),
        ("rerank", answer(results=[{"relevance_score": -1.5}])),
    ],
)
def test_one_token_one_vector_one_score_prove(task: Task, body: bytes) -> None:
    assert LLAMA.read_readiness(shard(PLAIN, task=task), 200, body) is None


@pytest.mark.parametrize(
    ("task", "status", "body", "words"),
    [
        ("generate", 200, answer(choices=[]), "without a token"),
        ("generate", 200, answer(choices=[{"text": ""}], usage={"completion_tokens": 0}), "without a token"),
        ("generate", 200, b"hello", "no JSON: hello"),
        ("generate", 200, b"[]", "no object"),
        ("generate", 500, LOADING, "answered with 500: Loading model"),
        ("generate", 503, LOADING, "Loading model"),
        ("embed", 200, answer(data=[{"embedding": []}]), "without a vector"),
        ("embed", 200, answer(choices=[{"text": "x"}]), "without a vector"),
        ("rerank", 200, answer(results=[{}]), "without a score"),
        ("generate", 200, b'{"model": "other", "choices": [{"text": "x"}]}', "serves the model 'other', not 'small'"),
    ],
)
def test_what_does_not_prove_says_why(task: Task, status: int, body: bytes, words: str) -> None:
    for adapter in (LLAMA, SIM):
        why = adapter.read_readiness(shard(PLAIN, task=task), status, body)
        assert why is not None
        assert words in why


def test_a_chat_model_asked_for_vectors_names_the_way_out() -> None:
    body = b'{"error":{"code":400,"message":"Pooling type \'none\' is not OAI compatible."}}'
    why = LLAMA.read_readiness(shard(PLAIN, task="embed"), 400, body)
    assert why is not None
    assert '["--pooling", "mean"]' in why


@pytest.mark.parametrize("task", ["generate", "embed", "rerank"])
def test_readiness_asks_for_the_least(task: Task) -> None:
    probe = LLAMA.readiness(shard(PLAIN, task=task))
    assert probe.method == "POST"
    assert probe.body is not None
    asked = json.loads(probe.body)
    assert asked["model"] == "small"
    assert asked.get("max_tokens", 1) == 1


@pytest.mark.parametrize(
    ("profile", "task", "words"),
    [
        (Profile(name="p", engine="llamacpp", nodes=2), "generate", "where their ranks listen did not come with it"),
        (Profile(name="p", engine="llamacpp", args=("--rpc", "h:1")), "generate", "--rpc is not the profile's to set"),
        (Profile(name="p", engine="llamacpp", tensor_parallel=2), "generate", '"--split-mode", "row"'),
        (Profile(name="p", engine="llamacpp", pipeline_parallel=2), "generate", "no pipeline_parallel"),
        (Profile(name="p", engine="llamacpp", sim=SimOptions()), "generate", "only the engine sim"),
        (Profile(name="p", engine="llamacpp"), "speech", "not speech"),
        (Profile(name="p", engine="llamacpp", args=("--port", "1")), "generate", "--port is not the profile's to set"),
        (Profile(name="p", engine="llamacpp", args=("--port=1",)), "generate", "--port is not the profile's to set"),
        (Profile(name="p", engine="llamacpp", args=("-m", "x")), "generate", "`source` decides"),
        (Profile(name="p", engine="llamacpp", args=("--threads 2",)), "generate", '["--threads", "2"]'),
        (Profile(name="p", engine="llamacpp", args=("a\0b",)), "generate", "NUL"),
        (Profile(name="p", engine="llamacpp", args=("--threads", "2")), "generate", None),
        (Profile(name="p", engine="llamacpp", args=("--chat-template", "a b")), "generate", None),
        (
            Profile(name="p", engine="sim", nodes=2),
            "generate",
            "the address where their ranks meet did not come with it",
        ),
        (Profile(name="p", engine="sim"), "transcribe", "not transcribe"),
        (Profile(name="p", engine="sim", args=("--alias", "x")), "generate", "`aliases` decide"),
        (Profile(name="p", engine="sim"), "rerank", None),
    ],
)
def test_refusals(profile: Profile, task: Task, words: str | None) -> None:
    refusal = engine(profile.engine).refusal(shard(profile, task=task))
    if words is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert words in refusal


def test_an_unknown_engine_is_refused_in_words() -> None:
    with pytest.raises(EngineNotRun, match="tgi is no engine that this build runs; llamacpp, sim, vllm, sglang are"):
        engine("tgi")


@pytest.mark.parametrize(
    ("args", "others"),
    [
        (("--load-format", "dummy"), True),
        (("--load-format", "tensorizer"), True),
        (("--load-format=sharded_state",), True),
        (("--load-format", "auto"), False),
        (("--load-format=safetensors",), False),
        (("--dtype", "float32", "--load_format=dummy"), True),
        (("--load-format", "safetensors"), False),
        (("--load-format",), False),
        (("--served-model-name", "dummy"), False),
        ((), False),
    ],
)
def test_who_reads_other_files(args: tuple[str, ...], others: bool) -> None:
    assert reads_other_files(args) is others
