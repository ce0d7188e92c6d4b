"""What a model can do on a machine at best: the first guess of estimates, and what ``moonpool plan`` prints.

Prefill is bound by arithmetic, decode by reading weights and KV; efficiencies and overheads are the machine's own measured
ones. Forms as in Mooncake (FAST 2025), equations 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.scheduler.estimates import Seeds
from moonpool.scheduler.model_shape import ModelShape

DEVICE_SHARE = 0.9  # of device memory that weights and KV may take
PAPER_A, PAPER_B = 4.0, 22.0  # equation 1: layers x (a n^2 d + b n d^2) FLOPs


@dataclass(frozen=True, slots=True)
class Machine:
    """One node that runs one model over ``devices`` devices. Rates and bytes of the device are those of one device."""

    name: str
    devices: int
    flops: float  # per second, of the type that weights are computed in
    memory_bytes: float
    memory_bytes_per_s: float
    dram_bytes: float
    host_bytes_per_s: float  # of the node, DRAM to devices
    network_bytes_per_s: float  # of the node
    ssd_bytes_per_s: float = 0.0
    linear_efficiency: float = 0.5
    attention_efficiency: float = 0.7
    memory_efficiency: float = 0.75
    layer_overhead_s: float = 0.0  # launches and all-reduces of one layer

    @property
    def peak(self) -> float:
        """FLOPs per second of all devices."""
        return self.devices * self.flops

    @property
    def reads(self) -> float:
        """Bytes per second of all devices' memory, as reached."""
        return self.devices * self.memory_bytes_per_s * self.memory_efficiency


@dataclass(frozen=True, slots=True)
class Roofline:
    model: ModelShape
    machine: Machine

    # -- seeds of the estimates ----------------------------------------------------------------------------------------

    def seeds(self, chunk_tokens: int = 0) -> Seeds:
        return Seeds(self.prefill(chunk_tokens), self.step())

    def prefill(self, chunk_tokens: int = 0) -> tuple[float, float, float, float]:
        """a, b, c, d of ``PrefillEstimate``. A chunk costs an overhead of its own; ``chunk_tokens`` 0: one chunk."""
        model, machine = self.model, self.machine
        overhead = model.layers * machine.layer_overhead_s
        linear = model.linear_flops / (machine.peak * machine.linear_efficiency)
        pairs = model.attention_flops / (machine.peak * machine.attention_efficiency) / 2.0  # causal: half the pairs
        chunks = overhead / chunk_tokens if chunk_tokens else 0.0
        return overhead, linear + chunks, pairs, model.kv_bytes / machine.host_bytes_per_s

    def step(self) -> tuple[float, float, float]:
        """a, b, c of ``StepEstimate``: every weight that any of a large batch needs is read once a step."""
        model, machine = self.model, self.machine
        weights = model.read_bytes(64.0) / machine.reads + model.layers * machine.layer_overhead_s
        return weights, model.linear_flops / (machine.peak * machine.linear_efficiency), model.kv_bytes / machine.reads

    # -- what fits, how long it takes ----------------------------------------------------------------------------------

    @property
    def device_tokens(self) -> int:
        """KV tokens in device memory beside the weights; 0 where these do not fit."""
        room = self.machine.devices * self.machine.memory_bytes * DEVICE_SHARE - self.model.weight_bytes
        return max(int(room / self.model.kv_bytes), 0)

    @property
    def dram_tokens(self) -> int:
        return int(self.machine.dram_bytes / self.model.kv_bytes)

    def prefill_s(self, tokens: float, cached: float = 0.0, chunk_tokens: int = 0) -> float:
        a, b, c, d = self.prefill(chunk_tokens)
        return a + b * (tokens - cached) + c * (tokens * tokens - cached * cached) + d * cached

    def step_s(self, batch: float, context: float) -> float:
        """One decode step of ``batch`` sequences of ``context`` tokens each."""
        model, machine = self.model, self.machine
        compute = batch * model.linear_flops / (machine.peak * machine.linear_efficiency)
        weights = max(model.read_bytes(batch) / machine.reads, compute)
        return model.layers * machine.layer_overhead_s + weights + batch * context * model.kv_bytes / machine.reads

    def break_even(self, tokens: float) -> float:
        """Bytes per second from which on fetching the KV of ``tokens`` takes less time than computing it does."""
        _, b, c, _ = self.prefill()
        return self.model.kv_bytes / (b + c * tokens)

    def break_even_at_peak(self, tokens: float) -> float:
        """The same as in equation 2: every device at its peak rate, the FLOPs counted as in equation 1."""
        hidden, layers = self.model.hidden, self.model.layers
        flops = layers * (PAPER_A * tokens * hidden + PAPER_B * hidden * hidden)  # of one token
        return self.model.kv_bytes * self.machine.peak / flops
