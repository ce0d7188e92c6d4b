"""A child of the doctor: asks UCX itself, as NIXL ships it, which transports and devices it has. Prints JSON.

    python -m moonpool.cli.doctor.ucx_look TRANSPORTS

``there``: what UCX would use if everything were allowed; ``asked``: what is left under TRANSPORTS (a value of UCX_TLS), or
``trouble``. Each is [[transport, device], ...], as ``ucx_info -d`` names them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FEATURE_FIELD, RMA = 1, 2  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA
PARAMS_BYTES = 512  # more than any version of ucp_params_t has
_RESOURCE = re.compile(r"resource\s+\d+\s*:.*?\s(\S+)/(\S+)\s*$", re.MULTILINE)


def resources(told: str) -> list[tuple[str, str]]:
    """Transport and device of each resource in the text of ``ucp_context_print_info``."""
    return [(transport, device) for transport, device in _RESOURCE.findall(told)]


def library() -> Path:
    """OSError: NIXL's own UCX is not here."""
    spec = find_spec("nixl_cu12")
    folder = Path(spec.origin).parents[1] / "nixl_cu12.libs" if spec is not None and spec.origin else None
    found = sorted(folder.glob("libucp-*.so*")) if folder is not None else []
    if not found:
        raise OSError("nixl-cu12 brings no libucp here")
    return found[0]


class Ucx:
    def __init__(self, path: Path) -> None:
        self._ucp = ctypes.CDLL(str(path))
        self._libc = ctypes.CDLL(None)
        self._libc.fopen.restype = ctypes.c_void_p
        self._ucp.ucp_get_version_string.restype = ctypes.c_char_p

    def version(self) -> str:
        said: bytes = self._ucp.ucp_get_version_string()
        return said.decode()

    def resources(self, transports: str) -> list[tuple[str, str]]:
        """OSError: UCX starts with none of them."""
        context = ctypes.c_void_p()
        config = ctypes.c_void_p()
        self._right(self._ucp.ucp_config_read(None, None, ctypes.byref(config)))
        self._right(self._ucp.ucp_config_modify(config, b"TLS", transports.encode()))
        major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        self._ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
        params = ctypes.create_string_buffer(PARAMS_BYTES)
        ctypes.memmove(params, FEATURE_FIELD.to_bytes(8, sys.byteorder) + RMA.to_bytes(8, sys.byteorder), 16)
        started = self._ucp.ucp_init_version(major, minor, params, config, ctypes.byref(context))
        self._ucp.ucp_config_release(config)
        self._right(started)
        told = self._told(context)
        self._ucp.ucp_cleanup(context)
        return resources(told)

    def _told(self, context: ctypes.c_void_p) -> str:
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as file:
            stream = ctypes.c_void_p(self._libc.fopen(file.name.encode(), b"w"))
            self._ucp.ucp_context_print_info(context, stream)
            self._libc.fclose(stream)
            return file.read()

    def _right(self, status: int) -> None:
        if status:
            self._ucp.ucs_status_string.restype = ctypes.c_char_p
            said = self._ucp.ucs_status_string(ctypes.c_int8(status))
            raise OSError(said.decode() if said else f"status {status}")


def look(transports: str) -> dict[str, Any]:
    ucx = Ucx(library())
    told: dict[str, Any] = {"version": ucx.version(), "there": ucx.resources("all"), "asked": []}
    try:
        told["asked"] = ucx.resources(transports)
    except OSError as e:
        told["trouble"] = str(e)
    return told


def main() -> None:
    os.environ["UCX_LOG_LEVEL"] = "fatal"  # its warnings would go to standard output
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        os.environ.pop(name, None)  # they are asked about, not obeyed
    if not any(Path("/sys/class/infiniband").glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")  # else its verbs module crashes every process at exit
    try:
        said = json.dumps(look(sys.argv[1]))
    except (OSError, AttributeError) as e:
        print(e, file=sys.stderr, flush=True)
        os._exit(1)
    print(said, flush=True)
    os._exit(0)  # no library's own end: this process has nothing to put away


if __name__ == "__main__":
    main()
