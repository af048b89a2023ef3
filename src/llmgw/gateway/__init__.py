"""The data plane: one OpenAI-compatible endpoint over every replica that is ready. See ``docs/gateway.md``."""
