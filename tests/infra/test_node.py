"""The choice of the Node.js that runs CDK."""

from __future__ import annotations

import importlib.util
import os
import subprocess

import pytest

from infra.nodejs import choose_node
from pipeline.errors import BadConfig


def test_the_packaged_one_is_chosen_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSII_NODE", "")
    choose_node()
    version = subprocess.run([os.environ["JSII_NODE"], "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("v24.")


def test_a_given_one_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSII_NODE", "/opt/node")
    choose_node()
    assert os.environ["JSII_NODE"] == "/opt/node"


def test_without_any_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSII_NODE", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadConfig) as caught:
        choose_node()
    assert "pip install" in caught.value.remedy
