"""llmgw: turns machines you own into one LLM service."""
