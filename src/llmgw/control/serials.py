"""Which certificate belongs to which node: a serial is entered at its first use, and stays that node's."""

from __future__ import annotations

from functools import partial

from llmgw.control.plane import Plane


class Serials:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._known = dict(plane.serials)

    def allow(self, serial: str, peer_id: str) -> str | None:
        """None: allowed. Else why not, in words."""
        owner = self._known.setdefault(serial, peer_id)
        if owner != peer_id:
            return f"certificate {serial} is that of {owner}, not of {peer_id}: issue a certificate for {peer_id}"
        if serial not in self._plane.serials:
            self._plane.serials[serial] = peer_id
            self._plane.tell(partial(self._plane.enter_serial, serial, peer_id))
        return None
