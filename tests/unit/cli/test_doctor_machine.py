"""What the kernel allows, what devices there are, and where bytes are to lie: as it is here, and as it is elsewhere."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.cli.doctor import checks, command, devices, limits, storage, ucx_look, versions
from moonpool.cli.doctor.finding import Check, Grade, ok, run_checks
from moonpool.cluster.control_group import Group, control_group
from moonpool.core.config import GIB, MIB, Config, EngineConfig, ModelConfig, StoreConfig, TransferConfig
from moonpool.core.errors import ConfigError


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A memory file system of its own."""
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)), capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs root, and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(("umount", str(folder)), check=True)


# checks


def test_a_check_that_hangs_costs_its_own_limit_and_hides_no_other() -> None:
    held = threading.Event()

    def hangs(config: Config) -> list[object]:
        held.wait(30.0)
        return []

    def breaks(config: Config) -> list[object]:
        raise RuntimeError("no such luck")

    def refuses(config: Config) -> list[object]:
        raise ConfigError("store.ssd_path: not there; name another")

    some = (
        Check("slow", hangs, 0.2, "wake it"),  # type: ignore[arg-type]
        Check("broken", breaks),  # type: ignore[arg-type]
        Check("refusing", refuses),  # type: ignore[arg-type]
        Check("good", lambda config: [ok("good")]),
    )
    found = list(run_checks(some, Config()))
    held.set()
    assert [one.check for one in found] == ["slow", "broken", "refusing", "good"]
    slow, broken, refusing, good = (one.findings[0] for one in found)
    assert (slow.grade, slow.what, slow.fix) == (Grade.FAIL, "slow: no answer within 0 s", "wake it")
    assert (broken.grade, "RuntimeError: no such luck" in broken.what) == (Grade.WARN, True)
    assert (refusing.grade, refusing.what, refusing.fix) == (Grade.FAIL, "store.ssd_path: not there", "name another")
    assert good.grade is Grade.OK
    told = command.told(found)
    assert told["worst"] == "fail"
    json.dumps(told)


def test_every_check_has_a_limit_and_a_name_of_its_own() -> None:
    assert len({check.name for check in checks.CHECKS}) == len(checks.CHECKS)
    assert all(0 < check.limit_s <= 130 for check in checks.CHECKS)


# memory and limits


