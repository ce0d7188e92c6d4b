from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.configure import all_keys, describe, load_config, sections, variable_of
from moonpool.cluster.consistent import COMPILED_TILE
from moonpool.cluster.deciding import policy_of
from moonpool.core.config import Config, EngineConfig, SchedulerConfig
from moonpool.core.errors import ConfigError
from moonpool.scheduler.policies.moonpool import Moonpool


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "moonpool.toml"
    path.write_text(text)
    return path


def test_without_any_source_everything_is_the_default() -> None:
    config, origins = load_config(None, {}, {})
    assert config == Config()
    assert set(origins.values()) == {"default"}
    assert set(origins) == set(all_keys())


def test_file_is_overruled_by_environment_and_that_by_the_command_line(tmp_path: Path) -> None:
    file = _file(tmp_path, "[gateway]\nport = 1000\nhost = '0.0.0.0'\nmax_body_bytes = 4096\n")
    env = {"MOONPOOL_GATEWAY_PORT": "2000", "MOONPOOL_GATEWAY_HOST": "::1", "PATH": "/bin"}
    config, origins = load_config(file, env, {"gateway.port": "3000"})
    assert (config.gateway.port, config.gateway.host, config.gateway.max_body_bytes) == (3000, "::1", 4096)
    assert origins["gateway.port"] == "command line"
    assert origins["gateway.host"] == "environment MOONPOOL_GATEWAY_HOST"
    assert origins["gateway.max_body_bytes"] == f"file {file}"


@given(st.sampled_from(all_keys()), st.sampled_from(all_keys()))
def test_no_two_keys_share_an_environment_variable(one: str, other: str) -> None:
    assert (variable_of(one) == variable_of(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gatway]\nport = 1\n", "gateway"),
        ("[gateway]\nprot = 1\n", "gateway.port"),
        ("[[cluster.nodes]]\nname = 'a'\nprefil = 1\n", "prefill"),
    ],
)
def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {named}\?"):
        load_config(_file(tmp_path, text), {}, {})


def test_an_unknown_variable_or_override_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean MOONPOOL_GATEWAY_PORT\?"):
        load_config(None, {"MOONPOOL_GATEWAY_PROT": "1"}, {})
    with pytest.raises(ConfigError, match=r"did you mean engine\.threads\?"):
        load_config(None, {}, {"engine.thread": "1"})


def test_variables_of_tests_and_scripts_are_no_configuration() -> None:
    config, _ = load_config(None, {"MOONPOOL_TRACES": "x", "MOONPOOL_CRDS": "y", "MOONPOOL_TEST_MODEL": "z"}, {})
    assert config == Config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gateway.port", "70000"),
        ("gateway.port", "http"),
        ("engine.block_tokens", "8"),
        ("engine.growth_reserve", "nan"),
        ("engine.poison", "perhaps"),
        ("transfer.carrier", "pigeon"),
        ("cluster.ray_gpus_per_worker", "inf"),
        ("store.demote_below", "nan"),
        ("cluster.nodes", "a,b"),
        ("cluster.nodes", '[{"name": "a"}]'),
        ("cluster.nodes", '[{"name": "a", "both": 1, "conductor": 1, "gateway": 1}, {"name": "a"}]'),
        ("cluster.nodes", '[{"name": "../a", "both": 1, "conductor": 1, "gateway": 1}]'),
        ("cluster.name", "two words"),
        ("timing.silent_after_ms", "300"),
        ("store.quotas", '{"alice": -1}'),
    ],
)
def test_a_bad_value_is_refused_naming_key_and_value(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {key: value})
    assert key.split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("security.https_cert", "cert.pem", "security.https_key: missing"),
        ("security.https_key", "key.pem", "security.https_cert: missing"),
        ("security.tls", "files", "security.tls_dir: missing; .*certs make"),
    ],
)
def test_what_goes_together_is_asked_for_by_name(key: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, {}, {key: value})


def test_a_boolean_where_the_file_needs_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.port: true"):
        load_config(_file(tmp_path, "[gateway]\nport = true\n"), {}, {})


def test_a_missing_or_malformed_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml", {}, {})
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(_file(tmp_path, "= 3"), {}, {})
    with pytest.raises(ConfigError, match=r"write \[gateway\]"):
        load_config(_file(tmp_path, "gateway = 3"), {}, {})


@given(st.integers(1, 4096), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_sizes_carry_units(count: int, unit: str) -> None:
    config, _ = load_config(None, {"MOONPOOL_STORE_POOL_BYTES": f"{count} {unit}"}, {})
    assert config.store.pool_bytes == count * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


@pytest.mark.parametrize("text", ["lots", "2 GB", "1.5"])
def test_a_malformed_size_is_refused_naming_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"store\.pool_bytes: '{text}' \(command line\) is no size; .*KiB, MiB, GiB"):
        load_config(None, {}, {"store.pool_bytes": text})


def test_quotas_carry_units(tmp_path: Path) -> None:
    config, _ = load_config(None, {}, {"store.quotas": '{"alice": "1GiB", "bob": 7}'})
    assert config.store.quotas == {"alice": 1 << 30, "bob": 7}
    assert load_config(_file(tmp_path, 'store.quotas = {alice = "2 MiB"}'), {}, {})[0].store.quotas == {"alice": 2 << 20}
    with pytest.raises(ConfigError, match=r"store\.quotas\[alice\]: 'lots' \(command line\) is no size; .*KiB, MiB, GiB"):
        load_config(None, {}, {"store.quotas": '{"alice": "lots"}'})
    with pytest.raises(ConfigError, match=r"store\.quotas: 'default' is whoever names no tenant"):
        load_config(None, {}, {"store.quotas": '{"default": 7}'})


