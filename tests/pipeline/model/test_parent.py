"""Parents from everywhere: folders, state_dicts with prefixes, GPU tensors, training checkpoints; and those to be refused."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline import store
from pipeline.config import HeadConfig, ModelConfig
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput, TrnpipeError
from pipeline.model.classifier import add_classifiers, load_classifiers
from pipeline.model.encoder import Encoder
from pipeline.model.folder import WEIGHTS, load_encoder, own_form, save_folder
from pipeline.model.inventory import read_prompts
from pipeline.model.parent import ResolvedParent, resolve_parent
from tests.tiny import make_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with configuration and tokenizer, and weights that no test may end up with."""
    make_model(tmp_path / "base", seed=9)
    return tmp_path / "base"


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    return make_model(tmp_path / "tiny", seed=1)


@pytest.fixture
def weights(encoder: Encoder) -> dict[str, Tensor]:
    return dict(encoder.backbone.state_dict())


@pytest.fixture
def resolve(tmp_path: Path, base: Path) -> Callable[..., ResolvedParent]:
    def resolve(uri: Path | str, **settings: Any) -> ResolvedParent:
        config = ModelConfig.model_validate({"base": str(base), **settings})
        return resolve_parent(str(uri), config, tmp_path / "scratch")

    return resolve


def require_same(resolved: ResolvedParent, encoder: Encoder, config: ModelConfig | None = None) -> None:
    loaded = load_encoder(resolved.folder, config or ModelConfig())
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def as_if_from_a_gpu(path: Path) -> None:
    """Rewrite a file of `torch.save` so that every storage says it lives on cuda:0, as one saved on a GPU does."""
    with zipfile.ZipFile(path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    (name,) = (name for name in entries if name.endswith("data.pkl"))
    # In protocol 2 a string is BINUNICODE: `X`, its length in 4 bytes, the text. It is written once and then referred to.
    cpu, cuda = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    assert cpu in entries[name]
    entries[name] = entries[name].replace(cpu, cuda)
    with zipfile.ZipFile(path, "w") as target:
        for entry, data in entries.items():
            target.writestr(entry, data)


def test_folder_is_taken_as_it_is(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent]) -> None:
    resolved = resolve(tmp_path / "tiny", base=None)
    assert (resolved.folder, resolved.converted) == (tmp_path / "tiny", False)
    assert resolved.sha256 == hashlib.sha256((tmp_path / "tiny" / WEIGHTS).read_bytes()).hexdigest()


def test_a_prompt_is_added_to_a_folder_which_keeps_its_classifiers(tmp_path: Path, encoder: Encoder) -> None:
    add_classifiers(encoder, tmp_path, {"color": ["warm", "cold"]})
    save_folder(encoder, tmp_path / "ours", tmp_path / "tiny")
    resolved = resolve_parent(str(tmp_path / "ours"), ModelConfig(prompts={"color": "shade "}), tmp_path / "scratch")
    assert resolved.converted
    assert resolved.sha256 == store.sha256_file(tmp_path / "ours" / WEIGHTS)
    assert read_prompts(resolved.folder) == {"query": "", "document": "", "color": "shade "}
    require_same(resolved, make_model(tmp_path / "again", seed=1))
    before, after = (load_classifiers(folder, encoder)["color"] for folder in (tmp_path / "ours", resolved.folder))
    assert torch.equal(before.weight, after.weight)


def test_folder_on_s3(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent], s3_root: str) -> None:
    store.upload_folder(tmp_path / "tiny", f"{s3_root}/models/tiny")
    resolved = resolve(f"{s3_root}/models/tiny", base=None)
    assert not resolved.converted
    require_same(resolved, encoder)


def test_plain_hugging_face_folder(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent]) -> None:
    (tmp_path / "tiny" / "modules.json").unlink()
    resolved = resolve(tmp_path / "tiny", base=None, pooling="cls")
    assert not resolved.converted
    require_same(resolved, encoder, ModelConfig(pooling="cls"))


