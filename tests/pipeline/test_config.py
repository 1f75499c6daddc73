"""Merging, precedence and refusals of the configuration."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pipeline.config import (
    KeyRole,
    ModelConfig,
    RunConfig,
    Section,
    TrainConfig,
    build_config,
    keys_of,
    load_config_file,
    merge,
    parse_settings,
)
from pipeline.errors import BadConfig, ExitCode, MissingInput


def test_defaults_are_valid_and_frozen() -> None:
    config = build_config({})
    assert config == RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.nodes = 3


def test_later_layers_win_key_by_key() -> None:
    config = build_config({"train": {"steps": 1, "epochs": 2}}, {"train": {"steps": 5}}, parse_settings(["train.steps=7"]))
    assert (config.train.steps, config.train.epochs) == (7, 2)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.stepz", "train.steps"),
        ("trian.steps", "train"),
        ("gate.metrik", "gate.metric"),
        ("replay_fraction", "data.replay_fraction"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(key: str, nearest: str) -> None:
    with pytest.raises(BadConfig) as caught:
        build_config(parse_settings([f"{key}=1"]))
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    assert f"did you mean {nearest}?" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["train.steps=0"],
        ["train.batch_size=-1"],
        ["nodes=0"],
        ["embed.length=3"],
        ["train.query_length=512"],
        ["data.holdout_fraction=1.0"],
        ["share=not-alphanumeric"],
        ["registry=../x"],
        ["run=a/b"],
        ["time_budget=PT0S"],
        ["device.kind=tpu"],
        ["gate.metric=accuracy"],
        ["gate.metric=macro-f1"],
        ["train.batch_by=task", "train.tasks={a: {query_length: 3}}"],
        ["train.batch_by=task", "train.sampling_temperature=.inf"],
        ["train.temperature=.nan"],
        ["train=5"],
    ],
)
def test_values_out_of_range_are_refused_by_name(settings: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        build_config(parse_settings(settings))
    assert settings[-1].split("=")[0].split(".")[-1] in str(caught.value)


def test_settings_are_yaml_and_numbers_without_a_dot_are_numbers() -> None:
    parsed = parse_settings(["registry=null", "train.learning_rate=1e-5", "embed.length=32", "time_budget=PT3H"])
    config = build_config(parsed)
    assert config.registry is None
    assert config.train.learning_rate == 1e-5
    assert config.embed.length == 32
    assert config.time_budget == timedelta(hours=3)


@pytest.mark.parametrize("setting", ["train.steps", "=3", "train..steps=3", "a=[1"])
def test_malformed_settings_are_refused(setting: str) -> None:
    with pytest.raises(BadConfig):
        parse_settings([setting])


def test_files_in_yaml_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 4}\n")
    (tmp_path / "a.json").write_text(json.dumps({"train": {"steps": 4}}))
    (tmp_path / "empty.yaml").write_text("")
    assert load_config_file(tmp_path / "a.yaml") == load_config_file(tmp_path / "a.json") == {"train": {"steps": 4}}
    assert load_config_file(tmp_path / "empty.yaml") == {}


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(MissingInput):
        load_config_file(tmp_path / "absent.yaml")
    for name in ("list.yaml", "torn.json"):
        with pytest.raises(BadConfig):
            load_config_file(tmp_path / name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_subnormal=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
known = st.sampled_from([*RunConfig.model_fields, "steps", "kind", "bogus"])


@given(st.dictionaries(known, st.dictionaries(known, json_values, max_size=3) | json_values, max_size=4))
def test_any_object_is_accepted_or_refused_in_our_own_words(values: dict[str, object]) -> None:
    try:
        config = build_config(values)
    except BadConfig:
        return
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@given(st.dictionaries(st.text(), json_values), st.dictionaries(st.text(), json_values))
def test_merge_keeps_what_is_not_overridden(under: dict[str, object], over: dict[str, object]) -> None:
    merged = merge(under, over)
    assert merged.keys() == under.keys() | over.keys()
    assert all(merged[key] == under[key] for key in under.keys() - over.keys())


# ---- roles -----------------------------------------------------------------------------------------------------------


def roles_of(section: type[BaseModel], inherited: frozenset[KeyRole] = frozenset()) -> dict[str, frozenset[KeyRole]]:
    """Every key below a section, with its own roles and those of the sections that it is in."""
    found = {}
    for name, field in section.model_fields.items():
        roles = inherited | {role for role in field.metadata if isinstance(role, KeyRole)}
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        found |= {f"{name}.{key}": own for key, own in roles_of(inner, roles).items()} if inner else {name: roles}
    return found


def unclassified(section: type[BaseModel]) -> list[str]:
    """Keys that are not either learned or bookkeeping."""
    return [key for key, roles in roles_of(section).items() if len(roles & {KeyRole.LEARNED, KeyRole.BOOKKEEPING}) != 1]


def test_every_key_has_a_role() -> None:
    assert unclassified(RunConfig) == []


def test_a_key_without_a_role_is_noticed() -> None:
    class Inner(Section):
        named: Annotated[int, KeyRole.BOOKKEEPING] = 1
        forgotten: int = 1

    class Outer(Section):
        inner: Inner = Inner()
        whole: Annotated[Inner | None, KeyRole.LEARNED, KeyRole.GRAPH] = None
        both: Annotated[int, KeyRole.LEARNED, KeyRole.BOOKKEEPING] = 1

    assert unclassified(Outer) == ["inner.forgotten", "whole.named", "both"]
    assert keys_of(KeyRole.GRAPH, Outer) == ("whole",)
    assert keys_of(KeyRole.BOOKKEEPING, Outer) == ("inner.named", "whole.named", "both")


def test_lists_of_keys_follow_from_roles() -> None:
    assert {"batch_size", "log_every", "temperature"} < set(keys_of(KeyRole.GRAPH, TrainConfig))
    assert not {"learning_rate", "steps", "keep_best"} & set(keys_of(KeyRole.GRAPH, TrainConfig))
    # Named by their section, and by themselves.
    assert {"device", "lock", "data.train", "train.batch_size"} < set(keys_of(KeyRole.BOOKKEEPING, RunConfig))
    assert not {"seed", "train", "train.accumulation", "embed.length"} & set(keys_of(KeyRole.BOOKKEEPING, RunConfig))
    assert {"micro_batches", "resume"} < set(keys_of(KeyRole.RESUMABLE, TrainConfig))
    assert keys_of(KeyRole.LEARNED, ModelConfig) == ("prompts", "pooling", "normalize", "head")
    assert keys_of(KeyRole.EXECUTION, RunConfig) == ("run", "share", "time_budget", "lock")
    assert "train.micro_batches" in keys_of(KeyRole.TUNABLE, RunConfig)
    assert "model.parent" in keys_of(KeyRole.URI, RunConfig)
