from .loopback import index

__all__ = ["index"]
