"""Configuration values: frozen, validated in one place, defaults written once.

Loading (TOML file < environment < command line) is ``moonpool.cluster.configure``; this module only says what exists.
Sizes are bytes, times are milliseconds, unless the name says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from moonpool.core.ids import Role

MIB = 1 << 20
GIB = 1 << 30
NAN_BYTE = 0xFF  # a number of any float format made of it is NaN


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class ModelConfig(_Values):
    path: str = Field("smollm2", description="bundled model name, Hugging Face id, or a local model directory")
    name: str = Field("", description="the name clients use; default: the last part of path")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="weights, activations and KV")
    max_context: int = Field(0, ge=0, description="tokens of prompt and output together; 0: what the model says")
    aliases: tuple[str, ...] = Field((), description="further names that clients may use")
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="directories of LoRA adapters (PEFT, safetensors) by the name that clients use; the same on every host",
    )
    ttft_target_ms: float = Field(0.0, ge=0, description="default TTFT target of its requests; 0: gateway.ttft_target_ms")
    tbt_target_ms: float = Field(0.0, ge=0, description="default TBT target of its requests; 0: gateway.tbt_target_ms")
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = Field(
        "auto", description="how it writes tool calls; auto: as its chat template tells"
    )

    @property
    def served_name(self) -> str:
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]


class EngineConfig(_Values):
    backend: Literal["auto", "compiled", "fused", "torch", "triton"] = Field(
        "auto",
        description="what computes (docs/engine.md); auto: triton on a GPU; else the first that can: compiled (AVX-512 bf16, "
        "bfloat16), fused, torch",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="where workers compute and keep pages (docs/gpu.md); auto: the first GPU that torch sees, else the CPU",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="how device pages keep K/V (docs/gpu.md): as model.dtype, or in eight bits, for the backend triton alone",
    )
    threads: int = Field(
        0,
        ge=0,
        description="compute threads of each rank; 0: all cores in role both and where workers take turns, one each otherwise",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="processes (ranks) that compute one worker's model together, each with its share of heads"
    )
    rank_sums: Literal["auto", "memory", "gloo", "nccl"] = Field(
        "auto",
        description="how ranks add up what each computed; auto: by nccl on GPUs, else in shared memory where each has a core, "
        "on which it spins for a moment, else by gloo",
    )
    block_tokens: int = Field(64, ge=16, le=512, description="tokens per block (and per device page)")
    pages: int = Field(0, ge=0, description="device pages (tier G1) per worker; 0: from page_bytes")
    page_bytes: int = Field(512 * MIB, ge=MIB, description="device memory for pages per worker, where pages is 0")
    prefill_chunk: int = Field(
        2_048,
        ge=1,
        description="tokens of prompts computed per step, at most; above 512: where no answer waits and half a second will do",
    )
    span_tokens: int = Field(
        8_192, ge=1, description="the same of a prompt that several prefill workers compute, each its span in one step"
    )
    gap_ms: float = Field(
        100.0,
        ge=0,
        description="longest pause of answers without a TBT target while prompts are computed beside them; 0: no limit",
    )
    permit: Literal["auto", "on", "off"] = Field(
        "auto",
        description="workers of one host take turns with all its cores; auto: where several compute, with the compiled backend",
    )
    max_batch: int = Field(32, ge=1, description="sequences in one decode step")
    growth_reserve: float = Field(0.05, ge=0, lt=1, description="share of pages kept for running sequences to grow")
    reuse: bool = Field(True, description="reuse prefixes (device pages and pool); false is the cache-off oracle")
    poison: bool = Field(False, description="fill every freed page and slot with NaN (finds reads of dead memory; slow)")


class StoreConfig(_Values):
    pool_bytes: int = Field(0, ge=0, description="DRAM of one store node; 0: half of free memory")
    region_bytes: int = Field(256 * MIB, ge=MIB, description="one file and one registration each")
    directory: str = Field("", description="folder on a memory file system for region files; empty: /dev/shm")
    memory: Literal["dram", "cxl"] = Field("dram", description="cxl: region files on the NUMA node of store.numa_node")
    numa_node: int = Field(-1, ge=-1, description="NUMA node that the memory of store.memory = cxl is; -1: none named")
    eviction: Literal["lru", "lfu", "length_aware", "s3fifo", "hazard"] = Field("lru", description="which leaf goes first")
    ssd_path: str = Field("", description="folder of the SSD tier (G3), one locked subfolder per node; empty: no SSD tier")
    ssd_bytes: int = Field(0, ge=0, description="size of the SSD tier; 0: a quarter of what is free there, at most 64 GiB")
    ssd_write: Literal["back", "through"] = Field("back", description="write a block when it leaves DRAM, or when it is sealed")
    ssd_write_bytes_per_s: float = Field(0.0, ge=0, description="limit of writes to the SSD tier; 0: none")
    ssd_read_bytes_per_s: float = Field(0.0, ge=0, description="limit of reads from the SSD tier; 0: none")
    ssd_threads: int = Field(4, ge=1, le=64, description="direct reads and writes in flight")
    shared_path: str = Field("", description="shared tier (G4): an existing folder, or s3://bucket/prefix; empty: none")
    shared_endpoint: str = Field("", description="URL of the object storage; empty: AWS_ENDPOINT_URL, or AWS's own")
    shared_threads: int = Field(8, ge=1, le=64, description="operations on the shared tier under way at once")
    shared_timeout_ms: int = Field(5_000, ge=10, description="one operation on object storage is given up after this long")
    demote_below: float = Field(0.05, ge=0, lt=1, description="share of free DRAM below which cold blocks go to the SSD tier")
    demote_until: float = Field(0.10, ge=0, lt=1, description="share of free DRAM at which that stops")
    promote_after: int = Field(2, ge=1, le=15, description="recent uses of a block on SSD after which it stays in DRAM")
    hard_pin_share: float = Field(0.5, ge=0, le=0.5, description="share of a node that hard pins may hold; above, refused")
    soft_pin_share: float = Field(0.25, ge=0, le=1, description="share of a node that one tenant's soft pins may hold")
    quotas: dict[str, int] = Field(default_factory=dict, description="bytes of a node's pool a tenant may fill, by tenant")
    codecs: tuple[Literal["int8", "fp8"], ...] = Field((), description="lossy codecs that `moonpool store compress` may use")
    lossy_for: tuple[str, ...] = Field(
        (), description="tenants, model names and model fingerprints that lossy copies may serve"
    )
    replicate_after: int = Field(0, ge=0, description="remote reads of a block per minute that make another copy; 0: never")
    drain_ms: int = Field(10_000, ge=0, description="a leaving node moves blocks that nobody else holds this long")


class TransferConfig(_Values):
    carrier: Literal["auto", "ucx", "tcp", "ucxx", "segment", "memory"] = Field(
        "auto", description="how KV bytes travel between processes"
    )
    ucx_tls: str = Field("tcp", description="UCX_TLS; anything but tcp is refused between node ids on one machine")
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES; empty: UCX chooses")
    port: int = Field(0, ge=0, le=65_535, description="port where a store node takes KV by tcp; 0: any free one, announced")
    throttle_bytes_per_s: float = Field(0.0, ge=0, description="token bucket before each post; 0: none")


class TimingConfig(_Values):
    heartbeat_ms: int = Field(200, ge=10)
    silent_after_ms: int = Field(1_000, ge=50)
    registry_return_ms: int = Field(10_000, ge=100, description="after etcd was away, members have this long to come back")
    kill_after_ms: int = Field(5_000, ge=0, description="the host's agent kills a process silent this long; 0: never")
    request_budget_ms: int = Field(120_000, ge=1_000, description="all attempts of one request together")
    max_attempts: int = Field(3, ge=1)
    queue_limit: int = Field(256, ge=1, description="bound of every request queue")
    landing_age_ms: int = Field(1_000, ge=1, description="a skipped job gains this much seniority per skip")
    place_timeout_ms: int = Field(1_000, ge=10, description="one conductor's time to answer; then the next is asked")
    conductor_wait_ms: int = Field(10_000, ge=0, description="a request waits this long for any conductor, then gets 503")
    path_wait_ms: int = Field(10_000, ge=0, description="a request that has begun waits this long for a worker to take it on")
    stuck_after_ms: int = Field(60_000, ge=1_000, description="a loop with work that does nothing this long is not alive")
    drain_ms: int = Field(10_000, ge=0, description="a leaving worker finishes what it can this long, then hands the rest over")


class GatewayConfig(_Values):
    host: str = Field("127.0.0.1", description="HTTP bind address; auto: the host's own")
    port: int = Field(8000, ge=0, le=65_535)
    max_body_bytes: int = Field(8 * MIB, ge=1_024)
    max_held_bytes: int = Field(256 * MIB, ge=1_024, description="bodies of all requests in flight; above, 429")
    max_connections: int = Field(768, ge=1, description="connections of clients; more are answered 503 and closed")
    head_ms: int = Field(10_000, ge=1, description="a client has this long for a request's head; then it is cut off")
    body_ms: int = Field(30_000, ge=1, description="a client has this long for a request's body; then it gets 504")
    slow_reader_ms: int = Field(10_000, ge=1, description="a client that takes nothing of its answer this long is cut off")
    ttft_target_ms: float = Field(0.0, ge=0, description="default TTFT target of requests that carry none; 0: none")
    tbt_target_ms: float = Field(0.0, ge=0, description="default TBT target; 0: none")
    drain_ms: int = Field(5_000, ge=0, description="a leaving gateway lets running requests finish this long")
    console: Literal["auto", "on", "off"] = Field(
        "auto", description="the web console at /console; auto: where the gateway is on loopback, or asks for API keys"
    )
    linger_ms: int = Field(1_500, ge=0, description="a leaving gateway keeps idle connections open so long, to say goodbye")
    models: tuple[ModelConfig, ...] = Field((), description="models served besides that of [model], each with its path")
    usage_log: str = Field("", description="file that gets a line of JSON about every request at its end; empty: none")
    usage_log_bytes: int = Field(64 * MIB, ge=4_096, description="size at which the usage log is begun anew")
    usage_log_files: int = Field(
        8, ge=1, le=10_000, description="how many full usage logs are kept beside the one being written"
    )
    warm_file: str = Field("", description="prompts that are computed into the pool at the start, as for `moonpool warm`")
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call the gateway, or *; empty: none")


class ObserveConfig(_Values):
    """What processes tell of themselves beside metrics. See docs/metrics.md."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe lines that are logged")
    log_format: Literal["json", "logfmt"] = Field("json", description="how a line of the log is written")
    log_to: Literal["file", "stderr"] = Field("file", description="logs/MEMBER.log in the state folder, or standard error")
    log_bytes: int = Field(
        64 * MIB, ge=65_536, description="size at which a log file is begun anew; the one before it is kept, as MEMBER.log.1"
    )
    log_requests: bool = Field(True, description="a line about each request at its gateway, and each attempt elsewhere")
    otlp_endpoint: str = Field("", description="URL of an OpenTelemetry collector (OTLP over HTTP); empty: no traces")
    sample: float = Field(1.0, ge=0, le=1, description="share of requests that are traced, beside those that clients trace")