def test_rates_carry_units_too() -> None:
    config, _ = load_config(None, {}, {"transfer.throttle_bytes_per_s": "1.5 MiB"})
    assert config.transfer.throttle_bytes_per_s == 1.5 * (1 << 20)


def test_every_value_shown_can_be_given_back_on_the_command_line() -> None:
    config, origins = load_config(None, {}, {"gateway.port": "1234", "engine.poison": "true", "model.name": "m"})
    shown = {key: value.strip('"') if key != "cluster.nodes" else value for key, value, _ in describe(config, origins)}
    again, _ = load_config(None, {}, shown)
    assert again == config


def test_ucx_transports_other_than_tcp_are_refused_between_nodes_of_one_machine() -> None:
    with pytest.raises(ConfigError, match="ucx_tls"):
        load_config(None, {}, {"transfer.ucx_tls": "all"})


def test_every_section_is_frozen_and_refuses_unknown_keys() -> None:
    for values in sections().values():
        assert values.model_config["frozen"] is True
        assert values.model_config["extra"] == "forbid"


def test_the_compiled_backend_is_refused_before_any_model_is_loaded_where_its_numbers_do_not_fit() -> None:
    def load(**values: str) -> None:
        load_config(None, {}, {"engine.backend": "compiled", **{k.replace("__", "."): v for k, v in values.items()}})

    load()
    load(engine__block_tokens=str(3 * COMPILED_TILE))
    load(engine__backend="auto", model__dtype="float32", engine__block_tokens="24")
    with pytest.raises(ConfigError, match=r"engine\.backend: 'compiled' computes bfloat16.* of 'smollm2' is float32; use auto"):
        load(model__dtype="float32")
    with pytest.raises(ConfigError, match=r"engine\.backend: .* of 'other' is float32"):
        load(gateway__models='[{"path": "other", "dtype": "float32"}]')
    with pytest.raises(ConfigError, match=r"engine\.block_tokens: 24 is not a multiple of 16"):
        load(engine__block_tokens="24")


def test_a_policy_and_its_numbers_come_from_any_source(tmp_path: Path) -> None:
    file = _file(tmp_path, "[scheduler]\npolicy = 'local_min_ttft'\n[scheduler.admission_settings]\nchance = 0.02\n")
    config, _ = load_config(file, {"MOONPOOL_SCHEDULER_ORDER": "shortest"}, {"scheduler.policy_settings": "{}"})
    assert (config.scheduler.policy, config.scheduler.order) == ("local_min_ttft", "shortest")
    assert config.scheduler.admission_settings == {"chance": 0.02}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("scheduler.policy", "clairvoyant", "'clairvoyant' is none of"),
        ("scheduler.admission", "bouncer", "'bouncer' is none of"),
        ("scheduler.policy_settings", '{"lookahed_s": 1}', "moonpool has no 'lookahed_s'; it has"),
        ("scheduler.admission_settings", '{"chance": -1}', "chance is -1"),
        ("scheduler.admission_settings", '{"chance": 25}', "chance is 25.0; give 0 to 1"),
        ("scheduler.planner_settings", '{"triger": 1}', "scheduler.planner_settings: .*'triger'"),
        ("scheduler.planner_settings", '{"hold_s": -1}', "scheduler.planner_settings: hold_s is -1"),
        ("scheduler.policy_settings", '{"age": "old"}', "scheduler.policy_settings"),
        ("scheduler.order", "random", "scheduler.order"),
    ],
)
def test_a_policy_that_does_not_exist_or_has_no_such_number_is_refused_by_name(key: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, {}, {key: value})


def test_a_live_conductor_binds_a_little_before_a_worker_is_free_unless_told_otherwise() -> None:
    assert policy_of(SchedulerConfig()) == Moonpool(lookahead_s=0.03, lookahead_both_s=0.2)
    colocating = policy_of(SchedulerConfig(colocate=True), EngineConfig(prefill_chunk=256, gap_ms=50))
    assert colocating == Moonpool(lookahead_s=0.03, lookahead_both_s=0.2, colocate=1024.0, chunk=256.0, gap_s=0.05, paced=1.0)
    own = SchedulerConfig(policy_settings={"lookahead_s": 0.0, "age": 0.2})
    assert policy_of(own) == Moonpool(lookahead_both_s=0.2, age=0.2)


def test_over_etcd_gateways_and_conductors_may_be_elsewhere_but_not_otherwise() -> None:
    nodes = {"cluster.nodes": '[{"name": "a", "prefill": 1, "decode": 1}]'}
    with pytest.raises(ConfigError, match="no conductor"):
        load_config(None, {}, nodes)
    assert load_config(None, {}, {**nodes, "cluster.registry": "etcd://etcd:2379"})[0].cluster.nodes[0].gateway == 0
    with pytest.raises(ConfigError, match="no `both` worker"):
        load_config(None, {}, {"cluster.nodes": '[{"name": "a", "prefill": 1}]', "cluster.registry": "etcd://etcd:2379"})


@pytest.mark.parametrize("amount", ["-1", "Infinity", "NaN"])
def test_nodes_claim_no_amounts_that_ray_could_not_count(amount: str) -> None:
    nodes = f'[{{"name": "a", "both": 1, "conductor": 1, "gateway": 1, "resources": {{"rack": {amount}}}}}]'
    with pytest.raises(ConfigError, match=r"cluster\.nodes.*rack"):
        load_config(None, {}, {"cluster.nodes": nodes})
