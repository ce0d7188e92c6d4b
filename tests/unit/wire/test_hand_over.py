"""The fixed frame that goes with a process descriptor."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moonpool.core.errors import InvalidRequest
from moonpool.wire.frames import HAND_OVER_BYTES, decode_hand_over, encode_hand_over


@given(st.integers(0, 2**64 - 1))
def test_a_session_number_comes_back(session: int) -> None:
    frame = encode_hand_over(session)
    assert len(frame) == HAND_OVER_BYTES
    assert decode_hand_over(frame) == session


@given(st.binary(max_size=2 * HAND_OVER_BYTES))
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_hand_over(frame)
