"""Model folders in the Hugging Face / sentence-transformers form: what this pipeline continues from, writes and publishes.

`SentenceTransformer(folder)` gives the same embeddings as our own encoder, without code of ours. It has no residual layer of our
kind, so the head x + W2 relu(W1 x + b1) + b2 is written as two of its `Dense` modules, exactly: relu([W1; I; -I] x + [b1; 0; 0])
and then [W2, I, -I], since x = relu(x) - relu(-x). `head.safetensors` keeps the head unchanged for our own loader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from pipeline.config import HeadConfig, ModelConfig
from pipeline.dataset.tokens import refuse_code
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.model.encoder import Encoder, ResidualHead, family_of, new_encoder
from pipeline.model.inventory import (
    PROMPTS,
    SENTENCE_CONFIG,
    check_model_type,
    read_modules,
    read_object,
    read_prompts,
    transformer_folder,
    weight_files,
)
from pipeline.model.weights import fill, read_weights

WEIGHTS = "model.safetensors"
HEAD = "head.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
)
CONFIG_FILES = (
    "config.json",
    "modules.json",
    SENTENCE_CONFIG,
    PROMPTS,
    "1_Pooling/config.json",
    *TOKENIZER_FILES,
)
"""Files of a model folder besides its weights."""

MODULE_TYPE = "sentence_transformers.models.{}"
"""These names are understood by every version of sentence-transformers."""

POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
"""The older of two forms of a pooling module's configuration, which every version reads."""


def load_encoder(folder: Path, config: ModelConfig, weights_from: list[Path] | None = None) -> Encoder:
    """The encoder of a model folder, on the host in fp32.

    Args:
        folder: in the form of sentence-transformers, or a plain Hugging Face model (which says nothing about pooling).
        config: pooling, normalization and head; must agree with what the folder says. A head that the folder does not have yet
            starts as one that changes nothing.
        weights_from: files with all its weights, a head's too; None: the folder's own.

    Raises:
        MissingInput: no config.json, or no weights.
        BadConfig: an unsupported encoder or module, a setting that contradicts the folder, or weights that do not fit.
        BadData: a file that cannot be read.
    """
    backbone, has_head = inspect_folder(folder, config)
    encoder = new_encoder(backbone, config)
    files = weights_from or weight_files(transformer_folder(folder))
    weights = {name: tensor for path in files for name, tensor in read_weights(path, config.weights_key).items()}
    fill(encoder, weights, files[0])
    if encoder.head and has_head and not weights_from:
        _load_head(encoder.head, folder / HEAD)
    return encoder.eval()


def inspect_folder(folder: Path, config: ModelConfig) -> tuple[PreTrainedConfig, bool]:
    """The backbone's configuration, and whether the folder has a head; contradictions between folder and config are errors.

    Raises:
        MissingInput, BadConfig, BadData: as `load_encoder`, weights aside.
    """
    modules = read_modules(folder)
    backbone = _backbone_config(transformer_folder(folder))
    has_head = (folder / HEAD).is_file()
    if modules:
        _check_modules(folder, modules, has_head)
        _agree("model.pooling", config.pooling, _pooling(folder, modules))
        _agree("model.normalize", config.normalize, _normalizes(modules))
    if has_head and config.head is None:
        raise BadConfig(
            "the model has a head that the configuration does not know",
            value=str(folder),
            rule="model.head says how wide the head is; dropping it would change every embedding",
            remedy=f"set model.head.hidden to {read_weights(folder / HEAD)['w1'].shape[0]}",
        )
    return backbone, has_head


def text_positions(backbone: PreTrainedConfig) -> int:
    """Return the tokens of the longest text."""
    # RoBERTa and its like count positions from the padding token's id on: 514 of them are 512 tokens.
    padding = 1 + (backbone.pad_token_id or 0) if family_of(backbone).counts_from_padding else 0
    return int(backbone.max_position_embeddings) - padding


