"""What is simulated: the machines, what computing and moving costs on them, and what breaks when. Read from TOML.

Costs are seconds, sizes bytes or tokens, rates bytes per second, as the names say.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moonpool.core.errors import ConfigError
from moonpool.core.layout import KVLayout
from moonpool.core.parsing import read_toml
from moonpool.scheduler.prefill_queue import Rule

KeepAt = Literal["prefill", "decode", "both"]
GroupRole = Literal["prefill", "decode", "both"]


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Group(_Values):
    """``count`` equal nodes, each with one worker and one store node."""

    role: GroupRole
    count: int = Field(ge=1)
    pool_tokens: int = Field(ge=0, description="KV that the DRAM of one node's store holds")
    ssd_tokens: int = Field(0, ge=0, description="KV that its SSD tier holds; 0: no SSD tier")
    device_tokens: int = Field(ge=1_024, description="KV that the worker's device pages hold")


class SimModel(_Values):
    name: str
    layers: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=4, multiple_of=4)
    block_tokens: int = Field(512, ge=16, le=512)
    max_context: int = Field(262_144, ge=1)

    def layout(self, layers: int) -> KVLayout:
        """Blocks of the right size in ``layers`` slices: a store of the simulator needs one, whoever plans the real number."""
        if self.kv_bytes_per_token % (4 * layers):
            raise ConfigError(
                f"model.layers: {self.kv_bytes_per_token} bytes per token do not divide into {layers} layers of two-byte "
                "keys and values; give both of the same model",
                param="model.layers",
            )
        return KVLayout(self.name, layers, 1, self.kv_bytes_per_token // (4 * layers), "bfloat16", self.block_tokens)


class PrefillCost(_Values):
    """Seconds = a + b (n - p) + c (n^2 - p^2) + d loaded, for n tokens of which p are cached; see ``costs.prefill_s``."""

    a: float = Field(ge=0)
    b: float = Field(gt=0)
    c: float = Field(ge=0)
    d: float = Field(0.0, ge=0, description="per token loaded from the host's DRAM")
    chunk_tokens: int = Field(0, ge=0, description="tokens per chunk; 0: a prompt is computed whole")
    chunk_factor: float = Field(1.0, ge=1, description="what computing takes longer in chunks")
    span_factor: float = Field(1.0, ge=1, description="what computing takes longer where several nodes share a prompt")
    overlap: bool = Field(True, description="computing goes on while blocks come in, layer by layer")
    early: bool = Field(True, description="blocks come in while the job waits in the queue; false: once it is begun")


class DecodeCost(_Values):
    """Seconds of a step = base_s + per_sequence_s x sequences + per_token_s x context tokens in the batch."""

    base_s: float = Field(gt=0)
    per_sequence_s: float = Field(0.0, ge=0)
    per_token_s: float = Field(ge=0)
    max_batch: int = Field(1_024, ge=1)
    chunk_tokens: int = Field(2_048, ge=1, description="prompt tokens per step where the worker computes prompts itself")
    growth_reserve: float = Field(0.05, ge=0, lt=1)
    first_gap: bool = Field(True, description="whether the wait between first token and batch counts as a gap of tokens")


class Link(_Values):
    """Every node's NIC, each way. ``loss``: share of what is sent that is sent again."""

    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(0.0, ge=0)
    loss: float = Field(0.0, ge=0, lt=1)


class Ssd(_Values):
    read_bytes_per_s: float = Field(gt=0)
    write_bytes_per_s: float = Field(gt=0)
    write: Literal["through", "back"] = Field("through", description="write a block when it is stored, or when DRAM gets full")
    demote_below: float = Field(
        0.05, ge=0, lt=1, description="write back: share of DRAM that can be had without losing a block"
    )


class Fault(_Values):
    """At ``at_s`` something of ``node`` breaks, until ``until_s`` (none: for good). ``other``: the far end of a cut link."""

    kind: Literal["worker", "store", "node", "link"]
    node: str
    at_s: float = Field(ge=0)
    until_s: float | None = None
    other: str = ""

    @model_validator(mode="after")
    def _check(self) -> Fault:
        if self.until_s is not None and self.until_s <= self.at_s:
            raise ValueError(f"until_s {self.until_s} is not after at_s {self.at_s}")
        if (self.kind == "link") != bool(self.other):
            raise ValueError("other: name the second node of a link, and of nothing else")
        return self


class TargetsS(_Values):
    """What users expect. ``sent``: requests carry them, so that they may be refused; else they are only reported on."""

    ttft_s: float = Field(30.0, gt=0)
    tbt_s: float = Field(0.1, gt=0)
    sent: bool = True


