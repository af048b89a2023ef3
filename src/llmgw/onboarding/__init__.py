"""Machines become nodes: a virtual machine is made, gets an identity and an agent, and is seen to register."""