class SecurityConfig(_Values):
    """Who may speak to whom, and what is readable on a wire or a disk. See docs/security.md."""

    tls: Literal["off", "auto", "files"] = Field(
        "off", description="mutual TLS on every gRPC channel; auto: `moonpool up` makes the certificates; files: in tls_dir"
    )
    tls_dir: str = Field(
        "", description="tls = files: folder with ca.pem, cert.pem and key.pem of this process, or one folder per member id"
    )
    allow_plain: bool = Field(False, description="control ports off loopback without tls: on a network you trust wholly")
    etcd_ca: str = Field("", description="etcds://: PEM file of the CA of etcd's certificates; empty: the system's")
    etcd_cert: str = Field("", description="etcds://: PEM file of this side's certificate, where etcd asks for one")
    etcd_key: str = Field("", description="etcds://: PEM file of its private key, mode 0600")
    etcd_user: str = Field("", description="user name at etcd, where it asks for one")
    etcd_password_file: str = Field("", description="file with that user's password, mode 0600")
    https_cert: str = Field("", description="PEM file of the gateway's certificate chain; empty: plain HTTP")
    https_key: str = Field("", description="PEM file of its private key, mode 0600")
    api_keys_file: str = Field("", description="TOML file of API keys, tenants, their limits and roles; empty: everybody")
    kv_encryption: Literal["off", "aes-gcm"] = Field(
        "off", description="KV bytes between hosts, on SSD and on the shared tier are encrypted and authenticated (AES-256-GCM)"
    )
    kv_key_file: str = Field("", description="the cluster's 32-byte KV key; empty: kv.key beside cluster.key_file")
    zeroise: bool = Field(
        False, description="overwrite freed pages and slots, erased blocks on SSD and region files at exit with zeros"
    )
    min_hit_tokens: int = Field(0, ge=0, description="prefix hits shorter than this are not used: against timing probes")


