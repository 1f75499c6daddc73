"""Reading HLO modules, real ones that torch-xla makes in a process of its own: what is in them, and what tells two apart."""

from __future__ import annotations

import base64
from dataclasses import asdict

import pytest

from pipeline.backends.hlo import GraphDescription, describe, difference, module_of_executable
from pipeline.errors import BadData
from tests.pipeline.training.conftest import Lowering, lowering

__all__ = ["lowering"]

pytestmark = pytest.mark.slow


@pytest.fixture
def modules(lowering: Lowering) -> dict[str, bytes]:
    """Matrix products plus a constant; `same` differs from `base` in values only, the others in what their names say."""
    return {name: base64.b64decode(module) for name, module in lowering["modules"].items()}


def test_describe(modules: dict[str, bytes]) -> None:
    found = describe(modules["base"])
    assert found.inputs == {"f32[2,3]": 1}
    assert found.outputs == {"f32[2,2]": 1}
    assert found.constants == {"f32 0": 1, "f32 1": 1}  # one of them is the factor of torch.add
    assert found.operations.items() >= {"constant": 2, "dot": 1, "transpose": 1, "add": 1}.items()
    assert found.collectives == {}
    assert found.size == sum(found.operations.values())
    assert GraphDescription(**asdict(found)) == found


def test_values_are_no_difference(modules: dict[str, bytes]) -> None:
    assert describe(modules["same"]) == describe(modules["base"])
    words = difference(describe(modules["same"]), [describe(modules["base"])])
    assert words == "the same inputs, constants and operations in another arrangement"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape", "inputs of other shapes or types: new f32[4,3]; instead of f32[2,3]"),
        ("dtype", "inputs of other shapes or types: new bf16[2,3]; instead of f32[2,3]"),
        ("constant", "other constants: new f32 1; instead of f32 0"),
    ],
)
def test_difference_names_what_changed(name: str, words: str, modules: dict[str, bytes]) -> None:
    assert difference(describe(modules[name]), [describe(modules["base"])]) == words


def test_difference_is_to_the_most_similar(modules: dict[str, bytes]) -> None:
    new = describe(modules["constant"])
    known = [describe(modules[name]) for name in ("dtype", "shape", "base")]
    assert difference(new, known).startswith("other constants")
    assert difference(new, []) == "no known graph to compare it with"


@pytest.mark.parametrize("garbage", [b"\xff\xfe\xfd", b"", b"HloModule text, entry={}"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadData, match="not an HLO module"):
        describe(garbage)
    assert module_of_executable(garbage) is None


def test_a_module_that_is_cut_off_is_refused(modules: dict[str, bytes]) -> None:
    with pytest.raises(BadData, match="not an HLO module"):
        describe(modules["base"][: len(modules["base"]) // 2])


def test_an_executable_holds_its_module(modules: dict[str, bytes]) -> None:
    """Three length-delimited fields of number 1 around it: protobuf's wire format, built by hand."""
    wrapped = modules["base"]
    for _ in range(3):
        size, length = len(wrapped), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        wrapped = b"\x0a" + length + bytes([size]) + wrapped
    found = module_of_executable(wrapped)
    assert found is not None
    assert describe(found) == describe(modules["base"])
