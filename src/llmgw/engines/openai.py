"""What engines with an OpenAI-compatible server have in common: readiness, error bodies, arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import EngineUnhealthy, Probe

_PROMPT = "Hello"


def read_health(status: int, body: bytes) -> str | None:
    """``/health`` as llama-server answers it: 200, or 503 while the model loads. See ``Engine.read_health``."""
    if status == 200:
        return None
    words = said(body)
    if status == 503:
        return "loading the model" if words == "Loading model" else f"not ready: {words}"
    raise EngineUnhealthy(f"/health answered {status}: {words}")


def readiness_probe(shard: DesiredShard) -> Probe:
    """One token for ``generate``, one vector for ``embed``, one score for ``rerank``.

    A completion rather than a chat: it proves the same computation, and a model without a chat template has it too. A
    sampled one: vLLM compiles its sampler at the first of those, which takes up to a minute on a busy processor, and no
    client is to wait for that.
    """
    match shard.task:
        case "embed":
            return _post("/v1/embeddings", {"model": shard.model, "input": _PROMPT})
        case "rerank":
            return _post("/v1/rerank", {"model": shard.model, "query": _PROMPT, "documents": [_PROMPT]})
        case "generate":
            body = {"model": shard.model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 1, "ignore_eos": True}
            return _post("/v1/completions", body)
        case _:
            raise ValueError(f"no readiness request is known for the task {shard.task}")


def proof(shard: DesiredShard, status: int, body: bytes) -> str | None:
    """None: the answer to ``readiness_probe`` proves the shard. Else why not, in words.

    The answer's ``model`` counts too: a server that took another model, or none, answers under another name.
    """
    if status != 200:
        return f"the first request was answered with {status}: {said(body)}"
    try:
        answer = json.loads(body)
    except ValueError:
        return f"the first request was answered with what is no JSON: {_excerpt(body)}"
    if not isinstance(answer, dict):
        return f"the first request was answered with what is no object: {_excerpt(body)}"
    served = answer.get("model")
    if served is not None and served != shard.model:
        return f"the server on this port serves the model {served!r}, not {shard.model!r}"
    if not _proves(shard, answer):
        return f"the first request was answered without {_WANTED[shard.task]}: {_excerpt(body)}"
    return None


_COMMON_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "gguf", "mistral", "bitsandbytes"}
)


def reads_other_files(args: Sequence[str]) -> bool:
    """Whether vLLM or SGLang, given these, reads a model's weights from files of a format of their own, or draws them
    at random and reads only what describes the model."""
    for arg, following in zip(args, (*args[1:], ""), strict=False):
        flag, _, value = arg.partition("=")
        if flag.replace("_", "-") == "--load-format":
            return (value or following or "auto") not in _COMMON_FORMATS
    return False


_WANTED = {"generate": "a token", "embed": "a vector", "rerank": "a score"}


def _proves(shard: DesiredShard, answer: Mapping[str, object]) -> bool:
    match shard.task:
        case "embed":
            first = _first(answer.get("data"))
            vector = first.get("embedding") if first else None
            return isinstance(vector, list) and bool(vector) and all(isinstance(x, int | float) for x in vector)
        case "rerank":
            first = _first(answer.get("results"))
            return first is not None and isinstance(first.get("relevance_score"), int | float)
        case _:
            usage = answer.get("usage")
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            first = _first(answer.get("choices"))
            return first is not None and (bool(first.get("text")) or (isinstance(tokens, int) and tokens >= 1))


def _first(items: object) -> Mapping[str, object] | None:
    if isinstance(items, list) and items and isinstance(items[0], dict):
        return items[0]
    return None


def said(body: bytes) -> str:
    """The message of an error body, or its beginning where it is not of the known shape."""
    try:
        document = json.loads(body)
    except ValueError:
        return _excerpt(body)
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else _excerpt(body)


def check_args(args: Sequence[str], reserved: Mapping[str, str], *, abbreviated: bool = False) -> str | None:
    """Why a profile's ``args`` can't be passed on, in words; None where they can.

    ``reserved`` maps flags that are not the profile's to set to the reason. With ``abbreviated`` other spellings count
    too: Python's argparse takes any unique beginning of a flag, and vLLM takes ``_`` for ``-``.
    """
    for item in args:
        flag, equals, _ = item.partition("=")
        meant = _meant(flag, reserved) if abbreviated else flag
        if meant in reserved:
            return f"args: {flag} is not the profile's to set: {reserved[meant]}"
        if item.startswith("-") and not equals and any(blank in item for blank in " \t\n"):
            name, *rest = item.split(maxsplit=1)
            split = ", ".join(json.dumps(part) for part in (name, *rest))
            return f"args: {item!r} is one item with a blank in it; write it as two: [{split}]"
        if "\0" in item:
            return f"args: {item!r} holds a NUL character"
    return None


def _meant(flag: str, reserved: Mapping[str, str]) -> str:
    """The reserved flag that this is another spelling of; the flag itself where there is none."""
    if not flag.startswith("--") or flag == "--":
        return flag
    plain = flag.replace("_", "-")
    return plain if plain in reserved else next((name for name in reserved if name.startswith(plain)), flag)


def _post(path: str, body: Mapping[str, object]) -> Probe:
    return Probe(method="POST", path=path, body=json.dumps(body).encode())


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return text if text else "(nothing)"
