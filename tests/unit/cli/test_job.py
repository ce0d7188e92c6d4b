from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moonpool.cluster.models import JOB_CONFIG


def moonpool(*words: str, job: bool) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != JOB_CONFIG}
    return subprocess.run(
        (sys.executable, "-m", "moonpool.cli.main", *words),
        env={**variables, **({JOB_CONFIG: "{}"} if job else {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("words", "code"), [(("version",), 0), (("config", "show", "--set", "gateway.port=x"), 2)])
def test_a_ray_job_ends_with_its_exit_code_and_nothing_else_does(words: tuple[str, ...], code: int) -> None:
    told = moonpool(*words, job=True)
    assert told.returncode == code
    assert told.stdout.splitlines()[-1] == f"moonpool: exit code {code}"
    plain = moonpool(*words, job=False)
    assert plain.returncode == code
    assert "exit code" not in plain.stdout
