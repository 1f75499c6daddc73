"""Weight files of any origin as tensors under an encoder's own names, checked to the last one.

A file may be safetensors or what `torch.save` wrote, on any device, wrapped in a training checkpoint, its names under prefixes
that wrappers left (`module.`, `0.auto_model.`, `bert.`, ...). Pickles are read with `weights_only`: none gets to run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import BadConfig, BadData, MissingInput, first_line
from pipeline.log import log
from pipeline.model.encoder import Encoder
from pipeline.model.families import family_of

Weights = dict[str, Tensor]

WRAPPER_KEYS = ("state_dict", "model_state_dict", "model", "module", "model_state", "net", "encoder", "weights")
"""Where training checkpoints keep the weights, in the order they are looked for."""

UNUSED_ENDINGS = ("position_ids", "token_type_ids", "logit_scale", "temperature")
"""Buffers that old versions stored, and a contrastive loss's own scalar."""

RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names that the oldest BERT checkpoints use."""


def read_weights(path: Path, key: str | None = None) -> Weights:
    """All tensors of one weight file, on the host.

    Args:
        path: `.safetensors`, or a file that `torch.save` wrote.
        key: where a training checkpoint holds the weights (dots go deeper); None: found.

    Raises:
        MissingInput: no such file.
        BadData: truncated or not a weight file.
        BadConfig: a pickle with more than data in it, or no weights where they should be.
    """
    if not path.is_file():
        raise MissingInput("the weight file does not exist", value=path)
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    return _unwrap(_read_pickle(path), key, path)


def fill(
    encoder: Encoder, weights: Mapping[str, Tensor], source: Path, *, head_key: str | None = None, allow_new_head: bool = True
) -> bool:
    """Copy weights into an encoder, as fp32. Every tensor must be there in its shape, and none may be left over.

    Args:
        weights: under any prefix.
        source: for messages.
        head_key: see `ModelConfig`.
        allow_new_head: leave a head unchanged of which the weights have nothing.

    Returns:
        Whether the head, if it has one, is that of the weights.

    Raises:
        BadConfig: missing, left over or wrongly shaped tensors, all of them named.
        BadData: values that are not finite.
    """
    # Every backbone has exactly one tensor of this name; before it is the prefix that wrappers added.
    anchor = next(name for name, tensor in encoder.backbone.named_parameters() if tensor is encoder.word_embeddings)
    prefix, copies = _prefix(weights, anchor, source)
    if prefix is None:
        raise BadConfig(
            "the weight file is not one of a supported encoder",
            value=list(weights)[:10],
            rule=f"one tensor is named ...{anchor}",
            remedy="check model.initial or model.parent, and model.weights_key for a training checkpoint",
        )
    head = _head_names(encoder, weights, head_key)
    head_prefix, head_copies = _prefix(weights, next(iter(head.values())), source) if head else (None, [])
    copies += head_copies
    # Under our names, but the head's under those of the file, without their prefix.
    found: Weights = {}
    for name, tensor in weights.items():
        if head_prefix is not None and name.startswith(head_prefix) and name[len(head_prefix) :] in head.values():
            found[name[len(head_prefix) :]] = tensor
        elif not any(name.startswith(copy) for copy in copies):
            found[_own_name(name, prefix)] = tensor
    with_head = head_prefix is not None or not allow_new_head
    names = {name: head.get(name, name) for name in encoder.state_dict() if with_head or name.startswith("backbone.")}
    expected = {names[name]: tensor for name, tensor in encoder.state_dict().items() if name in names}
    _check(found, expected, family_of(encoder.config).unused, source)
    if broken := [name for name in names.values() if not bool(torch.isfinite(found[name]).all())]:
        raise BadData("the weights have values that are not finite", value=[f"{source.name}: {name}" for name in broken])
    encoder.load_state_dict({name: found[theirs].float() for name, theirs in names.items()}, strict=with_head)
    return with_head or not encoder.head_layers


def _head_names(encoder: Encoder, weights: Mapping[str, Tensor], key: str | None) -> dict[str, str]:
    """Return the names of the head's tensors, ours and without a prefix those of the weights, in the order of its layers."""
    ours = list(encoder.head_layers)
    theirs = ours
    if key is not None:
        pattern = re.compile(rf"(?:.*\.)?{re.escape(key)}\.(?:weight|bias)".replace(r"\{\}", r"(\d+)"))
        numbers = sorted({int(match[1]) for match in map(pattern.fullmatch, weights) if match})
        # A folder of ours has its head under our names, whatever the key of its first parent's was.
        theirs = [key.format(number) for number in numbers] + ours[len(numbers) :]
    return {f"{own}.{kind}": f"{name}.{kind}" for own, name in zip(ours, theirs, strict=False) for kind in ("weight", "bias")}


