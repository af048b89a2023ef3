"""Replicas that go make way for others: the replacement is ready before the original stops, one at a time."""

from __future__ import annotations

from llmgw.cluster.step import Step


def replace_outgoing(step: Step) -> None:
    """Take every replacement one step further: made, placed, ready, requests shifted, the original stopped."""
