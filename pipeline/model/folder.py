"""Model folders in the Hugging Face / sentence-transformers form: what this pipeline continues from, writes and publishes.

`SentenceTransformer(folder)` gives the same embeddings as our own encoder, without code of ours, and where the model has the form
of a classifier of transformers, `AutoModelForSequenceClassification.from_pretrained(folder)` gives the same classes.

sentence-transformers has no residual layer of our kind, so the head x + W2 relu(W1 x + b1) + b2 is written as two of its
`Dense` modules, exactly: relu([W1; I; -I] x + [b1; 0; 0]) and then [W2, I, -I], since x = relu(x) - relu(-x).
`head.safetensors` keeps the head unchanged for our own loader. Of a head of layers, each is a `Dense`, and our loader reads
these, also in folders of other origin.

Nor does it cut embeddings before it normalizes them. Where shorter ones are published, a `Dense` with the first rows of I does
so, in a folder `N_Cut`. Our own loader passes over it: the next model is trained from whole embeddings.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from pipeline.config import HeadConfig, HeadLayer, ModelConfig
from pipeline.dataset.tokens import refuse_code
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.model.classifier import CLASSES, Classifier
from pipeline.model.classifier import FOLDER as CLASSIFIERS
from pipeline.model.encoder import ACTIVATIONS, Encoder, new_encoder
from pipeline.model.families import family_of
from pipeline.model.inventory import (
    CUT,
    PROMPTS,
    SENTENCE_CONFIG,
    check_model_type,
    is_cut,
    read_modules,
    read_object,
    read_prompts,
    transformer_folder,
    weight_files,
)
from pipeline.model.weights import Weights, fill, read_weights

WEIGHTS = "model.safetensors"
HEAD = "head.safetensors"
HEAD_TENSORS = {"w1": "head.inner.weight", "b1": "head.inner.bias", "w2": "head.outer.weight", "b2": "head.outer.bias"}
"""Names in HEAD and in the encoder's state."""

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

LABELS = ("id2label", "label2id", "problem_type")
"""Settings in config.json of a classifier of transformers."""

MODULE_TYPE = "sentence_transformers.models.{}"
"""These names are understood by every version of sentence-transformers."""

POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
"""The older of two forms of a pooling module's configuration, which every version reads."""