def own_form(folder: Path, config: ModelConfig) -> ModelConfig:
    """The configuration with pooling, normalization and head as the folder has them; whatever it does not say, as configured.

    Raises:
        MissingInput, BadConfig, BadData: as `inspect_folder`.
    """
    modules, has_head = read_modules(folder), (folder / HEAD).is_file()
    found: dict[str, Any] = {"head": HeadConfig(hidden=read_weights(folder / HEAD)["w1"].shape[0]) if has_head else None}
    if modules:
        _check_modules(folder, modules, has_head)
        found |= {"pooling": _pooling(folder, modules), "normalize": _normalizes(modules)}
    return config.model_copy(update=found)


def save_folder(
    encoder: Encoder,
    folder: Path,
    source: Path,
    weights: Mapping[str, Tensor] | None = None,
    max_length: int | None = None,
) -> None:
    """Write an encoder as a model folder.

    Args:
        folder: created; files of the same names are replaced.
        source: a model folder from which tokenizer and prompts are taken.
        weights: the encoder's state in host memory, where it is on a device; None: it is on the host.
        max_length: tokens at which texts are cut, special ones included; None: as the source says.
    """
    weights = encoder.state_dict() if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    origin = transformer_folder(source)
    for path in (origin / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if record := read_object(source / PROMPTS):
        prompts = read_prompts(source)
        # By these names, `encode_query`, `encode_document` and `encode`, which takes texts for documents, find what we found.
        own = {"prompts": {**(record.get("prompts") or {}), **prompts}, "default_prompt_name": "document"}
        _write_json(folder / PROMPTS, record | (own if any(prompts.values()) else {}))
    encoder.config.save_pretrained(folder)
    # Weights are fp32, whatever the parent's were: transformers loads them in the type that it finds here.
    _write_json(folder / "config.json", read_object(folder / "config.json") | {"dtype": "float32"})
    _save(folder / WEIGHTS, _under(weights, "backbone."))
    names = [
        "Transformer",
        "Pooling",
        *(["Dense", "Dense"] if encoder.head else []),
        *(["Normalize"] if encoder.normalize else []),
    ]
    paths = [f"{index}_{name}" if index else "" for index, name in enumerate(names)]
    _write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": MODULE_TYPE.format(name)}
            for index, (name, path) in enumerate(zip(names, paths, strict=True))
        ],
    )
    _write_json(folder / SENTENCE_CONFIG, _sentence_config(origin, encoder.max_length, max_length))
    _write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": encoder.dimension, **{key: mode == encoder.pooling for mode, key in POOLING_KEYS.items()}},
    )
    if encoder.head is not None:
        _save_head(_under(weights, "head."), folder)


def _kinds(modules: list[dict[str, str]]) -> list[str]:
    return [module["type"].rsplit(".", 1)[-1] for module in modules]


def _normalizes(modules: list[dict[str, str]]) -> bool:
    return _kinds(modules)[-1] == "Normalize"


def _check_modules(folder: Path, modules: list[dict[str, str]], has_head: bool) -> None:
    kinds = _kinds(modules)
    ours = ["Transformer", "Pooling", *(["Dense", "Dense"] if has_head else [])]
    if kinds not in (ours, [*ours, "Normalize"]):
        raise BadConfig(
            "the model folder has modules that are not supported",
            value=f"{folder}: {', '.join(kinds)}",
            rule="Transformer, Pooling, optionally Normalize; Dense only as this pipeline writes its own head",
            remedy="export the model without them",
        )


