"""UCX that reads device pages where it can, and says so; a second host memory stands for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.carrier_peer import map_file, pattern, receiving_peer, who

from moonpool.core.config import TransferConfig
from moonpool.core.device_memory import DeviceMemory
from moonpool.kvstore.transfer import ucx
from moonpool.kvstore.transfer.ucx_sender import UcxSender

SIZE = 1 << 16


class _AsHost:
    """An agent to which a device's memory is the host's."""

    def __init__(self, real: Any, *, registers: bool = True) -> None:
        self._real, self._registers = real, registers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def register_memory(self, wanted: list[tuple[int, int, int, str]], kind: str) -> Any:
        if kind == "VRAM" and not self._registers:
            raise ucx.nixl_errors()[0]("no such luck")
        return self._real.register_memory([(at, size, 0, "") for at, size, _, _ in wanted], "DRAM")

    def get_xfer_descs(self, pieces: Any, kind: str) -> Any:
        assert kind == "DRAM" or (pieces[:, 2] == 3).all()
        pieces[:, 2] = 0
        return self._real.get_xfer_descs(pieces, "DRAM")


@pytest.mark.parametrize(
    ("registers", "said"),
    [
        (True, "tcp, from device pages"),
        (False, "tcp, from the host's view: UCX could not register it"),
    ],
)
def test_bytes_come_from_where_the_sender_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registers: bool, said: str
) -> None:
    monkeypatch.setattr(ucx, "device_trouble", lambda agent, config: None)
    host, device = pattern(SIZE), pattern(SIZE)[::-1].copy()
    sender = UcxSender(
        who("prefill-0", "a"),
        TransferConfig(),
        new_agent=lambda name, config: _AsHost(ucx.new_agent(name, config), registers=registers),
    )
    with receiving_peer("ucx", tmp_path / "r", SIZE) as other:
        other.ask("open")
        sender.read_from(DeviceMemory(device.ctypes.data, SIZE, 3))
        sender.register([host])
        sender.connect(other.endpoint()).result(10)
        sender.push(other.endpoint(), np.array([[0, 64, 0, 0, SIZE - 64]]), b"x").result(10)
        assert sender.transport_used().startswith(said)
        want = device if "device pages" in said else host
        assert (map_file(str(tmp_path / "r"), SIZE)[: SIZE - 64] == want[64:]).all()
        sender.close()


def test_why_device_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Agent:
        kinds = ("DRAM",)

        def get_backend_mem_types(self, backend: str) -> tuple[str, ...]:
            return self.kinds

    agent = Agent()
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(ucx, "_loaded_libraries", lambda: {"libucs": str(tmp_path / "libucs.so")})
    assert ucx.device_trouble(agent, TransferConfig()) == "NIXL's UCX knows no device memory"
    agent.kinds = ("DRAM", "VRAM")
    assert ucx.device_trouble(agent, TransferConfig(ucx_tls="rc,cuda_copy")) == "this UCX is built without CUDA"
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx/libuct_cuda.so.0").touch()
    assert ucx.device_trouble(agent, TransferConfig(ucx_tls="rc,tcp")) == "transfer.ucx_tls 'rc,tcp' allows no cuda"
    assert ucx.device_trouble(agent, TransferConfig(ucx_tls="rc,cuda_copy,tcp")) is None
    assert ucx.device_trouble(agent, TransferConfig(ucx_tls="all")) is None
