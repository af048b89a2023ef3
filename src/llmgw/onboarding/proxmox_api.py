"""Proxmox by its REST API, from anywhere, with a token."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from llmgw.link.sockets import Sockets
from llmgw.onboarding.image import Image, sha256_of
from llmgw.onboarding.pci import PciDevice
from llmgw.onboarding.proxmox import Patience, Proxmox, ProxmoxError, Say, kind_of

DEFAULT_PORT = 8006
_TOKEN = re.compile(r"[^\s@!=]+@[^\s@!=]+![^\s@!=]+=\S+")
_REQUEST_S = 60.0
_UPLOAD_S = 3600.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.1, 2.0
_MOST_LOST_POLLS = 10
_LOG_LINES = 5


class Api(Proxmox):
    """The API of one cluster, and one node of it: ``node``, or else the one that answers."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        node: str | None = None,
        ca: Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Raises ProxmoxError where the URL or the token can't be one."""
        self.patience = patience or Patience()
        self.node = node or ""
        self._base = _base(url)
        if not _TOKEN.fullmatch(token):
            raise ProxmoxError(
                "--api-token: USER@REALM!ID=SECRET is expected, such as root@pam!llmgw=… (`pveum user token`)"
            )
        self._token = token
        self._ca = ca
        self._session: aiohttp.ClientSession | None = None
        self._sockets = Sockets()

    async def __aenter__(self) -> Api:
        try:
            context = ssl.create_default_context(cafile=str(self._ca) if self._ca is not None else None)
        except (OSError, ssl.SSLError) as error:
            raise ProxmoxError(f"--api-ca {self._ca} can't be read: {error}") from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=4, socket_factory=self._sockets.make),
            headers={"Authorization": f"PVEAPIToken={self._token}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            if not self.node:
                self.node = await self._answering()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            await self._sockets.end()

    async def read(self, path: str, **parameters: str) -> Any:
        given = {name.replace("_", "-"): value for name, value in parameters.items()}
        return await self._ask("GET", path, params=given)

    async def pci_devices(self) -> Sequence[PciDevice]:
        rows = await self.read(f"/nodes/{self.node}/hardware/pci")
        return [
            PciDevice(
                address=str(row["id"]),
                kind=int(str(row["class"]), 16) >> 8,
                group=int(row["iommugroup"]) if int(row.get("iommugroup", -1)) >= 0 else None,
                name=str(row.get("device_name", "")),
            )
            for row in rows
        ]

    async def pass_through(self, devices: Sequence[str]) -> Mapping[str, str]:
        """By the cluster's mappings: only root@pam itself, and no token, may name a device."""
        mapped = {
            path: str(row["id"])
            for row in await self.read("/cluster/mapping/pci", check_node=self.node)
            for parts in (dict(part.partition("=")[::2] for part in entry.split(",")) for entry in row.get("map", ()))
            if parts.get("node") == self.node and (path := parts.get("path"))
        }
        options = {}
        for number, device in enumerate(devices):
            if device not in mapped:
                raise ProxmoxError(
                    f"--gpu {device}: a token may pass on only what the cluster maps, and no mapping of {self.node} "
                    "names it: make one (Datacenter, Resource Mappings), or run this on the host",
                    look="pvesh get /cluster/mapping/pci",
                )
            options[f"hostpci{number}"] = f"mapping={mapped[device]},pcie=1"
        return options

    async def bring(self, image: Image, say: Say) -> str:
        if image.path is not None and image.digest is None:
            image = replace(image, digest=await asyncio.to_thread(sha256_of, image.path))
        storage = await self._import_storage()
        place = f"/nodes/{self.node}/storage/{storage}"
        volume = f"{storage}:import/{image.kept_as}"
        if any(row["volid"] == volume for row in await self.read(f"{place}/content", content="import")):
            say(f"{image.name} is on {storage} already")
            return volume
        checked = {
            "content": "import",
            "checksum": image.digest or "",
            "checksum-algorithm": image.algorithm,
        }
        if image.url is not None:
            say(f"{self.node} downloads {image.name}")
            await self._do("POST", f"{place}/download-url", {**checked, "filename": image.kept_as, "url": image.url})
        elif image.path is not None:
            say(f"uploading {image.name} ({image.path.stat().st_size >> 20} MiB)")
            with image.path.open("rb") as file:
                await self._upload(place, checked, image.kept_as, file)
        return volume

    async def put_seed(self, name: str, data: bytes) -> str:
        storage = await self.iso_storage()
        volume = f"{storage}:iso/{name}"
        # What an earlier run left of this machine's.
        await self.drop_seed(volume)
        await self._upload(f"/nodes/{self.node}/storage/{storage}", {"content": "iso"}, name, data)
        return volume

    async def drop_seed(self, volume: str) -> None:
        storage = volume.partition(":")[0]
        place = f"/nodes/{self.node}/storage/{storage}/content"
        if any(row["volid"] == volume for row in await self.read(place, content="iso")):
            await self._do("DELETE", f"{place}/{quote(volume, safe='')}")

    async def create(self, vmid: int, options: Mapping[str, str], keys: Sequence[str]) -> None:
        # The value is itself percent-encoded, blanks as %20, and the form encodes it once more.
        encoded = quote("".join(f"{key}\n" for key in keys), safe="")
        await self._do("POST", f"/nodes/{self.node}/qemu", {"vmid": str(vmid), **options, "sshkeys": encoded})

    async def change(self, vmid: int, options: Mapping[str, str]) -> None:
        await self._do("POST", f"{self._machine(vmid)}/config", options)

    async def resize(self, vmid: int, disk: str, size: str) -> None:
        await self._do("PUT", f"{self._machine(vmid)}/resize", {"disk": disk, "size": size})

    async def start(self, vmid: int) -> None:
        await self._do("POST", f"{self._machine(vmid)}/status/start")

    async def stop(self, vmid: int) -> None:
        await self._do("POST", f"{self._machine(vmid)}/status/stop")

    async def unlock(self, vmid: int) -> None:
        raise ProxmoxError(f"it is locked, and only root on the host may unlock it: `qm unlock {vmid}`")

    async def destroy(self, vmid: int) -> None:
        await self._do("DELETE", self._machine(vmid), {"purge": "1"})

    def command(self, *words: str) -> str:
        return f"{' '.join(('qm', *words))} (on {self.node})"

    # -- how it is asked

    async def _answering(self) -> str:
        names = [str(row["node"]) for row in await self.read("/nodes")]
        if len(names) == 1:
            return names[0]
        rows = await self.read("/cluster/status")
        local = [str(row["name"]) for row in rows if row.get("type") == "node" and int(row.get("local", 0))]
        if len(local) != 1:
            raise ProxmoxError(
                f"which node of the cluster is meant? --api-node names one: {', '.join(sorted(names)) or 'none seen'}"
            )
        return local[0]

    async def _import_storage(self) -> str:
        what = "images to import (content type import, Proxmox VE 8.2 and later)"
        return await self.storage_for("import", what, "; or run this on the host")

    def _machine(self, vmid: int) -> str:
        return f"/nodes/{self.node}/qemu/{vmid}"

    async def _do(self, method: str, path: str, form: Mapping[str, str] | None = None) -> None:
        """Asks for it, and waits until the task that does it has ended well."""
        # Parameters of a DELETE go into its query: the body of one is not read.
        given = {"params": form or {}} if method == "DELETE" else {"data": dict(form or {})}
        await self._end_of(await self._ask(method, path, **given))

    async def _upload(self, place: str, fields: Mapping[str, str], name: str, content: Any) -> None:
        form = aiohttp.FormData()
        for field, value in fields.items():
            form.add_field(field, value)
        form.add_field("filename", content, filename=name, content_type="application/octet-stream")
        await self._end_of(await self._ask("POST", f"{place}/upload", limit_s=_UPLOAD_S, data=form))

    async def _ask(self, method: str, path: str, *, limit_s: float = _REQUEST_S, **given: Any) -> Any:
        async with self._answer(method, path, limit_s, given) as response:
            try:
                body = await response.json(content_type=None)
            except ValueError:
                body = None
            if response.status < 400:
                if not isinstance(body, dict) or "data" not in body:
                    raise ProxmoxError(f"{self._base} did not answer as the API of Proxmox does: is that its address?")
                return body["data"]
            raise self._refusal(response, path, body if isinstance(body, dict) else {})

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, limit_s: float, given: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        url = f"{self._base}/api2/json{path}"
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=10.0)
        try:
            async with self._session.request(method, url, timeout=limit, allow_redirects=False, **given) as response:
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            raise ProxmoxError(
                f"{self._base} shows a certificate that this machine does not trust "
                f"({error.certificate_error}): copy /etc/pve/pve-root-ca.pem from the host and name it with --api-ca",
                "unreachable",
            ) from None
        except TimeoutError:
            raise ProxmoxError(f"{self._base} did not answer within {limit_s:g} s", "unreachable") from None
        except (aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise ProxmoxError(f"{self._base} can't be reached: {error}", "unreachable") from None

    def _refusal(self, response: aiohttp.ClientResponse, path: str, body: Mapping[str, Any]) -> ProxmoxError:
        said = str(body.get("message") or response.reason or response.status).strip()
        wrong = "; ".join(f"{name}: {words}".strip() for name, words in (body.get("errors") or {}).items())
        words = f"{said} ({wrong})" if wrong else said
        name = self._token.partition("=")[0]
        if response.status == 401:
            return ProxmoxError(
                f"{self._base} does not accept the token {name}: {words}", "denied", look="pveum user token list USER"
            )
        if response.status == 403:
            return ProxmoxError(
                f"the token {name} may not: {words}. A token with privilege separation has only those permissions "
                "that it was given itself, not its user's",
                "denied",
                look=f"pveum user token permissions {name.replace('!', ' ')}",
            )
        return ProxmoxError(f"{path}: {words}", kind_of(words))

    async def _end_of(self, upid: Any) -> None:
        """Waits for a task. That it was begun says nothing of how it ends."""
        if not (isinstance(upid, str) and upid.startswith("UPID:")):
            return
        task = f"/nodes/{upid.split(':')[1]}/tasks/{quote(upid, safe='')}"
        pause_s, lost = _FIRST_POLL_S, 0
        while True:
            try:
                state = await self.read(f"{task}/status")
                lost = 0
                if state["status"] == "stopped":
                    break
            except ProxmoxError as error:
                lost += 1
                if error.kind != "unreachable" or lost == _MOST_LOST_POLLS:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
        ended = str(state.get("exitstatus", ""))
        if ended != "OK" and not ended.startswith("WARNINGS"):
            log = await self.read(f"{task}/log", limit="200")
            lines = [str(line["t"]) for line in log][-_LOG_LINES:]
            said = "; ".join(dict.fromkeys([*(line for line in lines if ended not in line), ended]))
            raise ProxmoxError(
                f"the task {upid.split(':')[5]} failed: {said}", kind_of(ended), look=f"pvenode task log {upid}"
            )


def _base(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"https://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "https" or not host or parts.path not in ("", "/", "/api2/json", "/api2/json/"):
        raise ProxmoxError(f"--api {url}: https://HOST:{DEFAULT_PORT} is expected; the token is not sent unencrypted")
    named = f"[{host}]" if ":" in host else host
    return f"https://{named}:{port or DEFAULT_PORT}"
