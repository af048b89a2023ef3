"""Limits that are taken up anew, without a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmgw.gateway.gateway import Gateway
from llmgw.gateway.settings import GatewaySettings
from llmgw.link.messages import Route, Routes


def test_limits_are_taken_up_and_all_else_stays(tmp_path: Path) -> None:
    before = GatewaySettings(id="g", state_dir=tmp_path, queue=1, hold_for_s=300.0)
    gateway = Gateway(before)
    gateway.apply(Routes(epoch=1, session=1, version=1, routes=(Route(model="m"),)))
    timeouts = replace(before.timeouts, first_token_s=7.0)
    gateway.take_limits(replace(before, queue=5, hold_for_s=2.0, timeouts=timeouts, listen_port=1, body_limit_bytes=9))
    assert gateway.settings == replace(before, queue=5, hold_for_s=2.0, timeouts=timeouts)
    assert gateway.router.lines["m"].limit == 5
    assert gateway.timeouts.first_token_s == 7.0
