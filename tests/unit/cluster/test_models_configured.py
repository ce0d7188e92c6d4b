"""Several models in one configuration: which names are good, and what a local cluster makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moonpool.cluster.configure import load_config
from moonpool.cluster.launch.plan import plan
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role

BIG = {"name": "big", "path": "/models/big", "aliases": ["gpt-4o"]}
NODES = [
    {"name": "a", "both": 1, "conductor": 1, "gateway": 1},
    {"name": "b", "model": "big", "prefill": 1, "decode": 1, "conductor": 1},
]


def loaded(settings: Mapping[str, Any]) -> Config:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return load_config(None, {}, texts)[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gateway.models": [{"name": "big"}]}, "has no path"),
        ({"gateway.models": [{"path": "/m/smollm2"}]}, "'smollm2' names two models"),
        ({"gateway.models": [BIG], "model.aliases": ["gpt-4o"]}, "'gpt-4o' names two models"),
        ({"gateway.models": [BIG], "model.adapters": {"gpt-4o": "/m/polite"}}, "'gpt-4o' names two models"),
        ({"gateway.models": [{**BIG, "aliases": [" x"]}]}, "' x' is no name of a model"),
        ({"model.adapters": {"": "/m/polite"}}, "'' is no name of a model"),
        ({"model.aliases": [""]}, "'' is no name of a model"),
        ({"gateway.models": [{**BIG, "pathh": "x"}]}, "did you mean path"),
        ({"cluster.nodes": NODES}, "node 'b' is of model 'big'; use one of smollm2"),
        ({"gateway.models": [BIG], "cluster.nodes": [NODES[0], {"name": "b", "model": "big", "both": 1}]},
         "no conductor of model 'big'"),
        ({"gateway.models": [BIG], "cluster.nodes": [NODES[0], {"name": "b", "model": "big", "conductor": 1, "decode": 1}]},
         "0 prefill, 1 decode and no `both` worker of model 'big' cannot answer"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_told_apart_or_served_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        loaded(settings)
    assert says in e.value.message


def test_processes_of_a_node_have_its_model_and_gateways_have_all() -> None:
    config = loaded({"gateway.models": [BIG], "cluster.nodes": NODES, "model.dtype": "float32"})
    specs = {s.member: s for stage in plan(config, registry="r:1", model_dir=Path("/m/first")) for s in stage}
    of = {str(name): (s.config.model_name, str(s.model_dir), s.config.model.dtype) for name, s in specs.items()}
    first, big = ("smollm2", "/m/first", "float32"), ("big", "/models/big", "bfloat16")
    assert of == {
        "store-a": first, "both-0": first, "conductor-0": first, "gateway-0": first,
        "store-b": big, "prefill-0": big, "decode-0": big, "conductor-1": big,
    }  # fmt: skip
    gateway = next(s for s in specs.values() if s.role is Role.GATEWAY)
    assert [model.served_name for model in gateway.config.models] == ["smollm2", "big"]