def test_a_pool_larger_than_its_memory_file_system_is_a_failure(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "2g") as folder:
        config = Config(store=StoreConfig(pool_bytes=GIB // 2, directory=str(folder)))
        assert storage.of_shared_memory(config, folder, Path("/proc/mounts")).grade is Grade.OK
        config = Config(store=StoreConfig(pool_bytes=2 * GIB, directory=str(folder)))
        finding = storage.of_shared_memory(config, folder, Path("/proc/mounts"))
    assert (finding.grade, "4.0 GiB of pools configured" in finding.what) == (Grade.FAIL, True)
    assert "--shm-size" in finding.fix


def test_a_tiny_memory_file_system_is_a_failure_whatever_is_configured(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "1m") as folder:
        assert storage.of_shared_memory(Config(), folder, Path("/proc/mounts")).grade is Grade.FAIL


def test_a_pool_on_a_disk_and_a_folder_that_is_not_there_are_told(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nshm {tmp_path} tmpfs rw 0 0\ndisk {tmp_path}/disk xfs rw 0 0\n")
    (tmp_path / "disk/deep").mkdir(parents=True)
    assert storage.file_system(tmp_path / "disk/deep", mounts) == "xfs"
    assert storage.file_system(tmp_path, mounts) == "tmpfs"
    missing = storage.of_shared_memory(Config(), tmp_path / "nowhere", mounts)
    assert (missing.grade, "No such file" in missing.what) == (Grade.FAIL, True)


def group_of(tmp_path: Path, **files: str) -> Group:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "pod/app").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory")
    for name, text in files.items():
        (root / name.replace("__", "/").replace("_", ".")).write_text(text)
    own.write_text("0::/pod/app\n")
    return control_group(root, own)


def test_the_limits_of_all_control_groups_above_count(tmp_path: Path) -> None:
    files = {"pod__memory_max": str(2 * GIB), "pod__memory_current": str(GIB), "pod__app__memory_max": "max"}
    group = group_of(tmp_path, **files, pod__app__cpu_max="150000 100000", pod__cpu_max="max 100000")
    assert group == Group(2 * GIB, GIB, 1.5)
    config = Config(store=StoreConfig(pool_bytes=GIB), engine=EngineConfig(page_bytes=MIB))
    finding = limits.of_memory(config, 64 * GIB, group)
    assert (finding.grade, "raise the container's limit" in finding.fix) == (Grade.FAIL, True)
    assert "1.0 GiB of memory available (the control group's limit is 2.0 GiB)" in finding.what
    cores = limits.of_cores(Config(), 16, group)
    assert (cores.grade, "2 cores (of 16: the control group's quota)" in cores.what) == (Grade.WARN, True)


def test_cores_are_held_against_ranks() -> None:
    config = Config(engine=EngineConfig(tensor_parallel=2))
    assert (limits.of_cores(config, 6, Group()).grade, limits.of_cores(config, 5, Group()).grade) == (Grade.OK, Grade.WARN)
    assert limits.of_cores(config, 6, Group()).what == "6 cores for 3 workers of 6 ranks together"


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert control_group(tmp_path, tmp_path / "missing") == Group()
    assert limits.of_memory(Config(), 64 * GIB, Group()).grade is Grade.OK
    assert limits.of_memory(Config(), GIB, Group()).grade is Grade.WARN


def test_a_pool_without_a_size_of_its_own_is_told_to_take_half() -> None:
    config = Config(engine=EngineConfig(pages=0, page_bytes=GIB))
    assert "half of what is free" in limits.of_memory(config, 64 * GIB, Group()).what
    config = config.model_copy(update={"store": StoreConfig(pool_bytes=GIB)})
    assert "half" not in limits.of_memory(config, 64 * GIB, Group()).what


def test_a_folder_that_is_named_and_not_there_is_no_model_to_fetch(tmp_path: Path) -> None:
    (finding,) = storage.model(Config(model=ModelConfig(path=str(tmp_path / "gone"))))
    assert (finding.grade, "fetch" in finding.fix) == (Grade.FAIL, False)


def test_few_open_files_are_seen_by_a_process_that_has_few() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 8_192))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))

    code = (
        "from moonpool.cli.doctor import limits; from moonpool.core.config import Config\n"
        "print(*(f.grade + ' ' + f.what + ' ' + f.fix for f in (*limits.open_files(Config()), "
        "limits.of_locked_memory(Config(), 65536, rdma=True))), sep='\\n')"
    )
    done = subprocess.run((sys.executable, "-c", code), preexec_fn=lower, capture_output=True, text=True, check=True)
    files, locked = done.stdout.splitlines()
    assert files == "warn 512 open files allowed ulimit -n 8192"
    assert locked.startswith("fail locked memory: at most 0 MiB") and "memlock=-1" in locked


def test_locked_memory_matters_with_rdma_only() -> None:
    assert limits.of_locked_memory(Config(), MIB, rdma=False).grade is Grade.OK
    assert limits.of_locked_memory(Config(), None, rdma=True).grade is Grade.OK