class SchedulerConfig(_Values):
    policy: str = Field("moonpool", description="placement policy: moonpool, algorithm1, local_min_ttft, random, ...")
    policy_settings: dict[str, float] = Field(default_factory=dict, description="the policy's own numbers, by name")
    admission: str = Field("moonpool", description="what refuses: moonpool, early_predicted, early, baseline or none")
    admission_settings: dict[str, float] = Field(default_factory=dict, description="the admission's own numbers, by name")
    max_waiting: int = Field(1_024, ge=1, description="requests in a conductor's queue; more are refused")
    order: Literal["fifo", "shortest"] = Field("fifo", description="which prompt in a prefill worker's queue goes first")
    age_weight: float = Field(0.1, ge=0, description="shortest: seconds of predicted work that one of waiting outweighs")
    wait_cap_ms: int = Field(0, ge=0, description="shortest: who waits longer goes before the younger ones; 0: no cap")
    log_limit: int = Field(10_000, ge=1, description="decisions that a conductor remembers for `moonpool explain`")
    record_limit: int = Field(50_000, ge=1, description="events and requests that it remembers for `explain --record`")
    moves_at_once: int = Field(2, ge=0, description="copies and prefetches under way on a conductor's word; 0: none")
    seed: int = Field(0, ge=0, description="of random draws")
    colocate: bool = Field(False, description="decode workers compute short or cached prompts themselves where that is faster")
    roles: Literal["fixed", "ask", "auto"] = Field(
        "ask", description="who changes workers' roles: nobody, `moonpool rebalance --apply`, the leading conductor"
    )
    planner_settings: dict[str, float] = Field(default_factory=dict, description="the role planner's own numbers, by name")


