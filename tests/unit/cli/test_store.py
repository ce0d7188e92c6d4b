"""``moonpool store`` against two real store nodes and their registry, found as the verbs find a cluster."""

from __future__ import annotations

import json
import os
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
from moonpool.cli.main import _Choices, build
from moonpool.cluster.gateway.tokenizer import Tokenizer
from moonpool.core.blocks import BlockHasher, key_id, load_hash_key, namespace
from moonpool.core.errors import MoonpoolError

KEYS = block_keys("k", 5)
HEX = ",".join(key.hex() for key in KEYS)


class Shell:
    """Types commands at a cluster; ``stdin`` decides whether the verbs believe that somebody sits there."""

    def __init__(self, cluster: StoreCluster, beside: Beside, home: Path) -> None:
        self.cluster, self.beside = cluster, beside
        self._app = build(_Choices())
        self._env = {"HOME": str(home), "MOONPOOL_CLUSTER_REGISTRY": cluster.registry}

    def __call__(self, *words: str, typed: str = "") -> Result:
        return CliRunner().invoke(self._app, ["store", *words], env=self._env, input=typed)

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
    assert [one["blocks_findable"] for one in shell.json("stats")] == [0, 5]


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
    assert shell.json("unpin", "--tenant", "alice", "--keys", HEX, "--node", "a")[0]["held"] == 5
    assert shell("clear", "--everything", "--node", "a").exit_code == 0


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as watching:
        try:
            assert watching.stdout is not None
            assert watching.stdout.readline().split() == ["a", "live"]
            assert watching.stdout.readline().split() == ["a", "holds", "g2", "2", "blocks"]
            shell.publish("a", KEYS[2:], KEYS[1])
            said = watching.stdout.readline().split()
            assert said[:5] == ["a", "stored", "g2", "3", "blocks"]
            assert said[5:] == [key.hex() for key in KEYS[2:]]
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 0


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("lookup",), "exactly one of --keys and --prompt"),
    (("lookup", "--keys", "xyz"), "--keys: 'xyz' is no block key; one has 32 hex digits"),
    (("lookup", "--keys", "@missing.txt"), "--keys: cannot read missing.txt"),
    (("lookup", "--keys", HEX, "--node", "z"), "--node: 'z' is no live store node; use one of a, b"),
    (("copy", "--keys", HEX, "--from", "a", "--to", "a"), "--to: 'a' is the source, too"),
    (("copy", "--keys", HEX, "--from", "q", "--to", "a"), "node: 'q' is no live store node"),
    (("drain", "--node", "q"), "node: 'q' is no live store node"),
    (("clear",), "exactly one of --keys, --prompt, --model, --tenant, --everything"),
    (("clear", "--everything", "--tenant", "t"), "exactly one of"),
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
