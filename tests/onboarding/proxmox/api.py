"""The REST API of a Proxmox host: tokens and what they may, parameters as forms, work as tasks that are asked after."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from aiohttp import web

from tests.onboarding.proxmox.host import NODE, Host, PveError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ALL = ("VM.Allocate", "VM.Audit", "VM.Config", "VM.PowerMgmt", "Datastore.AllocateTemplate", "Datastore.AllocateSpace",
       "Sys.Audit", "Mapping.Use")  # fmt: skip
MAY = web.RequestKey("may", tuple[str, ...])


class Api:
    """``fetch`` stands for the internet from which the host downloads: a folder with a file per URL's last part."""

    def __init__(self, host: Host, fetch: Path) -> None:
        self.host = host
        self.fetch = fetch
        self.tasks: dict[str, dict[str, Any]] = {}
        self._running: list[asyncio.Task[None]] = []
        self.requests: list[tuple[str, str, str]] = []
        self.lose: set[str] = set()
        """Paths whose next answer is lost on its way, though it is done."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._dressed], client_max_size=1 << 30)
        qemu = "/api2/json/nodes/{node}/qemu"
        app.add_routes(
            [
                web.post(qemu, self._create),
                web.post(f"{qemu}/{{vmid}}/config", self._set),
                web.put(f"{qemu}/{{vmid}}/resize", self._resize),
                web.post(f"{qemu}/{{vmid}}/status/{{verb}}", self._power),
                web.delete(f"{qemu}/{{vmid}}", self._destroy),
                web.get("/api2/json/nodes/{node}/tasks/{upid}/status", self._task),
                web.get("/api2/json/nodes/{node}/tasks/{upid}/log", self._task_log),
                web.post("/api2/json/nodes/{node}/storage/{storage}/upload", self._upload),
                web.post("/api2/json/nodes/{node}/storage/{storage}/download-url", self._download),
                web.delete("/api2/json/nodes/{node}/storage/{storage}/content/{volume}", self._free),
                web.get("/api2/json/{path:.*}", self._read),
            ]
        )
        return app

    async def end(self) -> None:
        await asyncio.gather(*self._running)

    @web.middleware
    async def _dressed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        body = "" if "multipart" in request.headers.get("Content-Type", "") else await request.text()
        self.requests.append((request.method, request.path_qs, body))
        try:
            self._authenticate(request)
            answer = await handler(request)
        except PveError as error:
            words, *details = str(error).split("\n")
            errors = dict(line.split(": ", 1) for line in details if ": " in line)
            body = json.dumps({"data": None, "message": f"{words}\n", **({"errors": errors} if errors else {})})
            return web.Response(status=error.status, reason=words, text=body, content_type="application/json")
        if request.path in self.lose:
            self.lose.discard(request.path)
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _authenticate(self, request: web.Request) -> None:
        found = re.fullmatch(r"PVEAPIToken=([^=]+)=(.+)", request.headers.get("Authorization", ""))
        if found is None:
            raise PveError("No ticket", 401)
        token = self.host.settings["tokens"].get(found[1])
        if token is None:
            raise PveError(f"no such token '{found[1].partition('!')[2]}' for user '{found[1].partition('!')[0]}'", 401)
        if token["secret"] != found[2]:
            raise PveError("invalid token value!", 401)
        request[MAY] = tuple(token.get("may", ALL))

    def _need(self, request: web.Request, privilege: str, path: str) -> None:
        if privilege not in request[MAY]:
            raise PveError(f"Permission check failed ({path}, {privilege})", 403)

    # -- what is asked

    async def _read(self, request: web.Request) -> web.Response:
        path = f"/{request.match_info['path']}"
        if path.startswith((f"/nodes/{NODE}/network", f"/nodes/{NODE}/hardware")):
            self._need(request, "Sys.Audit", "/nodes/pve1")
        return _data(self.host.read(path, dict(request.query), NODE))

    async def _task(self, request: web.Request) -> web.Response:
        task = self._of(request)
        state = {"upid": request.match_info["upid"], "status": task["status"], "node": NODE}
        return _data(state | ({"exitstatus": task["exitstatus"]} if task["status"] == "stopped" else {}))

    async def _task_log(self, request: web.Request) -> web.Response:
        return _data([{"n": number, "t": line} for number, line in enumerate(self._of(request)["log"], 1)])

    def _of(self, request: web.Request) -> dict[str, Any]:
        try:
            return self.tasks[request.match_info["upid"]]
        except KeyError:
            raise PveError("no such task", 400) from None

    # -- what is done

    async def _create(self, request: web.Request) -> web.Response:
        options = await _form(request)
        vmid = int(options.pop("vmid", "0"))
        self._need(request, "VM.Allocate", f"/vms/{vmid}")
        self._arbitrary(options)
        # The number is taken before there is a task; only what follows may fail in it.
        if any(row["vmid"] == vmid for row in self.host.read("/cluster/resources", {}, NODE)):
            raise PveError(f"unable to create VM {vmid} - VM {vmid} already exists on node '{NODE}'")
        self.host._check(options, api=True)
        return self._begin("qmcreate", vmid, lambda: self.host.create(vmid, options, api=True))

    async def _set(self, request: web.Request) -> web.Response:
        vmid, options = int(request.match_info["vmid"]), await _form(request)
        self._need(request, "VM.Config", f"/vms/{vmid}")
        self._arbitrary(options)
        self.host._check(options, api=True)
        return self._begin("qmconfig", vmid, lambda: self.host.set(vmid, options, api=True))

    def _arbitrary(self, options: dict[str, str]) -> None:
        for name, value in options.items():
            if "import-from=/" in value or (re.fullmatch(r"scsi\d+", name) and value.startswith("/")):
                raise PveError("Only root can pass arbitrary filesystem paths.", 403)
            if name.startswith("hostpci") and not value.startswith("mapping="):
                raise PveError(f"only root can set '{name}' config for non-mapped devices", 403)

    async def _resize(self, request: web.Request) -> web.Response:
        vmid, options = int(request.match_info["vmid"]), await _form(request)
        self._need(request, "VM.Config", f"/vms/{vmid}")
        return self._begin("resize", vmid, lambda: self.host.resize(vmid, options["disk"], options["size"]))

    async def _power(self, request: web.Request) -> web.Response:
        vmid, verb = int(request.match_info["vmid"]), request.match_info["verb"]
        self._need(request, "VM.PowerMgmt", f"/vms/{vmid}")
        work = {"start": self.host.start, "stop": self.host.stop}[verb]
        return self._begin(f"qm{verb}", vmid, lambda: work(vmid))

    async def _destroy(self, request: web.Request) -> web.Response:
        vmid = int(request.match_info["vmid"])
        if await request.text():
            raise PveError("Unexpected content for method 'DELETE'", 501)
        self._need(request, "VM.Allocate", f"/vms/{vmid}")
        return self._begin("qmdestroy", vmid, lambda: self.host.destroy(vmid))

    async def _upload(self, request: web.Request) -> web.Response:
        storage = request.match_info["storage"]
        self._need(request, "Datastore.AllocateTemplate", f"/storage/{storage}")
        fields: dict[str, str] = {}
        data, name = b"", ""
        async for part in await request.multipart():
            if name:
                raise PveError("the file comes last", 400)
            if part.name == "filename":
                data, name = bytes(await part.read()), str(part.filename)
            else:
                fields[str(part.name)] = await part.text()
        self._fits(storage, fields["content"], name)
        return self._begin("imgcopy", 0, lambda: self._keep(storage, fields, name, data))

    async def _download(self, request: web.Request) -> web.Response:
        storage, form = request.match_info["storage"], await _form(request)
        self._need(request, "Datastore.AllocateTemplate", f"/storage/{storage}")
        if not re.fullmatch(r"https?://.*", form.get("url", "")):
            raise PveError("Parameter verification failed.\nurl: value does not match the regex pattern", 400)
        self._fits(storage, form["content"], form["filename"])
        source = self.fetch / form["url"].rpartition("/")[2]

        def work() -> None:
            if not source.is_file():
                raise PveError("download failed: 404 Not Found")
            self._keep(storage, form, form["filename"], source.read_bytes())

        return self._begin("download", 0, work)

    async def _free(self, request: web.Request) -> web.Response:
        volume = url2pathname(request.match_info["volume"])
        return self._begin("imgdel", 0, lambda: self.host.free(volume))

    def _fits(self, storage: str, content: str, name: str) -> None:
        facts = self.host.settings["storages"].get(storage)
        if facts is None or content not in facts["content"].split(","):
            raise PveError(f"storage '{storage}' does not support '{content}' content", 500)
        endings = {"iso": r".+\.(iso|img)", "import": r".+\.(qcow2|raw|vmdk|ova)"}
        if not re.fullmatch(endings[content], name):
            raise PveError(f"Parameter verification failed.\nfilename: wrong file extension ({name})", 400)

    def _keep(self, storage: str, fields: dict[str, str], name: str, data: bytes) -> None:
        self.host._fault("iso" if fields["content"] == "iso" else "image", 0)
        if "checksum" in fields:
            got = hashlib.new(fields["checksum-algorithm"], data).hexdigest()
            if got != fields["checksum"]:
                raise PveError(f"checksum mismatch: got '{got}' != expect '{fields['checksum']}'")
        self.host.path(f"{storage}:{fields['content']}/{name}").write_bytes(data)

    def _begin(self, kind: str, vmid: int, work: Callable[[], None]) -> web.Response:
        number = len(self.tasks) + 1
        upid = f"UPID:{NODE}:{number:08X}:{number:08X}:{int(time.time()):08X}:{kind}:{vmid or ''}:llmgw@pve!ci:"
        task: dict[str, Any] = {"status": "running", "exitstatus": "", "log": []}
        self.tasks[upid] = task
        self._running.append(asyncio.create_task(self._work(task, work)))
        return _data(upid)

    async def _work(self, task: dict[str, Any], work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
            task["exitstatus"], task["log"] = "OK", ["TASK OK"]
        except PveError as error:
            words = str(error)
            task["exitstatus"], task["log"] = words, [f"TASK ERROR: {words}"]
        task["status"] = "stopped"


@asynccontextmanager
async def serving(api: Api, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The API at the URL that is given back."""
    runner = web.AppRunner(api.app(), shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await api.end()
        await runner.cleanup()


async def _form(request: web.Request) -> dict[str, str]:
    return {name: str(value) for name, value in (await request.post()).items()}


def _data(value: Any) -> web.Response:
    return web.json_response({"data": value})
