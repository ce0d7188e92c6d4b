from __future__ import annotations

import grpc
import pytest

from moonpool.core import errors
from moonpool.core.errors import STATUS, AttemptFailed, Bug, Failure, MoonpoolError, Reason, Refused, UserError, error_for


def tree() -> list[type[MoonpoolError]]:
    out: list[type[MoonpoolError]] = []
    stack: list[type[MoonpoolError]] = [MoonpoolError]
    while stack:
        cls = stack.pop()
        if cls.__module__ == errors.__name__:
            out.append(cls)
        stack.extend(cls.__subclasses__())
    return out


def leaves() -> list[type[MoonpoolError]]:
    return [cls for cls in tree() if not any(sub in tree() for sub in cls.__subclasses__())]


def test_every_reason_has_a_status_and_exactly_one_class() -> None:
    assert set(STATUS) == set(Reason)
    assert sorted(cls.reason for cls in leaves()) == sorted(Reason)


def test_the_tree_in_the_module_text_is_the_tree() -> None:
    drawn = [line.replace("│", " ").split()[1] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert sorted(drawn) == sorted(cls.__name__ for cls in tree() if cls is not MoonpoolError)


@pytest.mark.parametrize("reason", list(Reason))
def test_statuses_are_real_and_say_whose_fault_it_is(reason: Reason) -> None:
    http, name = STATUS[reason]
    assert name in grpc.StatusCode.__members__
    assert 400 <= http < 600
    cls = type(error_for(reason, "m"))
    if issubclass(cls, Refused):
        assert http in (429, 503)
    if issubclass(cls, AttemptFailed):
        assert http == 503


@pytest.mark.parametrize("reason", list(Reason))
def test_errors_cross_a_wire_and_come_back(reason: Reason) -> None:
    there = error_for(reason, "why", retry_after_s=2.5, peer="prefill-0", param="field")
    assert (there.reason, there.http_status, there.grpc_status) == (reason, *STATUS[reason])
    failure = Failure.of(there)
    back = failure.to_exception()
    assert type(back) is type(there)
    assert (back.message, failure.reason) == ("why", reason)
    if isinstance(back, Refused):
        assert back.retry_after_s == 2.5
    if isinstance(back, AttemptFailed):
        assert back.peer == "prefill-0"
    if isinstance(there, UserError):
        assert there.param == "field"


def test_a_foreign_exception_becomes_a_bug_named_by_its_type() -> None:
    failure = Failure.of(KeyError("x"))
    assert failure.reason is Reason.BUG
    assert failure.message == "KeyError: 'x'"
    assert isinstance(failure.to_exception(), Bug)