def _prefix(weights: Mapping[str, Tensor], anchor: str, source: Path) -> tuple[str | None, list[str]]:
    """Return the prefix of an encoder's own names, and the prefixes of equal copies of it.

    Raises:
        BadConfig: several encoders that differ.
    """
    if not (prefixes := [name[: -len(anchor)] for name in weights if name == anchor or name.endswith(f".{anchor}")]):
        return None, []
    first, *others = prefixes
    # Towers that share their weights are stored once per tower: any of them will do.
    if not all(_same(weights, first, other) for other in others):
        raise BadConfig(
            "the weight file holds several different encoders",
            value=[f"{source.name}: {prefix}..." for prefix in prefixes],
            rule="one encoder embeds queries and documents",
            remedy="store the one to continue from in a file of its own",
        )
    return first, others


def _same(weights: Mapping[str, Tensor], one: str, other: str) -> bool:
    mine, theirs = (
        {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)} for prefix in (one, other)
    )
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def _own_name(name: str, prefix: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return f"backbone.{name[len(prefix) :]}" if name.startswith(prefix) else name


def _check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], unused: tuple[str, ...], source: Path) -> None:
    problems = [f"{name}: missing, shape {tuple(tensor.shape)}" for name, tensor in expected.items() if name not in found]
    unneeded = []
    for name, tensor in found.items():
        if name in expected:
            if tensor.shape != expected[name].shape:
                problems.append(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}")
            elif not tensor.is_floating_point():
                problems.append(f"{name}: {tensor.dtype}, expected floating point")
        elif _is_unused(name, unused):
            unneeded.append(name)
        else:
            problems.append(f"{name}: left over, shape {tuple(tensor.shape)}")
    if problems:
        raise BadConfig(
            "the weights do not fit the encoder",
            value=[f"{source.name}: {problem.removeprefix('backbone.')}" for problem in problems],
            rule="every tensor of config.json's architecture (and model.head's), in its shape, and no other",
            remedy="check model.base, model.weights_key, model.head and model.head_key",
        )
    if unneeded:
        log.info("%s: not needed and not loaded: %s", source.name, ", ".join(unneeded))


def _is_unused(name: str, unused: tuple[str, ...]) -> bool:
    inner = name.removeprefix("backbone.")
    return inner.endswith(UNUSED_ENDINGS) or any(f".{part}" in f".{inner}" for part in unused)


def _read_pickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if wanted := [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported class" in line]:
            raise BadConfig(
                "the weight file was refused: it is a pickle that wants to run code",
                value=[f"{path}: {line}" for line in wanted],
                rule="pickles are read as data only (torch.load with weights_only)",
                remedy="save model.state_dict() alone, best as safetensors",
            ) from error
        raise _unreadable(path, error) from error


def _numpy_globals() -> list[Any]:
    """Plain numbers that training checkpoints hold besides the weights (best scores, random states)."""
    multiarray = np._core.multiarray  # type: ignore[attr-defined]
    return [
        np.ndarray,
        np.dtype,
        *(type(np.dtype(name)) for name in ("float64", "float32", "int64", "uint32", "bool")),
        *(
            (getattr(multiarray, name), f"numpy.{core}.multiarray.{name}")
            for name in ("scalar", "_reconstruct")
            for core in ("core", "_core")
        ),
    ]


def _unreadable(path: Path, error: Exception) -> BadData:
    return BadData(
        "the weight file cannot be read: truncated, or not what its name says",
        value=f"{path}: {first_line(error)}",
        rule="safetensors, or a file that torch.save wrote",
        remedy="copy the file again",
    )


def _unwrap(record: Any, key: str | None, path: Path) -> Weights:
    if key is not None:
        for part in key.split("."):
            if not isinstance(record, Mapping) or part not in record:
                raise BadConfig(
                    "the training checkpoint has no such key",
                    value=f"model.weights_key = {key}",
                    rule=f"at {part!r} there is: {_describe(record)}",
                    remedy="correct model.weights_key, or leave it out",
                )
            record = record[part]
        if not _is_weights(record):
            raise BadConfig("there are no weights under this key", value=f"model.weights_key = {key}: {_describe(record)}")
        return dict(record)
    if (found := _find(record)) is None:
        raise BadConfig(
            "no weights were found in the training checkpoint",
            value=f"{path}: {_describe(record)}",
            rule=f"names and tensors, alone or under one of {', '.join(WRAPPER_KEYS)}",
            remedy="set model.weights_key to the key that holds them",
        )
    return found


def _find(record: Any) -> Weights | None:
    if _is_weights(record):
        return dict(record)
    if not isinstance(record, Mapping):
        return None
    for key in WRAPPER_KEYS:
        if key in record and (found := _find(record[key])) is not None:
            return found
    candidates = [value for value in record.values() if _is_weights(value)]
    return dict(candidates[0]) if len(candidates) == 1 else None


def _is_weights(record: Any) -> bool:
    return (
        isinstance(record, Mapping)
        and bool(record)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in record.items())
    )


def _describe(record: Any) -> str:
    if isinstance(record, Mapping):
        return "keys " + ", ".join(f"{key} ({type(value).__name__})" for key, value in list(record.items())[:20])
    return f"a {type(record).__name__}"