def _pooling(folder: Path, modules: list[dict[str, str]]) -> str:
    path = folder / modules[1]["path"] / "config.json"
    if not path.is_file():
        raise MissingInput("the model folder has no pooling configuration", value=path)
    record = read_object(path)
    if record.get("include_prompt") is False and any(prompts := read_prompts(folder).values()):
        raise BadConfig(
            "the model leaves its prompts out of the mean",
            value=f"{path}: include_prompt = false, prompts: {', '.join(map(repr, prompts))}",
            rule="pooling covers all tokens of a text, those of its prompt included",
            remedy="continue from a model with include_prompt = true, or without prompts",
        )
    if "pooling_mode" in record:
        mode = record["pooling_mode"]
        modes = [str(one) for one in mode] if isinstance(mode, list) else [str(mode)]
    else:
        names = {POOLING_KEYS["mean"]: "mean", POOLING_KEYS["cls"]: "cls"}
        modes = [names.get(key, key) for key, on in record.items() if key.startswith("pooling_mode_") and on] or ["mean"]
    if len(modes) != 1 or modes[0] not in ("mean", "cls"):
        raise BadConfig("this pooling is not supported", value=f"{path}: {', '.join(modes)}", rule="mean or cls")
    return str(modes[0])


def _agree(key: str, configured: object, found: object) -> None:
    if configured != found:
        raise BadConfig(
            "the configuration contradicts the model folder",
            value=f"{key} = {configured}, the folder says {found}",
            rule="a model keeps the form of its embeddings",
            remedy=f"set {key} to {str(found).lower()}",
        )


def _backbone_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise MissingInput("the model folder has no config.json", value=folder, remedy="check the URI, or set model.base")
    check_model_type(path)
    refuse_code(path)
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BadData("config.json cannot be used", value=f"{path}: {error}") from error


def _sentence_config(folder: Path, longest: int, configured: Any) -> dict[str, Any]:
    """`sentence_bert_config.json` with a maximum length that the position embeddings allow."""
    record = read_object(folder / SENTENCE_CONFIG)
    found = record.get("max_seq_length") or read_object(folder / "tokenizer_config.json").get("model_max_length")
    configured = configured or found
    # Tokenizers that know no maximum say 1e30.
    limit = configured if isinstance(configured, (int, float)) and configured > 0 else longest
    return {"max_seq_length": int(min(limit, longest)), "do_lower_case": bool(record.get("do_lower_case", False))}


def _write_json(path: Path, record: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _load_head(head: ResidualHead, path: Path) -> None:
    stored = read_weights(path)
    names = {"w1": "inner.weight", "b1": "inner.bias", "w2": "outer.weight", "b2": "outer.bias"}
    expected = head.state_dict()
    problems = [
        f"{name}: {tuple(stored[name].shape) if name in stored else 'missing'}, expected {tuple(expected[own].shape)}"
        for name, own in names.items()
        if name not in stored or stored[name].shape != expected[own].shape
    ]
    if problems:
        raise BadConfig(
            "the model's head does not fit the configuration",
            value=problems,
            rule="model.head.hidden is the width of the parent's head",
            remedy="set model.head.hidden accordingly",
        )
    head.load_state_dict({own: stored[name].float() for name, own in names.items()})


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _save_head(head: Mapping[str, Tensor], folder: Path) -> None:
    w1, b1, w2, b2 = (head[name].cpu() for name in ("inner.weight", "inner.bias", "outer.weight", "outer.bias"))
    _save(folder / HEAD, {"w1": w1, "b1": b1, "w2": w2, "b2": b2})
    identity, zero = torch.eye(w1.shape[1]), torch.zeros(2 * w1.shape[1])
    widen = torch.cat([w1, identity, -identity]), torch.cat([b1, zero])
    narrow = torch.cat([w2, identity, -identity], dim=1), b2
    activations = ("torch.nn.modules.activation.ReLU", "torch.nn.modules.linear.Identity")
    for index, ((weight, bias), activation) in enumerate(zip((widen, narrow), activations, strict=True), start=2):
        path = folder / f"{index}_Dense"
        _write_json(
            path / "config.json",
            {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True, "activation_function": activation},
        )
        _save(path / WEIGHTS, {"linear.weight": weight, "linear.bias": bias})
