"""How busy an engine is, as its own metrics tell it: what is renamed, what is missing, what is told twice."""

from __future__ import annotations

import math

import pytest

from llmgw.cluster.model import Load
from llmgw.engines.load import LoadMetrics, read_load

from .recorded import ADAPTERS, HERE, METRICS


def metrics_of(name: str) -> LoadMetrics:
    found = ADAPTERS[name].load_metrics
    assert found is not None
    return found


def test_every_recorded_file_is_read_by_a_test() -> None:
    assert {path.stem for path in HERE.iterdir()} == set(METRICS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_engine_is_asked_where_its_load_is(name: str) -> None:
    probe = ADAPTERS[name].metrics()
    assert probe is not None
    assert (probe.method, probe.path) == ("GET", "/metrics")
    assert metrics_of(name).running


@pytest.mark.parametrize("old", [False, True])
def test_a_metric_that_was_renamed_is_found_under_either_name(old: bool) -> None:
    name = "vllm:gpu_cache_usage_perc" if old else "vllm:kv_cache_usage_perc"
    reading = read_load(metrics_of("vllm"), {name: [0.5], "vllm:num_requests_running": [2.0]})
    assert reading.load == Load(running=2.0, kv_used_ratio=0.5)
    assert reading.missing == ("vllm:num_requests_waiting", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def test_what_an_engine_never_tells_is_not_missing() -> None:
    samples = {name: [1.0] for name in metrics_of("llamacpp").names}
    reading = read_load(metrics_of("llamacpp"), samples)
    assert reading.load.kv_used_ratio is None
    assert reading.missing == ()


def test_several_sets_of_labels_are_one_engine() -> None:
    """vLLM has one for each engine behind a server. SGLang has one for each stage of a pipeline, which tell of the same
    requests, and counts tokens apart that were streamed."""
    several = read_load(
        metrics_of("vllm"), {"vllm:num_requests_running": [2.0, 3.0], "vllm:kv_cache_usage_perc": [0.2, 0.6]}
    )
    assert (several.load.running, several.load.kv_used_ratio) == (5.0, 0.6)
    stages = read_load(
        metrics_of("sglang"), {"sglang:num_running_reqs": [3.0, 3.0], "sglang:prompt_tokens_total": [7.0, 2.0]}
    )
    assert (stages.load.running, stages.load.prompt_tokens_total) == (3.0, 9.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_amount_is_not_known(value: float) -> None:
    reading = read_load(metrics_of("sim"), {"llmgw_sim_requests_running": [value]})
    assert reading.load.running is None
    assert "llmgw_sim_requests_running" in reading.missing
