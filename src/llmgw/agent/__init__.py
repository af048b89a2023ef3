"""The node's shell: finds out what its machine is, and converges on what the control plane wants of it."""