def test_transparent_huge_pages_that_are_off_are_told(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("HugePages_Total:     8\nHugePages_Free:      3\nHugepagesize:       2048 kB\n")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    finding = limits.of_huge_pages(meminfo, tmp_path)
    assert (finding.grade, "3 of 8 free (2 MiB each)" in finding.what) == (Grade.WARN, True)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert limits.of_huge_pages(meminfo, tmp_path).grade is Grade.OK


def test_a_clock_that_was_never_set_or_is_not_kept_is_told() -> None:
    assert limits.of_clock(0.0, None).grade is Grade.FAIL
    assert limits.of_clock(limits.OLDEST + 1, limits.UNSYNCHRONISED).grade is Grade.WARN
    assert limits.of_clock(limits.OLDEST + 1, 0).grade is Grade.OK
    assert limits.clock_status() is not None


# versions, GPUs, RDMA, UCX


def test_packages_are_held_against_their_pins() -> None:
    installed = {"torch": "2.13.0+cpu", "ray": "2.9.0"}
    required = ["torch==2.13.0", "ray[default]==2.60.0", "grpcio==1.0", 'moto[server]==5.2.5 ; extra == "dev"', "loose>=1"]
    ray, grpcio, told = versions.packages(required, installed.get)
    assert (ray.grade, ray.fix) == (Grade.WARN, "pip install 'ray==2.60.0'")
    assert (grpcio.grade, "not installed" in grpcio.what) == (Grade.FAIL, True)
    assert told.what == "packages: torch 2.13.0+cpu, ray 2.9.0"
    assert versions.python_version((3, 10, 2)).grade is Grade.FAIL


@pytest.mark.parametrize(
    ("cuda", "seen", "listed", "grade", "named"),
    [
        ("", [], [], Grade.OK, "no GPU"),
        ("", [], ["NVIDIA H200, 580.1"], Grade.WARN, "install the CUDA build of torch 2.13.0 for driver 580.1"),
        ("12.8", [], ["NVIDIA H200, 470.2"], Grade.WARN, "--gpus all"),
        ("12.8", ["NVIDIA H200"], ["NVIDIA H200, 580.1"], Grade.OK, "GPUs: NVIDIA H200"),
        ("12.8", [], [], Grade.OK, "built for CUDA 12.8; no GPU"),
    ],
)
def test_torchs_build_is_held_against_the_gpus(cuda: str, seen: list[str], listed: list[str], grade: Grade, named: str) -> None:
    told = {"version": "2.13.0" + ("" if cuda else "+cpu"), "cuda": cuda, "gpus": seen}
    finding = devices.of_torch(told, listed)
    assert (finding.grade, named in f"{finding.what} {finding.fix}") == (grade, True), finding


@pytest.mark.parametrize(
    ("engine", "gpus", "triton", "grade", "named"),
    [
        ({}, ["H200"], "3.9.0", Grade.OK, "H200, with backend triton (3.9.0), K/V kept in the dtype of the model"),
        ({"kv_dtype": "fp8"}, ["H200"], "3.9.0", Grade.OK, "K/V kept as fp8"),
        ({}, ["H200"], "", Grade.WARN, "on the CPU beside a GPU, because the package triton is not installed"),
        ({"tensor_parallel": 2}, ["H200"], "3.9.0", Grade.WARN, "engine.tensor_parallel is 2, and torch sees 1 GPUs"),
        ({"tensor_parallel": 2}, ["H200", "H200"], "3.9.0", Grade.OK, "H200, with backend triton"),
        ({"device": "cpu"}, ["H200"], "3.9.0", Grade.OK, "on the CPU, without Triton's kernels: engine.device is cpu"),
        ({"backend": "fused"}, ["H200"], "3.9.0", Grade.OK, "engine.backend fused"),
        ({}, [], "", Grade.OK, "on the CPU, without Triton's kernels: torch sees no GPU"),
        ({"device": "cuda"}, [], "3.9.0", Grade.FAIL, "'cuda' cannot be used: torch sees no GPU"),
        ({"kv_dtype": "int8"}, [], "3.9.0", Grade.FAIL, "'int8' is for the backend triton"),
    ],
)
def test_where_workers_compute_and_why_not_with_triton(
    engine: dict[str, object], gpus: list[str], triton: str, grade: Grade, named: str
) -> None:
    told = {"version": "2.13.0", "cuda": "12.8", "gpus": gpus, "triton": triton}
    finding = devices.of_device(Config(engine=EngineConfig.model_validate(engine)), told)
    assert (finding.grade, named in finding.what) == (grade, True), finding


@pytest.mark.parametrize(
    ("backend", "dtype", "unfit", "grade", "named"),
    [
        ("auto", "bfloat16", "", Grade.OK, "compiled can serve"),
        ("auto", "bfloat16", "the CPU lacks avx512bf16", Grade.OK, "avx512bf16"),
        ("auto", "float32", "", Grade.OK, "model.dtype is float32"),
        ("compiled", "bfloat16", "the CPU lacks avx512bf16", Grade.FAIL, "engine.backend = auto"),
        ("compiled", "float32", "", Grade.FAIL, "engine.backend = auto"),
    ],
)
def test_the_backend_is_held_against_cpu_and_dtype(backend: str, dtype: str, unfit: str, grade: Grade, named: str) -> None:
    config = Config.model_validate({"engine": {"backend": backend}, "model": {"dtype": dtype}})
    (finding,) = devices.of_kernels(
        config, {"unfit": unfit, "matrix": {"has": False, "may": False}, "kept": True, "folder": "/k"}
    )
    assert (finding.grade, named in f"{finding.what} {finding.fix}") == (grade, True), finding


@pytest.mark.parametrize(
    ("has", "may", "named"),
    [(True, True, "a matrix unit (AMX), so"), (True, False, "denies"), (False, False, "AVX-512 bf16, so")],
)
def test_a_matrix_unit_is_told_and_whether_it_may_be_used(has: bool, may: bool, named: str) -> None:
    told = {"unfit": "", "matrix": {"has": has, "may": may}, "kept": True, "folder": "/k"}
    (finding,) = devices.of_kernels(Config(), told)
    assert (finding.grade, named in finding.what) == (Grade.OK, True), finding


def test_kernels_that_every_start_would_compile_anew_are_told() -> None:
    *_, kept = devices.of_kernels(
        Config(), {"unfit": "", "matrix": {"has": False, "may": False}, "kept": False, "folder": "/k"}
    )
    assert (kept.grade, "/k" in kept.what, "XDG_CACHE_HOME" in kept.fix) == (Grade.WARN, True, True)


def test_an_rdma_device_that_is_down_or_hidden_or_unused_is_told(tmp_path: Path) -> None:
    sysfs, verbs = tmp_path / "infiniband", tmp_path / "dev"
    (none,) = devices.of_rdma(Config(), sysfs, verbs, "tcp")
    assert none.grade is Grade.OK
    port = sysfs / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "1: DOWN"), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
        (port / name).write_text(text)
    down, hidden = devices.of_rdma(Config(), sysfs, verbs, "rc,tcp")
    assert (down.grade, hidden.grade) == (Grade.WARN, Grade.FAIL)
    (port / "state").write_text("4: ACTIVE")
    verbs.mkdir()
    (verbs / "uverbs0").touch()
    up, unused = devices.of_rdma(Config(), sysfs, verbs, "tcp")
    assert (up.what, unused.grade) == ("RDMA: mlx5_0:1 InfiniBand 400 Gb/sec (4X NDR)", Grade.WARN)
    assert [finding.grade for finding in devices.of_rdma(Config(), sysfs, verbs, "rc,ud,tcp")] == [Grade.OK]