def test_folder_with_a_pickle_is_converted(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    (tmp_path / "tiny" / WEIGHTS).unlink()
    torch.save(weights, tmp_path / "tiny" / "pytorch_model.bin")
    torch.save({}, tmp_path / "tiny" / "training_args.bin")
    resolved = resolve(tmp_path / "tiny", base=None)
    assert resolved.converted
    assert (resolved.folder / WEIGHTS).is_file()
    require_same(resolved, encoder)


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "model.", "encoder.", "bert.", "0.auto_model.", "module.model.bert.", "_orig_mod.query_tower.0.auto_model."],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_bare_weights_under_any_prefix(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent], prefix: str, suffix: str
) -> None:
    record = {f"{prefix}{name}": tensor.clone() for name, tensor in weights.items()}
    record[f"{prefix}embeddings.position_ids"] = torch.arange(64)[None]
    record[f"{prefix}pooler.dense.weight"] = torch.zeros(32, 32)
    record["cls.predictions.bias"] = torch.zeros(105)
    record["logit_scale"] = torch.tensor(20.0)
    path = tmp_path / f"weights{suffix}"
    save_file(record, path) if suffix == ".safetensors" else torch.save(record, path)
    resolved = resolve(path)
    assert resolved.converted
    assert resolved.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    require_same(resolved, encoder)


def test_weights_of_a_gpu(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    path = tmp_path / "gpu.pt"
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    as_if_from_a_gpu(path)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        torch.load(path, weights_only=True, map_location=None if not torch.cuda.is_available() else "cuda:99")
    require_same(resolve(path), encoder)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module", "ema_weights"])
def test_training_checkpoint(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent], key: str
) -> None:
    optimizer = torch.optim.AdamW(encoder.parameters())
    record = {
        "epoch": 3,
        key: weights,
        "optimizer": optimizer.state_dict(),
        "best": np.float64(0.5),
        "random": np.random.default_rng(0).integers(0, 9, 5),
    }
    torch.save(record, tmp_path / "last.ckpt")
    require_same(resolve(tmp_path / "last.ckpt"), encoder)


def test_weights_key_chooses(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    torch.save({"model": other, "averages": {"ema": weights}}, tmp_path / "both.pt")
    require_same(resolve(tmp_path / "both.pt", weights_key="averages.ema"), encoder)
    with pytest.raises(BadConfig) as caught:
        resolve(tmp_path / "both.pt", weights_key="averages.swa")
    assert "ema (dict)" in str(caught.value)


def test_files_beside_the_weights_serve_as_base(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent], s3_root: str
) -> None:
    (tmp_path / "tiny" / WEIGHTS).unlink()
    torch.save(weights, tmp_path / "tiny" / "step-9.pt")
    require_same(resolve(tmp_path / "tiny" / "step-9.pt", base=None), encoder)
    store.upload_folder(tmp_path / "tiny", f"{s3_root}/parent")
    require_same(resolve(f"{s3_root}/parent/step-9.pt", base=None), encoder)


