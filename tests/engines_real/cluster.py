"""A cluster on loopback whose nodes install the engines themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster import lab as of_lab
from tests.cluster.lab import Lab, Proc

MODEL = Path(__file__).parent / "tiny-hf-dummy"
"""Everything of a model but its weights, which engines make up (``--load-format dummy``)."""

eventually = partial(of_lab.eventually, every_s=0.5)
"""These engines need the processor more than whoever waits for them."""


class RealLab(Lab):
    engines_dir: Path

    @classmethod
    def of(cls, models: str, engines: str, engines_dir: Path) -> RealLab:
        lab = cls.make(models)
        assert isinstance(lab, RealLab)
        lab.engines_dir = engines_dir
        lab.write(models, engines)
        return lab

    def write(self, models: str, engines: str) -> None:
        """The server's file."""
        self.write_server(models)
        text = self.server_file.read_text()
        self.server_file.write_text(text.replace("engines: {}\n", f"engines: {engines}\n"))

    def reload(self) -> None:
        with self.admin() as client:
            client.post("reload")

    def agent(self, node: str, extra: str = "") -> Proc:
        place = self.root / node / "engines"
        if not place.is_symlink():
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(self.engines_dir)
        return super().agent(node, extra)

    def ready(self, model: str = "tiny", within_s: float = 900.0, *, every_s: float = 0.5) -> dict[str, Any]:
        return super().ready(model, within_s, every_s=every_s)

    def engine(self, node: str, name: str, version: str) -> dict[str, Any]:
        """What the node says of one version of an engine; empty: nothing."""
        for found in self.get("nodes"):
            for engine in found["engines"]:
                if (found["id"], engine["name"], engine["version"]) == (node, name, version):
                    return dict(engine)
        return {}

    def is_ready(self, node: str) -> bool:
        return any((found["id"], found["state"]) == (node, "ready") for found in self.get("nodes"))

    def installed(self, node: str, name: str, version: str, within_s: float) -> list[str]:
        """Once the node has it: what it said on the way, each step once."""
        said: list[str] = []

        def check() -> bool:
            now = self.engine(node, name, version)
            words = f"{now.get('state')}: {now.get('words')}"
            if now and (not said or said[-1] != words):
                said.append(words)
            assert now.get("state") != "failed", f"{words}\n{self.logs()}"
            return bool(now.get("state") == "installed" and self.is_ready(node))

        try:
            eventually(check, f"{node} has {name} {version}", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{said[-3:]}") from None
        return said
