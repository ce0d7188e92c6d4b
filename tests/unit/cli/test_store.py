"""``moonpool store`` against two real store nodes and their registry, found as the verbs find a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.registered_stores import Beside, StoreCluster, store_cluster_beside
from support.store import LAYOUT, block_keys
from support.tiny_tokenizer import write_tiny_model
from typer.testing import CliRunner, Result

from moonpool.cli import store_calls
from moonpool.cli.main import Choices, build
from moonpool.cluster.gateway.tokenizer import Tokenizer
from moonpool.cluster.launch.state import ClusterState, ProcessRecord, StateDir
from moonpool.core.blocks import BlockHasher, key_id, load_hash_key, namespace
from moonpool.core.errors import MoonpoolError
from moonpool.kvstore.codecs.copies import LOSSY

KEYS = block_keys("k", 5)
HEX = ",".join(key.hex() for key in KEYS)


class Shell:
    """Types commands at a cluster; ``stdin`` decides whether the verbs believe that somebody sits there."""

    def __init__(self, cluster: StoreCluster, beside: Beside, home: Path) -> None:
        self.cluster, self.beside = cluster, beside
        self._app = build(Choices())
        self._home, self.named = str(home), cluster.registry

    def __call__(self, *words: str, typed: str = "") -> Result:
        return self.top("store", *words, typed=typed)

    def top(self, *words: str, typed: str = "") -> Result:
        env = {"HOME": self._home, "MOONPOOL_CLUSTER_REGISTRY": self.named or None}
        return CliRunner().invoke(self._app, list(words), env=env, input=typed)

    def json(self, *words: str, code: int = 0) -> list[dict[str, object]]:
        done = self(*words, "--json")
        assert done.exit_code == code, done.output
        answer: list[dict[str, object]] = json.loads(done.stdout[done.stdout.index("[\n") :])  # after the nodes' own log
        return answer

    def publish(self, node: str, keys: list[bytes] = KEYS, parent: bytes | None = None) -> None:
        self.beside.run(self.cluster.publish(node, keys, parent))

    def leading(self) -> list[object]:
        done = self("lookup", "--keys", HEX, "--json")
        return [one["leading"] for one in json.loads(done.stdout)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with store_cluster_beside(tmp_path) as (cluster, beside):
        yield Shell(cluster, beside, tmp_path)


def test_lookup_prints_a_line_a_node_or_a_line_a_block(shell: Shell) -> None:
    shell.publish("a", KEYS[:2])
    done = shell("lookup", "--keys", HEX)
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["node", "asked", "leading", "found"],
        ["a", "5", "2", "2"],
        ["b", "5", "0", "0"],
    ]
    lines = shell("lookup", "--keys", HEX, "--blocks").stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["a", str(i), key.hex(), "g2"] for i, key in enumerate(KEYS[:2])]
    assert shell("lookup", "--node", "b", "--keys", HEX).exit_code == 1


def test_keys_come_from_options_and_files(shell: Shell, tmp_path: Path) -> None:
    shell.publish("a")
    file = tmp_path / "keys.txt"
    file.write_text("\n".join(key.hex() for key in KEYS[2:]))
    found = shell.json("lookup", "--keys", f"{KEYS[0].hex()} {KEYS[1].hex()}", "--keys", f"@{file}")
    assert [one["leading"] for one in found] == [5, 0]


def test_copy_then_move_then_clear_say_what_they_did(shell: Shell) -> None:
    shell.publish("a")
    assert shell.json("copy", "--keys", HEX, "--from", "a", "--to", "b", "--dry-run")[0]["brought"] == 5
    assert shell.leading() == [5, 0]
    done = shell.json("copy", "--keys", HEX, "--from", "a", "--to", "b")
    assert (done[0]["node"], done[0]["brought"], done[0]["carrier"]) == ("b", 5, "memory")
    assert shell.leading() == [5, 5]
    moved = shell.json("move", "--keys", HEX, "--from", "a", "--to", "b")
    assert [(one["node"], one.get("cleared")) for one in moved] == [("b", None), ("a", 5)]
    assert shell.leading() == [0, 5]
    plan = shell.json("clear", "--everything", "--dry-run")
    assert [(one["cleared"], one["bytes"]) for one in plan] == [(0, 0), (5, 5 * LAYOUT.slot_bytes)]
    assert shell.leading() == [0, 5]
    assert shell("clear", "--everything", "--node", "b").exit_code == 0
    assert shell("lookup", "--keys", HEX).exit_code == 1


def test_a_copy_of_what_nobody_has_is_not_done(shell: Shell) -> None:
    done = shell.json("copy", "--keys", HEX, "--from", "a", "--to", "b", code=1)
    assert (done[0]["wanted"], done[0]["blocks"]) == (0, 0)


@pytest.mark.parametrize(("typed", "left"), [("n\n", 5), ("y\n", 0)])
def test_on_a_terminal_the_plan_is_shown_and_agreed_to(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    monkeypatch.setattr(store_calls, "somebody_is_there", lambda: True)
    shell.publish("a")
    done = shell("clear", "--everything", typed=typed)
    assert "cleared" in done.stdout
    assert "Do this?" in done.output
    assert done.exit_code == (1 if left else 0)
    assert shell.leading()[0] == left


def test_yes_asks_nothing_on_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "somebody_is_there", lambda: True)
    shell.publish("a")
    assert "Do this?" not in shell("clear", "--everything", "--yes").output
    assert shell.leading()[0] == 0


def test_stats_print_the_main_figures_of_each_node_or_all_of_them(shell: Shell) -> None:
    shell.publish("b")
    lines = [line.split() for line in shell("stats").stdout.splitlines()[:3]]
    assert [dict(zip(lines[0], line, strict=False))["blocks_findable"] for line in lines[1:]] == ["0", "5"]
    full = shell("stats", "--full", "--node", "b").stdout
    assert f"layout{' ' * 27}{LAYOUT.fingerprint}" in full
    told = shell.json("stats")
    assert [one["blocks_findable"] for one in told] == [0, 5]
    assert all(not isinstance(value, float) or not value.is_integer() for value in told[1].values())
    names = [name for name in told[1] if name not in ("node", "rows")]
    assert names == sorted(names)
    assert shell.json("pin", "--tenant", "alice", "--keys", KEYS[0].hex(), "--node", "b")[0]["held"] == 1
    lines = [re.split("  +", line) for line in shell("stats", "--node", "b").stdout.splitlines()[:2]]
    main = dict(zip(*lines, strict=True))
    assert (main["held_soft_blocks"], main["held_hard_blocks"]) == ("1", "0")


def test_a_node_that_is_drained_gives_others_what_only_it_holds_and_takes_nothing_new(shell: Shell) -> None:
    shell.publish("a")
    done = shell.json("drain", "--node", "a")
    assert (done[0]["node"], done[0]["blocks_saved"], done[0]["blocks_left"]) == ("a", 5, 0)
    assert shell.leading() == [5, 5]
    other = block_keys("n", 2)
    shell.publish("b", other)
    assert shell("copy", "--keys", ",".join(key.hex() for key in other), "--from", "b", "--to", "a").exit_code == 1


def test_pins_and_quotas_are_made_shown_and_ended(shell: Shell) -> None:
    shell.publish("a")
    assert [one["held"] for one in shell.json("pin", "--tenant", "alice", "--hard", "--keys", HEX)] == [5, 0]
    lines = shell("lookup", "--keys", HEX, "--blocks", "--node", "a").stdout.splitlines()
    assert all("hard" in line for line in lines[1:])
    assert shell("clear", "--everything", "--node", "a").exit_code == 1
    done = shell("pin", "--tenant", "bob", "--keys", HEX, "--node", "a")
    assert done.exit_code == 1
    assert "store.soft_pin_share allows" in done.stderr
    assert shell.json("quota", "--tenant", "alice", "--bytes", "1 MiB")[1]["used"] == 0
    rows = [line.split() for line in shell("quota", "--node", "a").stdout.splitlines()]
    assert rows[0] == ["node", "tenant", "blocks", "used", "quota", "soft", "hard"]
    assert rows[1][:2] == ["a", "alice"]
    assert shell.json("unpin", "--tenant", "alice", "--keys", HEX, "--node", "a")[0]["released"] == 5
    assert shell("clear", "--everything", "--node", "a").exit_code == 0


def test_a_quota_that_was_set_is_said_and_so_is_one_above_the_pool(shell: Shell) -> None:
    pool = shell.cluster.nodes["a"].pool.slots.total_bytes
    done = shell("quota", "--tenant", "alice", "--bytes", "64 KiB", "--node", "a")
    first = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert first[0] == ["node", "quota", "before", "used", "above", "pool_bytes"]
    assert first[1][:4] == ["a", "64", "KiB", "none"]
    assert "above its whole pool" not in done.stderr
    assert shell.json("quota", "--tenant", "alice", "--bytes", str(pool + 1))[0]["before"] == 64 << 10
    done = shell("quota", "--tenant", "alice", "--bytes", str(pool + 1), "--node", "a")
    assert (done.exit_code, "node a: the quota is above its whole pool" in done.stderr) == (0, True)
    assert " none " in shell("quota", "--tenant", "alice", "--bytes", "0", "--node", "a").stdout.splitlines()[-1]


def test_what_is_not_there_is_no_success(shell: Shell) -> None:
    shell.publish("a")
    unknown = block_keys("z", 1)[0].hex()
    for by in (("--tenant", "nobody"), ("--model", "nomodel"), ("--keys", unknown)):
        done = shell("clear", *by, "--yes")
        assert done.exit_code == 1
        assert "nothing was found" in done.stderr
    assert shell("unpin", "--tenant", "nobody", "--keys", HEX).exit_code == 1
    assert shell("clear", "--tenant", "default").exit_code == 0
    assert shell("clear", "--everything").exit_code == 0


def test_a_registry_that_is_named_wins_over_the_cluster_that_runs_here(shell: Shell, tmp_path: Path) -> None:
    shell.publish("a")
    with subprocess.Popen((sys.executable, "-c", "import sys; sys.stdin.read()"), stdin=subprocess.PIPE) as supervisor:
        local = ClusterState(ProcessRecord.of(supervisor.pid), "moonpool", "process", "127.0.0.1:1", "ready", "http://here")
        StateDir.create(tmp_path / ".cache" / "moonpool" / "clusters" / "moonpool").write(local)
        file = tmp_path / "named.toml"
        file.write_text(f'[cluster]\nregistry = "{shell.cluster.registry}"\n')
        assert shell.leading() == [5, 0]  # named by the environment
        shell.named = ""
        for naming in (("--config", str(file)), ("--set", f"cluster.registry={shell.cluster.registry}")):
            assert shell.json("lookup", "--keys", HEX, *naming)[0]["leading"] == 5
            told = json.loads(shell.top("status", "--json", *naming).stdout)
            assert (told["registry"], told["url"]) == (shell.cluster.registry, "")
            refused = [shell.top(*words, *naming).exception for words in (("down",), ("chat", "hi"), ("explain", "x"))]
            assert all(isinstance(e, MoonpoolError) for e in refused)
            for e, said in zip(refused, ("stops only what runs here", "knows no live gateway", "conductor: none"), strict=True):
                assert said in str(e)
        elsewhere = shell("lookup", "--keys", HEX).exception
        assert "127.0.0.1:1 does not answer" in str(elsewhere)
        assert supervisor.poll() is None
        supervisor.communicate(timeout=10)


def test_help_names_the_codecs_that_are_offered(shell: Shell) -> None:
    for codec in LOSSY:
        assert codec in shell("compress", "--help").stdout


def test_prompts_are_named_as_a_gateway_names_them(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "toy")
    key_file, prompt = tmp_path / "hash.key", tmp_path / "prompt.txt"
    hash_key = load_hash_key(key_file)
    hasher = BlockHasher(hash_key, namespace(LAYOUT), LAYOUT.block_tokens)
    text = "What a store holds, it holds by name. " * 2
    prompt.write_text(text)
    keys = hasher.keys(Tokenizer.load(model).encode(text))
    assert len(keys) >= 4
    ours = ("--set", f"model.path={model}", "--set", f"cluster.key_file={key_file}")
    with store_cluster_beside(tmp_path, hash_key_id=key_id(hash_key)) as (cluster, beside):
        shell = Shell(cluster, beside, tmp_path)
        shell.publish("a", keys)
        for given in (text, f"@{prompt}"):
            assert shell.json("lookup", "--prompt", given, *ours)[0]["leading"] == len(keys)
        assert shell.json("lookup", "--chat", "--prompt", text, *ours, code=1)[0]["leading"] == 0
        assert shell.json("clear", "--prompt", text[:40], *ours, "--node", "a")[0]["cleared"] == len(keys) - 1
        (tmp_path / "other.key").write_bytes(bytes(32))
        for wrong, said in [
            (("--prompt", "short", *ours), "fill no block of 16"),
            (("--prompt", text, *ours, "--set", f"cluster.key_file={tmp_path / 'other.key'}"), "holds another hash key"),
            (("--prompt", text, *ours, "--set", "cluster.key_file=/missing/hash.key"), "there is no hash key in"),
            (("--prompt", text, *ours, "--set", "model.name=other"), "'other' is not served here, toy is"),
        ]:
            done = shell("lookup", *wrong)
            assert isinstance(done.exception, MoonpoolError), done.output
            assert said in done.exception.message


def test_watch_prints_events_until_it_is_interrupted(shell: Shell, tmp_path: Path) -> None:
    shell.publish("a", KEYS[:2])
    env = {**os.environ, "HOME": str(tmp_path), "MOONPOOL_CLUSTER_REGISTRY": shell.cluster.registry}
    command = [sys.executable, "-m", "moonpool.cli.main", "store", "watch", "--node", "a"]
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would a child
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as watching:
        try:
            assert watching.stdout is not None
            assert watching.stdout.readline().split() == ["a", "live"]
            assert watching.stdout.readline().split() == ["a", "holds", "g2", "2", "blocks"]
            shell.publish("a", KEYS[2:], KEYS[1])
            said = watching.stdout.readline().split()
            assert said[:5] == ["a", "stored", "g2", "3", "blocks"]
            assert said[5:] == [key.hex() for key in KEYS[2:]]
            other = block_keys("n", 1)
            shell.publish("a", other)
            assert watching.stdout.readline().split() == ["a", "stored", "g2", "1", "block", other[0].hex()]
            watching.send_signal(signal.SIGINT)
            assert watching.wait(10) == 0
        finally:
            signal.signal(signal.SIGINT, ours)
            watching.kill()


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("lookup",), "exactly one of --keys and --prompt"),
    (("lookup", "--keys", "xyz"), "--keys: 'xyz' is no block key; one has 32 hex digits"),
    (("lookup", "--keys", "@missing.txt"), "--keys: cannot read missing.txt"),
    (("lookup", "--keys", HEX, "--node", "z"), "--node: 'z' is no live store node; use one of a, b"),
    (("copy", "--keys", HEX, "--from", "a", "--to", "a"), "--to: 'a' is the source, too"),
    (("copy", "--keys", HEX, "--from", "q", "--to", "a"), "--from: 'q' is no live store node"),
    (("move", "--keys", HEX, "--from", "a", "--to", "q"), "--to: 'q' is no live store node"),
    (("copy", "--keys", HEX, "--from", "a", "--to", "b", "--seconds", "-1"), "--seconds: -1 is no time limit"),
    (("drain", "--node", "a", "--seconds", "nan"), "--seconds: nan is no time limit"),
    (("drain", "--node", "q"), "--node: 'q' is no live store node"),
    (("lookup", "--keys", ""), "--keys: there is no key in it"),
    (("lookup", "--keys", HEX, "--keys", HEX), f"--keys: {KEYS[0].hex()} is there twice"),
    (("lookup", "--keys", HEX, "--chat"), "--chat: it says how --prompt is meant, and there is none"),
    (("lookup", "--prompt", "@"), "--prompt: no path follows the @"),
    (("pin", "--tenant", "", "--keys", HEX), "tenant: it is empty"),
    (("unpin", "--tenant", "t" * 300, "--keys", HEX), "tenant: 300 characters; at most 256"),
    (("compress", "--codec", "zip", "--keys", HEX), "codec: 'zip' is no lossy codec; use one of fp8, int8"),
    (("compress", "--codec", "raw", "--keys", HEX), "codec: 'raw' is no lossy codec"),
    (("compress", "--codec", "int8", "--keys", HEX), "allows none, not 'int8'"),
    (("clear", "--model", "toy", "--chat"), "--chat: it says how --prompt is meant"),
    (("clear", "--tenant", "", "--everything"), "exactly one of"),
    (("clear", "--tenant", ""), "--tenant: it is empty"),
    (("clear", "--tenant", "t" * 300), "tenant: 300 characters; at most 256"),
    (("clear", "--keys", ""), "--keys: there is no key in it"),
    (("clear",), "exactly one of --keys, --prompt, --model, --tenant, --everything"),
    (("clear", "--everything", "--tenant", "t"), "exactly one of"),
    (("quota", "--tenant", "default", "--bytes", "1 MiB"), "has no quota; name another"),
    (("quota", "--tenant", "", "--bytes", "1 MiB"), "tenant: it is empty"),
    (("quota", "--tenant", "t", "--bytes", "9999999 TiB"), "is above what any pool has"),
    (("quota", "--tenant", "t"), "give --tenant and --bytes to set one"),
    (("quota", "--tenant", "t", "--bytes", "lots"), "--bytes: 'lots' is no size"),
]


def test_a_mistake_names_what_is_wrong_and_changes_nothing(shell: Shell) -> None:
    shell.publish("a")
    for words, named in MISTAKES:
        done = shell(*words)
        assert isinstance(done.exception, MoonpoolError), done.output
        assert named in done.exception.message
    assert shell.leading() == [5, 0]