def test_what_ucx_is_asked_for_is_held_against_what_it_has() -> None:
    there = [["self", "memory"], ["tcp", "lo"], ["tcp", "eth0"], ["rc_mlx5", "mlx5_0:1"]]
    told = {"version": "1.23.0", "there": there, "asked": [["tcp", "lo"]]}
    has, asked = devices.of_ucx(told, "rc,tcp", "mlx5_0:1")
    assert (has.grade, asked.grade) == (Grade.OK, Grade.OK)
    assert has.what == "UCX 1.23.0 has self (memory), tcp (eth0 lo), rc_mlx5 (mlx5_0:1)"
    _, missing, device = devices.of_ucx(told, "ud,tcp,sm", "eth1,lo")
    assert (missing.grade, "asks for ud, sm" in missing.what) == (Grade.WARN, True)
    assert (device.grade, "no device eth1" in device.what, "mlx5_0:1" in device.fix) == (Grade.FAIL, True, True)
    _, broken = devices.of_ucx({**told, "trouble": "No such device"}, "rc_mlx5", "")
    assert broken.grade is Grade.FAIL
    assert len(list(devices.of_ucx(told, "^ib", ""))) == 2


def test_ucx_itself_tells_its_transports_and_what_is_left_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    (has, asked, starts) = devices.ucx(Config())
    assert has.what.startswith("UCX 1.23.0 has ") and "tcp (" in has.what
    assert (asked.grade, starts.grade) == (Grade.OK, Grade.OK)
    assert ucx_look.resources("#      resource 12 :  md 1  dev 2  flags -- tcp/eth0\n# md 0 : component 0 self\n") == [
        ("tcp", "eth0")
    ]
    nothing = list(devices.ucx(Config(transfer=TransferConfig(ucx_tls="rc_mlx5"))))[1]
    assert nothing.grade is not Grade.OK