def test_one_weight_file_in_a_folder_is_found(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    torch.save(weights, folder / "final.pth")
    require_same(resolve(folder), encoder)
    torch.save(weights, folder / "older.pth")
    with pytest.raises(BadConfig, match="several weight files"):
        resolve(folder)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_head_that_is_new_is_no_part_of_a_converted_parent(
    kind: str, tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    """It begins at random, and is not what the first new model is compared with."""
    torch.save(weights, tmp_path / "gpu.pt")
    head = [{"out": 8, "activation": "tanh"}]
    resolved = resolve(tmp_path / ("tiny" if kind == "folder" else "gpu.pt"), head=head, prompts={"query": "find "})
    assert resolved.converted
    require_same(resolved, encoder)
    assert own_form(resolved.folder, ModelConfig.model_validate({"head": head})).head is None


def test_head_of_our_own_state_dict(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    encoder = make_model(tmp_path / "headed", seed=2, head=24)
    torch.save({f"module.{name}": tensor for name, tensor in encoder.state_dict().items()}, tmp_path / "headed.pt")
    config = ModelConfig(head=HeadConfig(hidden=24))
    require_same(resolve(tmp_path / "headed.pt", head=HeadConfig(hidden=24)), encoder, config)
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "headed.pt")
    assert "head.inner.weight: left over, shape (24, 32)" in str(caught.value)


def test_what_is_no_part_of_one_familys_vectors_may_be_anothers_head(
    tmp_path: Path, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    """The name is that of ModernBERT's prediction head, which an embedding never passes through."""
    torch.save({**weights, "head.dense.weight": torch.zeros(32, 32)}, tmp_path / "gpu.pt")
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "gpu.pt")
    assert "head.dense.weight: left over, shape (32, 32)" in str(caught.value)


LAYERS = [{"out": 48, "activation": "relu"}, {"out": 16, "activation": "tanh"}]


def trained_elsewhere(encoder: Encoder, path: Path, numbers: tuple[int, ...] = (0, 3), key: str = "mlp.{}") -> dict[str, Tensor]:
    """Write a training checkpoint whose head is a Sequential with other modules between its layers."""
    tensors = {f"module.bert.{name}": tensor for name, tensor in encoder.backbone.state_dict().items()}
    for number, layer in zip(numbers, encoder.head_layers.values(), strict=True):
        for name, tensor in layer.state_dict().items():
            tensors[f"module.{key.format(number)}.{name}"] = tensor
    torch.save({"state_dict": tensors, "epoch": 3}, path)
    return tensors


@pytest.mark.parametrize("key", ["mlp.{}", "head.layers.{}.linear", "classifier.{}"])
def test_layers_of_a_training_checkpoint(tmp_path: Path, resolve: Callable[..., ResolvedParent], key: str) -> None:
    encoder = make_model(tmp_path / "headed", seed=2, head=LAYERS)
    trained_elsewhere(encoder, tmp_path / "gpu.pt", (2, 10), key)
    resolved = resolve(tmp_path / "gpu.pt", head=LAYERS, head_key=key)
    # The key stays in the configuration, and the next week's parent is a folder.
    require_same(resolved, encoder, ModelConfig.model_validate({"head": LAYERS, "head_key": key}))


def test_the_two_layers_of_a_residual_head_may_have_numbers(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    encoder = make_model(tmp_path / "headed", seed=2, head=24)
    trained_elsewhere(encoder, tmp_path / "gpu.pt")
    config = ModelConfig.model_validate({"head": {"hidden": 24}, "head_key": "mlp.{}"})
    require_same(resolve(tmp_path / "gpu.pt", head={"hidden": 24}, head_key="mlp.{}"), encoder, config)


def test_shared_towers_have_one_head(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    encoder = make_model(tmp_path / "headed", seed=2, head=LAYERS)
    tensors = trained_elsewhere(encoder, tmp_path / "gpu.pt")
    towers = {f"{tower}.{name}": tensor for tower in ("query", "document") for name, tensor in tensors.items()}
    torch.save(towers, tmp_path / "towers.pt")
    resolved = resolve(tmp_path / "towers.pt", head=LAYERS, head_key="mlp.{}")
    require_same(resolved, encoder, ModelConfig.model_validate({"head": LAYERS}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"head": LAYERS}, ["module.mlp.0.weight: left over, shape (48, 32)", "check", "model.head_key"]),
        ({"head": LAYERS[:1], "head_key": "mlp.{}"}, ["module.mlp.3.weight: left over, shape (16, 48)"]),
        ({"head": [*LAYERS, {"out": 8}], "head_key": "mlp.{}"}, ["head.4.weight: missing, shape (8, 16)"]),
        ({"head": [LAYERS[0], {"out": 8}], "head_key": "mlp.{}"}, ["mlp.3.weight: shape (16, 48), expected (8, 48)"]),
        ({"head": LAYERS, "head_key": "proj.{}"}, ["head.0.weight: missing, shape (48, 32)", "mlp.0.weight: left over"]),
        ({"head_key": "mlp.{}"}, ["module.mlp.0.weight: left over, shape (48, 32)"]),
    ],
    ids=["no key", "more", "fewer", "other size", "other name", "no head"],
)
def test_layers_that_do_not_fit_are_refused(
    tmp_path: Path, resolve: Callable[..., ResolvedParent], settings: dict[str, Any], expected: list[str]
) -> None:
    trained_elsewhere(make_model(tmp_path / "headed", seed=2, head=LAYERS), tmp_path / "gpu.pt")
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "gpu.pt", **settings)
    assert [part for part in expected if part not in str(caught.value)] == []
    assert caught.value.exit_code == 64


def test_weights_without_the_head_of_their_folder_are_refused(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    make_model(tmp_path / "headed", seed=2, head=LAYERS)
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "headed" / WEIGHTS, base=None, head=LAYERS)
    assert "head.0.weight: missing" in str(caught.value)


def test_a_layer_without_a_bias_is_refused(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    tensors = trained_elsewhere(make_model(tmp_path / "headed", seed=2, head=LAYERS), tmp_path / "gpu.pt")
    del tensors["module.mlp.3.bias"]
    torch.save(tensors, tmp_path / "unbiased.pt")
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "unbiased.pt", head=LAYERS, head_key="mlp.{}")
    assert "mlp.3.bias: missing, shape (16,)" in str(caught.value)


def test_shared_towers_are_one_encoder(
    tmp_path: Path, encoder: Encoder, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]
) -> None:
    towers = {f"{tower}.{name}": tensor for tower in ("query", "document") for name, tensor in weights.items()}
    torch.save(towers, tmp_path / "shared.pt")
    require_same(resolve(tmp_path / "shared.pt"), encoder)
    torch.save({name: tensor + name.startswith("query") for name, tensor in towers.items()}, tmp_path / "two.pt")
    with pytest.raises(BadConfig, match="several different encoders"):
        resolve(tmp_path / "two.pt")