DENSE = {"use_residual": False, "module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
"""A `Dense` module's settings other than of its layer: they may be left out, and have no other value."""


def load_encoder(folder: Path, config: ModelConfig, weights_from: list[Path] | None = None, *, new_head: bool = True) -> Encoder:
    """The encoder of a model folder, on the host in fp32.

    Args:
        folder: in the form of sentence-transformers, or a plain Hugging Face model (which says nothing about pooling).
        config: pooling, normalization and head; must agree with what the folder says. A head that neither folder nor weights
            have is new, see `new_head`.
        weights_from: files with all its weights, a head's too; None: the folder's own.
        new_head: whether the encoder has a head that is new.

    Raises:
        MissingInput: no config.json, or no weights.
        BadConfig: an unsupported encoder or module, a setting that contradicts the folder, or weights that do not fit.
        BadData: a file that cannot be read.
    """
    backbone, head = inspect_folder(folder, config)
    encoder = new_encoder(backbone, config)
    files = weights_from or weight_files(transformer_folder(folder))
    weights = {name: tensor for path in files for name, tensor in read_weights(path, config.weights_key).items()}
    if head and not weights_from:
        weights |= _head_weights(folder, head)
    if not fill(encoder, weights, files[0], head_key=config.head_key, allow_new_head=not (head or config.head_key)):
        encoder = encoder if new_head else load_encoder(folder, config.model_copy(update={"head": None}), weights_from)
    return encoder.eval()


def inspect_folder(folder: Path, config: ModelConfig) -> tuple[PreTrainedConfig, HeadConfig | None]:
    """The backbone's configuration, and the folder's head; contradictions between folder and config are errors.

    Raises:
        MissingInput, BadConfig, BadData: as `load_encoder`, weights aside.
    """
    modules = read_modules(folder)
    backbone = _backbone_config(transformer_folder(folder))
    if modules:
        _check_modules(folder, modules)
        _agree("model.pooling", config.pooling, _pooling(folder, modules))
        _agree("model.normalize", config.normalize, _normalizes(modules))
    if head := _head(folder, modules):
        _agree("model.head", config.model_dump()["head"], head.model_dump())
    return backbone, head


def text_positions(backbone: PreTrainedConfig) -> int:
    """Return the tokens of the longest text."""
    # RoBERTa and its like count positions from the padding token's id on: 514 of them are 512 tokens.
    padding = 1 + (backbone.pad_token_id or 0) if family_of(backbone).counts_from_padding else 0
    return int(backbone.max_position_embeddings) - padding


def own_form(folder: Path, config: ModelConfig) -> ModelConfig:
    """The configuration with pooling, normalization and head as the folder has them; whatever it does not say, as configured.

    A residual head that the folder lacks stays: new, it changes nothing.

    Raises:
        MissingInput, BadConfig, BadData: as `inspect_folder`.
    """
    modules, new = read_modules(folder), config.head if config.head and config.head.hidden else None
    found: dict[str, Any] = {"head": _head(folder, modules) or new}
    if modules:
        _check_modules(folder, modules)
        found |= {"pooling": _pooling(folder, modules), "normalize": _normalizes(modules)}
    return config.model_copy(update=found)


def save_folder(
    encoder: Encoder,
    folder: Path,
    source: Path,
    weights: Mapping[str, Tensor] | None = None,
    max_length: int | None = None,
    dimensions: int | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write an encoder as a model folder.

    Args:
        folder: created; files of the same names are replaced.
        source: a model folder from which tokenizer and prompts are taken.
        weights: the encoder's state in host memory, where it is on a device; None: it is on the host.
        max_length: tokens at which texts are cut, special ones included; None: as the source says.
        dimensions: size at which embeddings are published, see `read_dimensions`; None: whole.
        prompts: besides those of the source.
    """
    weights = encoder.state_dict() if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    origin = transformer_folder(source)
    for path in (origin / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if (record := read_object(source / PROMPTS)) or prompts:
        prompts = {**read_prompts(source), **(prompts or {})}
        # By these names, `encode_query`, `encode_document` and `encode`, which takes texts for documents, find what we found.
        own = {"prompts": {**(record.get("prompts") or {}), **prompts}, "default_prompt_name": "document"}
        record.pop("truncate_dim", None)  # it would cut the new embeddings as it did the source's
        _write_json(folder / PROMPTS, record | (own if any(prompts.values()) else {}))
    encoder.config.save_pretrained(folder)
    tensors, settings = _library_form(encoder, weights)
    # Weights are fp32, whatever the parent's were: transformers loads them in the type that it finds here. And the parent may
    # have been a classifier.
    _write_json(
        folder / "config.json",
        {name: value for name, value in read_object(folder / "config.json").items() if name not in LABELS}
        | {"dtype": "float32"}
        | settings,
    )
    _save(folder / WEIGHTS, tensors)
    names = [
        "Transformer",
        "Pooling",
        *("Dense" for _ in encoder.head_layers),
        *([CUT] if dimensions else []),
        *(["Normalize"] if encoder.normalize else []),
    ]
    paths = [f"{index}_{name}" if index else "" for index, name in enumerate(names)]
    _write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": MODULE_TYPE.format("Dense" if name == CUT else name)}
            for index, (name, path) in enumerate(zip(names, paths, strict=True))
        ],
    )
    _write_json(folder / SENTENCE_CONFIG, _sentence_config(origin, encoder.max_length, max_length))
    _write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": encoder.config.hidden_size,
            **{key: mode == encoder.pooling for mode, key in POOLING_KEYS.items()},
        },
    )
    _save_head(encoder, weights, folder)
    for task, classifier in encoder.classifiers.items():
        layer, path = _under(weights, f"classifiers.{task}."), folder / CLASSIFIERS / task
        _save_dense(path, layer["weight"].cpu() * cast(Classifier, classifier).scale, layer["bias"].cpu())
        _write_json(path / CLASSES, classifier.classes)
    if dimensions:
        _save_dense(folder / paths[names.index(CUT)], torch.eye(encoder.dimension)[:dimensions], torch.zeros(dimensions))


def _library_form(encoder: Encoder, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of WEIGHTS, and settings of config.json besides the backbone's: those of the library's backbone.

    Where the encoder has the form of the library's classifiers, see `Family.classifier`, they are those of one.
    """
    own, names, tasks = _under(weights, "backbone."), family_of(encoder.config).classifier, [*encoder.classifiers]
    if (
        not names
        or encoder.pooling != "cls"
        or encoder.normalize
        or len(tasks) != 1
        or not isinstance(encoder.head, nn.Sequential)
        or [*map(type, encoder.head)] != [nn.Linear, nn.Tanh]
        or encoder.dimension != encoder.config.hidden_size
    ):
        return own, {}
    classes = dict(enumerate(cast(Classifier, encoder.classifiers[tasks[0]]).classes))
    # transformers 4 refuses a backbone's names without their prefix where those of a classifier are there.
    found = {f"{encoder.backbone.base_model_prefix}.{name}": tensor for name, tensor in own.items()}
    for name, prefix in zip(names, ("head.0.", f"classifiers.{tasks[0]}."), strict=True):
        found |= {f"{name}.{part}": tensor for part, tensor in _under(weights, prefix).items()}
    return found, dict(
        zip(LABELS, (classes, {name: number for number, name in classes.items()}, "single_label_classification"), strict=True)
    )


def _kinds(modules: list[dict[str, str]]) -> list[str]:
    return [module["type"].rsplit(".", 1)[-1] for module in modules if not is_cut(module)]


def _normalizes(modules: list[dict[str, str]]) -> bool:
    return _kinds(modules)[-1] == "Normalize"


def _check_modules(folder: Path, modules: list[dict[str, str]]) -> None:
    kinds = _kinds(modules)
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise BadConfig(
            "the model folder has modules that are not supported",
            value=f"{folder}: {', '.join(kinds)}",
            rule="Transformer, Pooling, then optionally Dense, and Normalize",
            remedy="export the model without them",
        )


def _head(folder: Path, modules: list[dict[str, str]]) -> HeadConfig | None:
    if (folder / HEAD).is_file():
        return HeadConfig(hidden=read_weights(folder / HEAD)["w1"].shape[0])
    dense = [folder / module["path"] / "config.json" for module in modules if _kinds([module]) == ["Dense"]]
    return HeadConfig(layers=tuple(map(_head_layer, dense))) if dense else None


def _head_layer(path: Path) -> HeadLayer:
    """The layer of a `Dense` module's configuration."""
    record = read_object(path)
    layer = {"out": record.get("out_features"), "activation": str(record.get("activation_function")).rpartition(".")[2].lower()}
    with suppress(ValidationError):
        if all((record.get(key) or usual) == usual for key, usual in DENSE.items()):
            return HeadLayer.model_validate(layer)
    raise BadConfig(
        "this Dense module is not supported",
        value=f"{path}: {json.dumps(record)}",
        rule=f"out_features is a size, activation_function {', '.join(ACTIVATIONS)} of torch.nn; others are {json.dumps(DENSE)}",
        remedy="export the model without it",
    )


def _head_weights(folder: Path, head: HeadConfig) -> Weights:
    """The tensors of a folder's head, by their names in the encoder's state."""
    if head.hidden is not None:
        return {HEAD_TENSORS.get(name, name): tensor for name, tensor in read_weights(folder / HEAD).items()}
    found: Weights = {}
    for index, (layer, module) in enumerate(zip(head.layers, read_modules(folder)[2:], strict=False)):
        path = folder / module["path"]
        biased = read_object(path / "config.json").get("bias", True)
        tensors = read_weights(weight_files(path)[0]) | ({} if biased else {"linear.bias": torch.zeros(layer.out)})
        # Every second module of the encoder's head is an activation.
        found |= {name.replace("linear", f"head.{2 * index}"): tensor for name, tensor in tensors.items()}
    return found


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _save_head(encoder: Encoder, weights: Mapping[str, Tensor], folder: Path) -> None:
    layers = [(weights[f"{name}.weight"].cpu(), weights[f"{name}.bias"].cpu()) for name in encoder.head_layers]
    activations: list[type[nn.Module]] = [nn.ReLU, nn.Identity]
    if isinstance(encoder.head, nn.Sequential):
        activations = [type(activation) for activation in list(encoder.head)[1::2]]
    elif encoder.head is not None:
        _save(folder / HEAD, {short: weights[name] for short, name in HEAD_TENSORS.items()})
        (w1, b1), (w2, b2) = layers
        identity, zero = torch.eye(w1.shape[1]), torch.zeros(2 * w1.shape[1])
        widen = torch.cat([w1, identity, -identity]), torch.cat([b1, zero])
        layers = [widen, (torch.cat([w2, identity, -identity], dim=1), b2)]
    for place, (layer, activation) in enumerate(zip(layers, activations, strict=False), start=2):
        _save_dense(folder / f"{place}_Dense", *layer, activation)


def _save_dense(path: Path, weight: Tensor, bias: Tensor, activation: type[nn.Module] = nn.Identity) -> None:
    _write_json(
        path / "config.json",
        {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": True,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
        },
    )
    _save(path / WEIGHTS, {"linear.weight": weight, "linear.bias": bias})
