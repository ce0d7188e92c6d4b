from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from moonpool.core.config import ClusterConfig, Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import RequestId, checked_name
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.request import Attempt, Request, SamplingParams


def sections() -> list[type[BaseModel]]:
    return [type(value) for value in (getattr(Config(), name) for name in Config.model_fields) if isinstance(value, BaseModel)]


def test_defaults_are_valid_and_their_sections_complete() -> None:
    config = Config()
    assert Config.model_validate(config.model_dump()) == config
    assert len(sections()) == len(Config.model_fields)


@pytest.mark.parametrize("section", sections(), ids=lambda cls: cls.__name__)
def test_unknown_keys_are_refused_and_values_are_frozen(section: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"no_such_key": 1})
    field = next(iter(section.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section(), field, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"block_tokens": 8}},
        {"engine": {"block_tokens": 1_024}},
        {"engine": {"growth_reserve": 1.0}},
        {"gateway": {"port": 70_000}},
        {"transfer": {"carrier": "pigeon"}},
        {"timing": {"max_attempts": 0}},
        {"model": {"dtype": "int8"}},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate(values)


def test_names_and_folders_follow_from_the_values(tmp_path: Path) -> None:
    home = tmp_path
    assert Config().model_name == "smollm2"
    assert Config(model=ModelConfig(path="/data/models/Llama/")).model_name == "Llama"
    assert Config(model=ModelConfig(path="/data/x", name="mine")).model_name == "mine"
    assert Config().state_dir(home) == home / ".cache/moonpool/clusters/moonpool"
    assert Config().key_file(home) == home / ".config/moonpool/hash.key"
    chosen = Config(cluster=ClusterConfig(state_dir="/s", key_file="/k"), engine=EngineConfig())
    assert (chosen.state_dir(home), chosen.key_file(home)) == (Path("/s"), Path("/k"))


@pytest.mark.parametrize("name", ["a", "prefill-0", "Node_1.rack", "9", "a" * 63])
def test_names_that_fit_files_labels_and_actors_pass(name: str) -> None:
    assert checked_name(name, "node") == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a b", "a\n", "ü", "a" * 64, "../etc"])
def test_other_names_are_refused_by_field(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^node: ") as caught:
        checked_name(name, "node")
    assert caught.value.param == "node"


def test_a_latency_is_the_difference_of_two_instants_and_the_first_stamp_stays() -> None:
    life = Lifetime()
    life.stamp(Instant.ARRIVED, 10.0)
    life.stamp(Instant.FIRST_TOKEN, 10.5)
    life.stamp(Instant.FIRST_TOKEN, 99.0)
    assert life.between(Instant.ARRIVED, Instant.FIRST_TOKEN) == 0.5
    assert life.between(Instant.ARRIVED, Instant.FINISHED) is None


def test_the_context_of_an_attempt_is_the_prompt_and_what_was_emitted() -> None:
    request = Request(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=4), bytes(16), ())
    assert Attempt(request, 2, emitted=(7, 8)).context == (1, 2, 3, 7, 8)
