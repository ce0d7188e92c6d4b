from __future__ import annotations

from typing import get_args

import pytest

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError
from moonpool.kvstore.eviction.make import make_policy

NAMES = get_args(StoreConfig.model_fields["eviction"].annotation)


@pytest.mark.parametrize("name", NAMES)
def test_every_configurable_name_makes_a_policy_of_that_name(name: str) -> None:
    assert make_policy(name).name == name


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'arc', which is none of .*lru"):
        make_policy("arc")
