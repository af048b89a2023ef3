"""What is in a release, for those who ask it when a fault of a package becomes known: CycloneDX, as JSON."""

from __future__ import annotations

import datetime
import json
import uuid
from typing import Any

from deploy.release.debian import Package
from deploy.release.wheels import Wheel

_SPECIFICATION = "1.5"


def sbom(
    *, version: str, architecture: str, sha256: str, epoch_s: int, wheels: list[Wheel], debs: list[Package]
) -> str:
    """``sha256``: of the one file that all this is in."""
    when = datetime.datetime.fromtimestamp(epoch_s, datetime.UTC)
    name = f"llmgw-{version}-linux-{architecture}"
    components = [_component(wheel.name, wheel.version, wheel.purl, wheel.sha256) for wheel in sorted(wheels)]
    components += [_component(package.name, package.version, package.purl, package.sha256) for package in sorted(debs)]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": _SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, sha256)}",
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": name,
                "name": "llmgw",
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": sha256}],
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    return json.dumps(document, indent=1) + "\n"


def _component(name: str, version: str, purl: str, sha256: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    }
