"""`qm`, `pvesh` and `pvesm`, for what provisioning asks of them, with the options and refusals of the real ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.onboarding.proxmox.host import Host, PveError

USAGE = {
    "create": "qm create <vmid> [OPTIONS]",
    "set": "qm set <vmid> [OPTIONS]",
    "resize": "qm resize <vmid> <disk> <size> [OPTIONS]",
    "start": "qm start <vmid> [OPTIONS]",
    "stop": "qm stop <vmid> [OPTIONS]",
    "destroy": "qm destroy <vmid> [OPTIONS]",
    "unlock": "qm unlock <vmid>",
    "config": "qm config <vmid> [OPTIONS]",
    "status": "qm status <vmid> [OPTIONS]",
}
POSITIONAL = {"resize": 3}
FLAGS = {
    "destroy": {"purge", "skiplock", "destroy-unreferenced-disks"},
    "start": {"skiplock", "timeout", "machine"},
    "stop": {"skiplock", "timeout", "keepActive"},
    "resize": {"digest", "skiplock"},
}


class Usage(Exception):
    pass


def main(program: str, words: list[str]) -> int:
    host = Host(Path(os.environ["PVE_STATE"]))
    host.note(program, *words)
    try:
        {"qm": qm, "pvesh": pvesh, "pvesm": pvesm}[program](host, words)
    except Usage as error:
        print(error, file=sys.stderr)
        return 255
    except PveError as error:
        status = f"{error.status} " if error.status == 400 else ""
        print(f"{status}{error}", file=sys.stderr)
        return 255
    return 0


def qm(host: Host, words: list[str]) -> None:
    verb, rest = words[0], words[1:]
    if verb == "list" and not rest:
        return list_vms(host)
    if verb not in USAGE:
        raise Usage(f"ERROR: unknown command 'qm {verb}'")
    positional, options = split(f"qm {verb}", USAGE[verb], rest)
    wanted = POSITIONAL.get(verb, 1)
    if len(positional) != wanted:
        raise Usage(f"400 {'not enough' if len(positional) < wanted else 'too many'} arguments\n{USAGE[verb]}")
    if not positional[0].isdigit():
        wrong = f"vmid: type check ('integer') failed - got '{positional[0]}'"
        raise Usage(f"400 Parameter verification failed.\n{wrong}\n{USAGE[verb]}")
    vmid = int(positional[0])
    for name in options:
        if verb not in ("create", "set") and name not in FLAGS.get(verb, set()):
            raise Usage(f"Unknown option: {name}\n400 unable to parse option\n{USAGE[verb]}")
    if verb in ("create", "set"):
        if "sshkeys" in options:
            # Here it names a file.
            try:
                options["sshkeys"] = Path(options["sshkeys"]).read_text()
            except OSError as error:
                raise PveError(f"sshkeys: unable to open file '{options['sshkeys']}' - {error.strerror}", 400) from None
        (host.create if verb == "create" else host.set)(vmid, options, api=False)
        return None
    if verb == "resize":
        return host.resize(vmid, positional[1], positional[2])
    if verb == "config":
        for name, value in sorted(host.read(f"/nodes/localhost/qemu/{vmid}/config", {}, "localhost").items()):
            print(f"{name}: {value}")
        return None
    if verb == "status":
        print(f"status: {'running' if host.is_running(vmid) else 'stopped'}")
        return None
    return {"start": host.start, "stop": host.stop, "destroy": host.destroy, "unlock": host.unlock}[verb](vmid)


def list_vms(host: Host) -> None:
    vms = host.vms()
    if vms:
        print(f"{'VMID':>10} {'NAME':<20} {'STATUS':<10} {'MEM(MB)':<10} {'BOOTDISK(GB)':>12} {'PID':<10}")
    for vmid, config in vms.items():
        state = "running" if host.is_running(vmid) else "stopped"
        print(f"{vmid:>10} {config.get('name', ''):<20} {state:<10} {config.get('memory', ''):<10} {0:>12.2f} {0:<10}")


def pvesh(host: Host, words: list[str]) -> None:
    if words[:1] != ["get"] or len(words) < 2:
        raise Usage("ERROR: unknown command")
    _, options = split("pvesh get", "pvesh get <api_path> [OPTIONS] [FORMAT_OPTIONS]", words[1:])
    if options.pop("output-format", "text") != "json":
        raise Usage("only JSON is spoken here")
    print(json.dumps(host.read(words[1], options, "localhost")))


def pvesm(host: Host, words: list[str]) -> None:
    if len(words) != 2 or words[0] not in ("path", "free"):
        raise Usage("ERROR: unknown command")
    if words[0] == "path":
        print(host.path(words[1]))
    else:
        host.free(words[1])


def split(command: str, usage: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    positional, options = [], {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            given = next(rest, None)
            if given is None:
                raise Usage(f"Option {name} requires an argument\n400 unable to parse option\n{usage}")
            value = given
        if name in options:
            raise Usage(f"400 unable to parse option\n{name}: given twice\n{usage}")
        options[name] = value
    return positional, options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
