"""A cluster of one: control plane, gateway and agent as real processes on this machine, over real mutual TLS."""