# storage


def test_the_ssd_folder_is_tried_with_direct_io(tmp_path: Path) -> None:
    config = Config(store=StoreConfig(ssd_path=str(tmp_path / "ssd/deep")))
    (finding,) = storage.ssd(config)
    assert finding.grade in (Grade.OK, Grade.WARN)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    (short,) = storage.ssd(Config(store=StoreConfig(ssd_path=str(tmp_path), ssd_bytes=1 << 50)))
    assert (short.grade, "lower store.ssd_bytes" in short.fix) == (Grade.FAIL, True)
    assert not list(storage.ssd(Config()))


def test_an_ssd_folder_on_a_full_file_system_is_a_failure(tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "64k") as folder:
        (folder / "filler").write_bytes(bytes(64 * 1024))
        (finding,) = storage.ssd(Config(store=StoreConfig(ssd_path=str(folder))))
    assert finding.grade in (Grade.FAIL, Grade.WARN)  # a kernel without direct I/O on tmpfs says so before it is full
    assert "space" in finding.what or "direct" in finding.what


def test_a_file_where_a_folder_should_be_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (finding,) = storage.ssd(Config(store=StoreConfig(ssd_path=str(file / "below"))))
    assert finding.grade is Grade.FAIL
    (shared,) = storage.shared_tier(Config(store=StoreConfig(shared_path=str(tmp_path / "nowhere"))))
    assert (shared.grade, "mount it on every host" in shared.fix) == (Grade.FAIL, True)
    (shared,) = storage.shared_tier(Config(store=StoreConfig(shared_path=str(tmp_path))))
    assert shared.grade is Grade.OK


def test_a_model_folder_without_weights_is_a_failure(tmp_path: Path) -> None:
    (away,) = storage.model(Config(model=ModelConfig(path="owner/not-here")))
    assert (away.grade, "model fetch" in away.fix) == (Grade.WARN, True)
    config = Config(model=ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (odd,) = storage.model(config)
    assert (odd.grade, "set model.max_context" in odd.fix) == (Grade.FAIL, True)
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
    (bare,) = storage.model(config)
    assert (bare.grade, "has no weights and no tokenizer" in bare.what) == (Grade.FAIL, True)


# the verb


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    """Of a configuration that needs neither Ray nor a cluster."""
    command = (sys.executable, "-m", "moonpool.cli.main", "doctor", "--set", "cluster.launcher=process", *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


def test_its_exit_code_and_its_json_tell_the_worst_of_it(tmp_path: Path) -> None:
    state = ("--set", f"cluster.state_dir={tmp_path}", "--set", "gateway.port=0")
    done = doctor("--json", *state, "--set", f"store.shared_path={tmp_path}/nowhere")
    told = json.loads(done.stdout)
    assert (done.returncode, told["worst"]) == (1, "fail"), done.stderr
    assert [row["check"] for row in told["findings"] if row["grade"] == "fail"] == ["shared tier"]
    assert all(bool(row["fix"]) == (row["grade"] != "ok") for row in told["findings"])
    assert told["seconds"].keys() == {check.name for check in checks.CHECKS}
    wrong = doctor("--set", "store.ssd=1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "store.ssd" in wrong.stderr