def test_misfits_are_all_named(tmp_path: Path, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]) -> None:
    weights["encoder.layer.1.output.dense.weight"] = torch.zeros(32, 63)
    weights["encoder.layer.2.output.dense.weight"] = torch.zeros(32, 64)
    weights["embeddings.LayerNorm.weight"] = torch.ones(32, dtype=torch.int32)
    del weights["encoder.layer.0.attention.self.query.bias"]
    torch.save(weights, tmp_path / "odd.pt")
    with pytest.raises(BadConfig, match="do not fit") as caught:
        resolve(tmp_path / "odd.pt")
    for line in (
        "encoder.layer.0.attention.self.query.bias: missing, shape (32,)",
        "encoder.layer.1.output.dense.weight: shape (32, 63), expected (32, 64)",
        "encoder.layer.2.output.dense.weight: left over, shape (32, 64)",
        "embeddings.LayerNorm.weight: torch.int32, expected floating point",
    ):
        assert line in str(caught.value)


def test_values_that_are_not_finite(tmp_path: Path, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent]) -> None:
    weights["embeddings.LayerNorm.bias"] = torch.full((32,), float("inf"))
    torch.save(weights, tmp_path / "inf.pt")
    with pytest.raises(BadData, match="not finite") as caught:
        resolve(tmp_path / "inf.pt")
    assert "embeddings.LayerNorm.bias" in str(caught.value)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("extra", [Malicious(), argparse.Namespace(lr=1), torch.nn.Linear(2, 2)])
