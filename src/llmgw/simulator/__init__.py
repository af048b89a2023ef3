"""The simulated engine: a real HTTP server that answers like an engine and computes nothing."""
