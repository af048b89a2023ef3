"""The weights that this node holds, and how it comes by them."""

from llmgw.agent.weights.source import WeightsRefused
from llmgw.agent.weights.store import WeightStore

__all__ = ["WeightStore", "WeightsRefused"]
