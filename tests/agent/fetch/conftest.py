from .disks import small_disk
from .loopback import index

__all__ = ["index", "small_disk"]
