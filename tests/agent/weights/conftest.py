from tests.agent.fetch.loopback import index

__all__ = ["index"]
