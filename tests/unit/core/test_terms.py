from __future__ import annotations

import pytest

from moonpool.core.errors import InvalidRequest
from moonpool.core.terms import Terms


def test_a_term_that_is_over_is_refused_wherever_the_newer_one_was_heard() -> None:
    terms = Terms()
    terms.check(4)
    terms.check(4)
    terms.heard(6)
    terms.heard(5)
    with pytest.raises(InvalidRequest, match="term: 5 is over, 6 has begun"):
        terms.check(5)
    terms.check(7)
    with pytest.raises(InvalidRequest, match="6 is over, 7 has begun"):
        terms.check(6)


def test_who_needs_no_leader_is_never_refused() -> None:
    terms = Terms()
    terms.heard(9)
    terms.check(0)
    assert terms.newest == 9