class NodeConfig(_Values):
    """One node of a local cluster and how many of each role it runs (a store node is always there)."""

    name: str
    model: str = Field("", description="which model it serves, by its name in gateway.models; empty: that of [model]")
    prefill: int = Field(0, ge=0)
    decode: int = Field(0, ge=0)
    both: int = Field(0, ge=0)
    conductor: int = Field(0, ge=0)
    gateway: int = Field(0, ge=0)
    tensor_parallel: int = Field(0, ge=0, le=64, description="ranks of each of its workers; 0: engine.tensor_parallel")
    labels: dict[str, str] = Field(default_factory=dict, description="labels of the Ray node it may be put on")
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="custom resources of Ray that it takes"
    )


class ClusterConfig(_Values):
    name: str = Field("moonpool", description="names Ray actors, region files and the state folder")
    nodes: tuple[NodeConfig, ...] = (
        NodeConfig(name="a", prefill=2),
        NodeConfig(name="b", decode=1, conductor=1, gateway=1),
    )
    launcher: Literal["ray", "process"] = Field("ray", description="who places and restarts the processes")
    ray_address: str = Field(
        "local", description="local: a Ray cluster of its own; auto: the one this job runs in, or RAY_ADDRESS; or host:port"
    )
    ray_strategy: Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"] = Field(
        "SPREAD", description="how Ray puts node ids on its nodes: one each if possible, one each, few, all on one"
    )
    ray_cpus: dict[Role, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="CPUs that an actor of a role claims from Ray, where not the default"
    )
    ray_gpus_per_worker: float = Field(0.0, ge=0, description="GPUs that an actor with an engine claims from Ray")
    ray_place_ms: int = Field(30_000, ge=100, description="Ray has this long to find room for all node ids")
    host: str = Field("127.0.0.1", description="address the control ports bind to and announce; auto: the host's own")
    port: int = Field(0, ge=0, le=65_535, description="port of a process's control calls (gRPC); 0: any free one, announced")
    probe_host: str = Field("127.0.0.1", description="address that /live, /ready and /metrics bind to; auto: as above")
    probe_port: int = Field(0, ge=0, le=65_535, description="their port; 0: any free one, shown by `status`")
    registry: str = Field("", description="host:port, or etcd://host:port,...; empty: embedded in the launcher")
    state_dir: str = Field("", description="logs, sockets, pid files; empty: ~/.cache/moonpool/clusters/<name>")
    key_file: str = Field("", description="the 32-byte hash key; empty: ~/.config/moonpool/hash.key")
    max_restarts: int = Field(10, ge=0, description="restarts of one process before the launcher gives up on it")


class Config(_Values):
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    store: StoreConfig = StoreConfig()
    transfer: TransferConfig = TransferConfig()
    timing: TimingConfig = TimingConfig()
    gateway: GatewayConfig = GatewayConfig()
    security: SecurityConfig = SecurityConfig()
    observe: ObserveConfig = ObserveConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def model_name(self) -> str:
        return self.model.served_name

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """All that a gateway serves."""
        return (self.model, *self.gateway.models)

    def of_model(self, name: str) -> Config:
        """As processes of ``name`` (one of ``models``; empty: the first) are to have it."""
        model = next(m for m in self.models if name in ("", m.served_name))
        return self.model_copy(update={"model": model})

    def on_node(self, node: NodeConfig) -> Config:
        """As processes of ``node`` are to have it."""
        if not node.tensor_parallel:
            return self
        return self.model_copy(update={"engine": self.engine.model_copy(update={"tensor_parallel": node.tensor_parallel})})

    @property
    def freed_byte(self) -> int | None:
        """What freed pages and slots are filled with: NaN to find reads of dead memory, zeros to leave nothing; None: not."""
        return NAN_BYTE if self.engine.poison else 0 if self.security.zeroise else None

    def state_dir(self, home: Path) -> Path:
        return Path(self.cluster.state_dir) if self.cluster.state_dir else home / ".cache/moonpool/clusters" / self.cluster.name

    def key_file(self, home: Path) -> Path:
        return Path(self.cluster.key_file) if self.cluster.key_file else home / ".config/moonpool/hash.key"

    def kv_key_file(self, home: Path) -> Path:
        given = self.security.kv_key_file
        return Path(given) if given else self.key_file(home).with_name("kv.key")
