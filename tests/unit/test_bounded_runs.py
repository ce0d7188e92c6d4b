"""A run of tests ends, whatever hangs in it, and says where it hung and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.bounds import CODE

SUPPORT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from support.bounds import Bounds

def pytest_configure(config):
    config.pluginmanager.register(Bounds(config, teardown_s=1, ending_s=1), "bounds")
"""
IN_TEARDOWN = """
import subprocess, threading, pytest

@pytest.fixture
def slow():
    child = subprocess.Popen(("sleep", "600"))
    print("child", child.pid, flush=True)
    yield
    threading.Event().wait()

def test_that_fails(slow):
    raise AssertionError
"""
AT_THE_END = """
import threading

def test_that_passes():
    threading.Thread(target=threading.Event().wait).start()
"""
CASES = {
    "teardown of a failed test": (IN_TEARDOWN, "teardown of test_it.py::test_that_fails", "in slow"),
    "a thread nobody ends": (AT_THE_END, "end of the session", "in _shutdown"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_hangs_is_named_and_ended(tmp_path: Path, case: str) -> None:
    code, where, frame = CASES[case]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(code)
    command = (sys.executable, "-m", "pytest", "-s", "-c", "/dev/null", f"--rootdir={tmp_path}", "-o", f"pythonpath={SUPPORT}")
    plugins = ("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:asyncio", "-p", "no:hypothesispytest")
    done = subprocess.run((*command, *plugins, str(tmp_path)), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == CODE, done.stdout + done.stderr
    assert f"past its bound: {where}" in done.stderr
    assert frame in done.stderr
    for line in done.stdout.splitlines():
        if "child " in line:
            assert not psutil.pid_exists(int(line.split("child ")[1]))
