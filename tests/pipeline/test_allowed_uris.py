"""Where URIs and names may lead: the form of each, the deployment's own places, and no way around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.allowed_uris import AllowedUris, check_name, is_inside, objection
from pipeline.config import build_config
from pipeline.errors import BadConfig, BadData

OWN = "s3://bucket"
AWS = AllowedUris(own=OWN, read=("s3://lake/clicks", "s3://models/base.safetensors"))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/data/x",
        "s3://bucket",
        "s3://lake/clicks",
        "s3://lake/clicks/",
        "s3://lake/clicks/a/b",
        "s3://models/base.safetensors",
    ],
)
def test_own_bucket_and_what_the_deployment_reads(uri: str) -> None:
    AWS.check([("data.train", uri)])


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("s3://lake/other", "outside"),
        ("s3://lake/clicks-of-others/x", "outside"),
        ("s3://bucket-of-others/x", "outside"),
        ("s3://bucket/../lake/x", "part"),
        ("s3://lake/clicks/../other", "part"),
        ("s3://bucket//x", "part"),
        ("s3://bucket/a\0b", "control"),
        ("s3:///x", "no bucket"),
        ("", "empty"),
        ("gs://bucket/x", "neither"),
        ("https://host/x", "neither"),
        ("file://https://host", "neither"),
        ("/etc/passwd", "local path"),
        ("file:///etc/passwd", "local path"),
        ("data/x", "local path"),
    ],
)
def test_everything_else_is_refused_with_its_reason(uri: str, reason: str) -> None:
    with pytest.raises(BadConfig) as caught:
        AWS.check([("model.parent", "s3://bucket/fine"), ("data.train", uri)])
    [value] = caught.value.value
    assert value.startswith(f"data.train: {uri!r}")
    assert reason in value
    assert "s3://lake/clicks" in caught.value.rule
    assert "`read`" in caught.value.remedy


def test_what_a_file_names_is_bad_data() -> None:
    with pytest.raises(BadData):
        AWS.check([("the registry's model", "s3://elsewhere/x")], BadData)


def test_local_paths_where_the_deployment_allows_them() -> None:
    AllowedUris(own=OWN, local_paths=True).check([("data.train", "/data/../data/x"), ("model.parent", "file:///model")])


def test_a_local_bucket_is_a_place_of_its_own_and_links_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "link").symlink_to(tmp_path)
    places = AllowedUris(own=str(tmp_path / "bucket"))
    places.check([("a part", str(tmp_path / "bucket" / "runs" / "x"))])
    for outside in ("bucket-2/x", "bucket/../x", "bucket/link/x"):
        assert places.refusal(str(tmp_path / outside))


@pytest.mark.parametrize("name", ["a", "a/b.c", "0_Transformer/model.safetensors", "..a", "a.."])
def test_names_that_stay(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/..", "../a", "a//b", "a/", "a\nb", "a\0"])
def test_names_that_lead_out(name: str) -> None:
    with pytest.raises(BadData):
        check_name(name)


def test_forms() -> None:
    assert objection("s3://bucket/folder/") is None
    assert objection("relative/../path") is None


@pytest.mark.parametrize(
    "layer",
    [
        {"data": {"train": ["s3://bucket/../x"]}},
        {"data": {"corpus": ["gs://x/y"]}},
        {"model": {"parent": "s3://bucket//x"}},
        {"model": {"initial": "s3://bucket//x"}},
        {"model": {"base": "https://x/y"}},
        {"compile": {"cache": "s3://bucket/./x"}},
    ],
)
def test_a_configuration_names_no_malformed_uri(layer: dict[str, object]) -> None:
    with pytest.raises(BadConfig):
        build_config(layer)


def test_a_configuration_knows_all_its_uris() -> None:
    config = build_config(
        {
            "data": {"train": ["s3://a/1"], "corpus": ["s3://a/2"]},
            "model": {"initial": "s3://a/3", "parent": "s3://a/4", "base": "s3://a/5"},
            "compile": {"cache": "s3://a/6"},
        }
    )
    assert [uri for _, uri in config.uris()] == [f"s3://a/{number}" for number in range(1, 7)]


@pytest.mark.parametrize(("name", "inside"), [("a/b.c", True), ("../a", False), ("/a", False), ("a\\b", False), (5, False)])
def test_which_names_stay_inside(name: object, inside: bool) -> None:
    assert is_inside(name) is inside