def test_pickles_with_code_are_refused(
    tmp_path: Path,
    weights: dict[str, Tensor],
    resolve: Callable[..., ResolvedParent],
    monkeypatch: pytest.MonkeyPatch,
    extra: object,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": weights, "extra": extra}, tmp_path / "code.pt")
    with pytest.raises(BadConfig, match="refused") as caught:
        resolve(tmp_path / "code.pt")
    assert "state_dict() alone" in str(caught.value)
    assert not (tmp_path / "pwned").exists()


PICKLES = (
    *("pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "head.safetensors"),
    *("optimizer.bin", "tokenizer.json"),
)


@pytest.mark.parametrize("name", PICKLES)
def test_code_in_a_folder_never_runs(
    tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    if name in ("pytorch_model.bin", "model.safetensors.index.json"):
        (folder / WEIGHTS).unlink()
    torch.save({"model": Malicious()}, folder / ("part.bin" if name.endswith("index.json") else name))
    if name.endswith("index.json"):
        (folder / name).write_text(json.dumps({"weight_map": {"a": "part.bin"}}))
    head = {"head": HeadConfig(hidden=4)} if name.startswith("head") else {}
    refused: TrnpipeError | None = None
    try:
        TextTokenizer(resolve(folder, base=None, **head).folder)
    except (BadConfig, BadData, MissingInput) as error:
        refused = error
    assert not (tmp_path / "pwned").exists()
    # What is neither weights nor tokenizer is not looked at.
    assert (refused is None) == (name == "optimizer.bin")
    if refused is not None:
        assert str(folder) in str(refused)
        assert refused.rule


def test_code_in_a_layer_never_runs(
    tmp_path: Path, resolve: Callable[..., ResolvedParent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "headed", head=LAYERS)
    layer = tmp_path / "headed" / "2_Dense"
    (layer / WEIGHTS).unlink()
    torch.save({"model": Malicious()}, layer / "pytorch_model.bin")
    with pytest.raises(BadConfig, match="refused") as refusal:
        resolve(tmp_path / "headed", base=None, head=LAYERS)
    assert str(layer) in str(refusal.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_python_files_of_a_model_never_run(
    tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent], name: str
) -> None:
    folder = tmp_path / "tiny"
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass Tokenizer: pass\nclass Config: pass\n")
    record = json.loads((folder / name).read_text())
    custom = {"AutoConfig": "custom.Config", "AutoTokenizer": ["custom.Tokenizer", "custom.Tokenizer"]}
    (folder / name).write_text(json.dumps({**record, "auto_map": custom, "tokenizer_class": "Tokenizer"}))
    with pytest.raises(BadConfig, match="asks to run its own code") as refusal:
        TextTokenizer(resolve(folder, base=None).folder)
    assert "custom.Tokenizer" in str(refusal.value)
    assert "auto_map" in refusal.value.remedy
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("path", ["../outside", "/tmp", "a/../../outside", "..", "a//b"])
def test_files_outside_of_the_folder_are_not_read(
    tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent], path: str
) -> None:
    folder = tmp_path / "tiny"
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([{**modules[0], "path": path}, *modules[1:]]))
    with pytest.raises(BadData, match=r"modules\.json"):
        resolve(folder, base=None)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "manifest.json").write_text(json.dumps({"files": {path: {"sha256": "0", "size": 1}}}))
    with pytest.raises(BadData, match="manifest cannot be read"):
        resolve(folder, base=None)
    (folder / "manifest.json").unlink()
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": path}}))
    with pytest.raises(BadData, match="index"):
        resolve(folder, base=None)


def test_keys_that_lead_out_of_the_folder_are_not_fetched(
    tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent], s3_root: str
) -> None:
    store.upload_folder(tmp_path / "tiny", f"{s3_root}/models/tiny")
    listed = store.list_objects

    def with_one_more(uri: str) -> list[store.ObjectInfo]:
        return [*listed(uri), store.ObjectInfo(f"{uri}/../../outside", 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "list_objects", with_one_more)
        with pytest.raises(BadData, match="leads out of its folder"):
            resolve(f"{s3_root}/models/tiny", base=None)
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "legacy.pt"])
@pytest.mark.parametrize("kept", [0, 1, 64, 0.5, 0.999])
def test_truncated_files(
    tmp_path: Path, weights: dict[str, Tensor], resolve: Callable[..., ResolvedParent], name: str, kept: float
) -> None:
    path = tmp_path / name
    if name == "model.safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=name == "model.pt")
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(BadData, match="truncated"):
        resolve(path)


