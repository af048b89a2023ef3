"""A client of the admin API, and the context that says where it is."""

from llmgw.client.admin import AdminClient, AdminError
from llmgw.client.context import Context, ContextError, default_context_path, find_context, write_context

__all__ = [
    "AdminClient",
    "AdminError",
    "Context",
    "ContextError",
    "default_context_path",
    "find_context",
    "write_context",
]