class SimCluster(_Values):
    groups: tuple[Group, ...] = Field(min_length=1)
    model: SimModel
    prefill: PrefillCost
    decode: DecodeCost
    link: Link
    ssd: Ssd | None = None
    keep: KeepAt = Field("prefill", description="whose store node keeps a prompt's KV once it is computed")
    eviction: str = "lru"
    order: Literal["fifo", "shortest"] = "fifo"
    age: float = Field(0.1, ge=0, description="order shortest: seconds of work that a second of waiting is worth")
    wait_cap_s: float = Field(60.0, gt=0, description="order shortest: an older job goes before all younger ones")
    targets: TargetsS = TargetsS()
    faults: tuple[Fault, ...] = ()
    post_prefill_s: float = Field(0.0, ge=0, description="from the end of a prefill to its first token at the client")
    max_output: int = Field(0, ge=0, description="answers are cut at so many tokens; 0: as the trace says")
    promised_output: int = Field(2_048, ge=1, description="max_tokens of every request: all the conductor knows beforehand")
    queue_limit: int = Field(65_536, ge=1, description="jobs in a worker's queue")
    max_attempts: int = Field(3, ge=1)
    budget_s: float = Field(3_600.0, gt=0, description="all attempts of a request together; then it has failed")
    detect_s: float = Field(1.0, ge=0, description="from a failure until the cluster knows")
    switch_s: float = Field(5.0, ge=0, description="from drained until back in the other role")
    noise: float = Field(0.0, ge=0, lt=1, description="how far computing strays from its cost: sigma of a log-normal factor")
    sample_s: float = Field(5.0, gt=0, description="how often the load is noted")

    @model_validator(mode="after")
    def _check(self) -> SimCluster:
        if any(group.ssd_tokens for group in self.groups) and self.ssd is None:
            raise ValueError("ssd: give its rates, a group has ssd_tokens")
        for fault in self.faults:
            for name in filter(None, (fault.node, fault.other)):
                if name not in self.nodes:
                    raise ValueError(f"faults: {name!r} is no node; there are {', '.join(self.nodes)}")
        return self

    @property
    def nodes(self) -> dict[str, Group]:
        """By name: p0, p1, ... prefill, d0, ... decode, b0, ... both."""
        out: dict[str, Group] = {}
        for role in ("prefill", "decode", "both"):
            mine = [group for group in self.groups if group.role == role for _ in range(group.count)]
            out |= {f"{role[0]}{i}": group for i, group in enumerate(mine)}
        return out

    @property
    def rule(self) -> Rule:
        """The order in which a prefill node computes what waits there."""
        return Rule(self.order == "shortest", self.age, self.wait_cap_s)

    def resized(self, **counts: int) -> SimCluster:
        """The same with other node counts by role, where a role has one group: ``resized(prefill=6)``."""
        groups = tuple(group.model_copy(update={"count": counts.get(group.role, group.count)}) for group in self.groups)
        return self.changed(groups=groups)

    def changed(self, **values: Any) -> SimCluster:
        """The same with other values, checked again."""
        return SimCluster.model_validate({**{name: getattr(self, name) for name in type(self).model_fields}, **values})


def read_cluster(name: str | Path, overrides: Mapping[str, str] = MappingProxyType({})) -> SimCluster:
    """From a TOML file, or one that comes with the simulator by its name (``llama70b_8p8d``). ConfigError names the key.

    ``overrides``: values in TOML (or plain words) by dotted key: ``{"link.bytes_per_s": "3e9"}``.
    """
    path = Path(name)
    bundled = files("moonpool.sim") / "clusters" / f"{name}.toml"
    try:
        text = path.read_text() if path.suffix == ".toml" or path.exists() else bundled.read_text()
        values = read_toml(text)
        for key, value in overrides.items():
            _put(values, key, value)
        return SimCluster.model_validate(values)
    except OSError as e:
        known = ", ".join(bundled_clusters())
        message = f"cluster: cannot read {name}: {e.strerror}; give a TOML file, or one of {known}"
        raise ConfigError(message, param="cluster") from e
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "cluster"
        raise ConfigError(f"cluster {name}: {key}: {first['msg']}", param=key) from e
    except ValueError as e:  # also a file that is not UTF-8
        raise ConfigError(f"cluster: {name} is not TOML: {e}", param="cluster") from e


def _put(values: dict[str, Any], key: str, value: str) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"cluster: {key} is no key: {part} is not a table", param=key)
    try:
        values[last] = read_toml(f"value = {value}")["value"]
    except ValueError:
        values[last] = value


def bundled_clusters() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in (files("moonpool.sim") / "clusters").iterdir())