@pytest.mark.parametrize("content", [b"hello world, this is no pickle", pickle.dumps({"a": 1}), b"\x00" * 100])
def test_files_of_another_kind(tmp_path: Path, resolve: Callable[..., ResolvedParent], content: bytes) -> None:
    (tmp_path / "odd.bin").write_bytes(content)
    with pytest.raises((BadData, BadConfig)):
        resolve(tmp_path / "odd.bin")


def tensor_entry(start: int, stop: int, shape: int = 2) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [shape], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor_entry(0, 8), "b": tensor_entry(4, 12)},
        {"a": tensor_entry(0, 8), "b": tensor_entry(8, 1 << 40)},
        {"a": tensor_entry(0, 8, shape=1 << 62)},
        {"a": tensor_entry(8, 0)},
        b"[" * 100_000,
        1 << 60,
        100 << 20,
    ],
    ids=["overlapping", "beyond the file", "huge shape", "backwards", "nested", "longer than memory", "longer than the file"],
)
def test_hostile_safetensors_headers(tmp_path: Path, resolve: Callable[..., ResolvedParent], header: Any) -> None:
    text = json.dumps(header).encode() if isinstance(header, dict) else header if isinstance(header, bytes) else b"{}"
    length = header if isinstance(header, int) else len(text)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + b"\0" * 16)
    with pytest.raises(BadData, match="truncated"):
        resolve(tmp_path / "model.safetensors")


def test_weights_of_something_else(tmp_path: Path, resolve: Callable[..., ResolvedParent]) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(BadConfig, match="not one of a supported encoder") as caught:
        resolve(tmp_path / "other.pt")
    assert "conv1.weight" in str(caught.value)
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "nothing.pt")
    with pytest.raises(BadConfig, match="no weights were found"):
        resolve(tmp_path / "nothing.pt")


def test_nothing_there(tmp_path: Path, resolve: Callable[..., ResolvedParent], weights: dict[str, Tensor], s3_root: str) -> None:
    for uri in (tmp_path / "nowhere", tmp_path / "nowhere.pt", f"{s3_root}/nowhere"):
        with pytest.raises(MissingInput):
            resolve(uri)
    (tmp_path / "alone").mkdir()
    torch.save(weights, tmp_path / "alone" / "alone.pt")
    with pytest.raises(MissingInput) as caught:
        resolve(tmp_path / "alone" / "alone.pt", base=None)
    assert "model.base" in str(caught.value)


def test_folder_without_tokenizer(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent]) -> None:
    for path in (tmp_path / "tiny").glob("*"):
        if path.name.startswith(("tokenizer", "vocab", "special")):
            path.unlink()
    with pytest.raises(BadConfig, match="no tokenizer"):
        resolve(tmp_path / "tiny", base=None)
    require_same(resolve(tmp_path / "tiny"), encoder)


def test_changed_checkpoint_folder_is_refused(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent]) -> None:
    folder = tmp_path / "step-00000010"
    shutil.copytree(tmp_path / "tiny", folder)
    files = {
        path.name: {"sha256": store.sha256_file(path), "size": path.stat().st_size} for path in folder.glob("*") if path.is_file()
    }
    (folder / "manifest.json").write_text(json.dumps({"step": 10, "files": files}))
    require_same(resolve(folder, base=None), encoder)
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(BadData, match="manifest"):
        resolve(folder, base=None)


def test_unsupported_family(tmp_path: Path, encoder: Encoder, resolve: Callable[..., ResolvedParent]) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "gpt2"}))
    with pytest.raises(BadConfig, match="not supported"):
        resolve(tmp_path / "tiny", base=None)
