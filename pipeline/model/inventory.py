"""The files of a model that a run needs, found without loading them: weights, config.json and tokenizer.

prepare requires them of every parent; `trnpipe local` checks a local one before it starts anything. Loads no framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import store
from pipeline.allowed_uris import FILE, is_inside, is_s3
from pipeline.errors import BadConfig, BadData, MissingInput

if TYPE_CHECKING:
    from pipeline.dataset.tokens import TextTokenizer
    from pipeline.run_inputs import TokenizerPlan

MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "mpnet", "modernbert")
"""`model_type`s of config.json: those of the encoder's families."""

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler", "head.safetensors")
"""Beginnings of names of other files that trainers leave next to the weights."""

OTHER_FORMATS = (".onnx", ".h5", ".msgpack", ".ot")
"""Suffixes of the same weights for other frameworks."""

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
"""A tokenizer is there if one of these is."""

SENTENCE_CONFIG = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of the prompts of queries and of documents, as sentence-transformers' encode_query and encode_document look for them."""

CUT = "Cut"
"""In a folder `N_Cut` stands the module that cuts embeddings to their published size, as this pipeline writes it."""

DOWNLOAD = "download a model of the Hugging Face Hub first: hf download NAME --local-dir DIR"


def check_local_model(uri: str, base: str | None) -> None:
    """Check that the files of a local model are there. It loads none of them, and does not look at s3:// URIs.

    Args:
        base: model.base, the folder of config.json and tokenizer for weights without them.

    Raises:
        MissingInput, BadConfig, BadData: as `local_model` and `model_files`.
    """
    if is_s3(uri):
        return
    model = local_model(uri)
    if base is None or not is_s3(base):
        model_files(model, uri, None if base is None else local_model(base))


def local_model(uri: str) -> Path:
    """Return the path of a local model.

    Raises:
        MissingInput: nothing is there.
    """
    path = Path(uri.removeprefix(FILE))
    if not path.exists():
        raise MissingInput(
            "the model does not exist",
            value=uri,
            rule="a model is a folder or a weight file on this machine, or an s3:// URI",
            remedy=f"check the path; {DOWNLOAD}",
        )
    return path


def model_files(model: Path, uri: str, base: Path | None) -> tuple[list[Path], Path]:
    """Return a model's weight files, and the folder that gives its configuration and its tokenizer: its own, or the base.

    Args:
        model: local folder or weight file.
        uri: the name of the model, for messages.
        base: folder of config.json and tokenizer for weights without them; None: those in the model's folder.

    Raises:
        MissingInput: no weights, or no config.json.
        BadConfig: several weight files, no tokenizer, or an unsupported encoder.
        BadData: a file that cannot be read.
    """
    if model.is_dir():
        folder = transformer_folder(model)
        files, complete = weight_files(folder), has_tokenizer(folder) and (folder / "config.json").is_file()
        source = model if complete or base is None else base
    else:
        files, source = [model], base or model.parent
    where, folder = uri if source == model else source, transformer_folder(source)
    if not (folder / "config.json").is_file():
        raise MissingInput(
            "there is no config.json for the parent's weights",
            value=where,
            rule="a bare weight file needs a folder with config.json and tokenizer",
            remedy="set model.base to such a folder",
        )
    check_model_type(folder / "config.json")
    if not has_tokenizer(folder):
        raise BadConfig(
            "the parent has no tokenizer",
            value=where,
            rule=f"a tokenizer is one of {', '.join(VOCABULARIES)}",
            remedy="set model.base to a folder with config.json and tokenizer",
        )
    return files, source


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model folder's weights: one, or all shards that an index names.

    Raises:
        MissingInput: none.
        BadConfig: several candidates.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise BadData("the index of the weight files cannot be read", value=f"{index}: {error}") from error
            if not names or not all(is_inside(name) for name in names):
                raise BadData("the index names no weight files of its folder", value=f"{index}: {sorted(map(str, names))}")
            return [folder / name for name in sorted(names)]
    if not (found := _possible_weights(folder)):
        inner = [path.parent for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/config.json")) if _is_model(path)]
        raise MissingInput(
            "the model folder has no weight file",
            value=folder,
            rule="model.safetensors, or one weight file",
            remedy=f"name the model's own folder: {' or '.join(map(str, inner))}" if inner else DOWNLOAD,
        )
    if len(found) > 1:
        raise BadConfig(
            "the model folder has several weight files", value=[path.name for path in found], remedy="name the one to load"
        )
    return found


def _possible_weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES and not path.name.startswith(NOT_WEIGHTS))


def _is_model(config: Path) -> bool:
    """Whether a config.json is that of a supported encoder whose weights are in the same folder."""
    try:
        check_model_type(config)
    except (BadConfig, BadData):
        return False
    return bool(_possible_weights(config.parent))


def check_model_type(config: Path) -> None:
    """Refuse the config.json of an encoder that is not supported.

    Raises:
        BadConfig: not one of MODEL_TYPES.
        BadData: no JSON.
    """
    record = read_json(config)
    found = record.get("model_type") if isinstance(record, dict) else type(record).__name__
    if found not in MODEL_TYPES:
        raise BadConfig(
            "this kind of encoder is not supported",
            value=f"{config}: model_type {found}",
            rule=f"one of {', '.join(MODEL_TYPES)}",
            remedy="continue from a model of one of these types; docs/internals.md says how to add one",
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a vocabulary in any form."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def transformer_folder(folder: Path) -> Path:
    """Return the folder of config.json and weights: the folder itself, or the one that modules.json names (`0_Transformer`)."""
    modules = read_modules(folder)
    return folder / modules[0]["path"] if modules else folder


def read_modules(folder: Path) -> list[dict[str, str]]:
    """Return the modules of a sentence-transformers folder, each with type and path; none of another folder.

    Raises:
        BadData: modules.json cannot be used.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) and _is_module(module) for module in modules):
        raise BadData("modules.json cannot be used", value=path, rule="a list of {type, path}, each path a folder beside it")
    return [{key: str(module[key]) for key in ("type", "path")} for module in modules]


def _is_module(module: Mapping[str, Any]) -> bool:
    path = module.get("path")
    return isinstance(module.get("type"), str) and (path == "" or is_inside(path))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        BadData: no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadData("the file is not valid JSON", value=f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one where there is no file.

    Raises:
        BadData: no JSON object.
    """
    record = read_json(path) if path.is_file() else {}
    if not isinstance(record, dict):
        raise BadData("the file holds no JSON object", value=path)
    return record


def read_prompts(folder: Path) -> dict[str, str]:
    """Return the texts that a model folder puts before every `query` and every `document`, empty ones where it has none; and
    under their names its others, which precede the queries of the tasks of these names.

    A side that the folder names no prompt for has its default prompt, if it has one.

    Raises:
        BadData: prompts that are not text, or a default that is none of them.
    """
    record = read_object(folder / PROMPTS)
    prompts, default = record.get("prompts") or {}, record.get("default_prompt_name")
    texts = prompts.values() if isinstance(prompts, dict) else [0]
    if not all(isinstance(text, str | None) for text in texts) or (default is not None and str(default) not in prompts):
        raise BadData(
            "the model's prompts cannot be used",
            value=f"{folder / PROMPTS}: prompts {prompts}, default_prompt_name {default}",
            rule="prompts: {name: text}; default_prompt_name is one of the names, or null",
        )
    named = {side: [prompts[name] for name in names if name in prompts] for side, names in PROMPT_NAMES.items()}
    return {
        **{side: next(filter(None, found or [prompts.get(default)]), "") for side, found in named.items()},
        **{
            name: text
            for name, text in sorted(prompts.items())
            if text is not None and name not in sum(PROMPT_NAMES.values(), ())
        },
    }


def load_tokenizer(folder: Path, plan: TokenizerPlan | None = None) -> TextTokenizer:
    """Return the tokenizer of a model folder, with its prompts and its lower-casing.

    Args:
        plan: the tokenizer that it must be.

    Raises:
        MissingInput, BadConfig, BadData: see `TextTokenizer` and `read_prompts`.
    """
    from pipeline.dataset.tokens import TextTokenizer  # here: it loads pyarrow, for which a check of the files has no use

    inner, prompts = transformer_folder(folder), read_prompts(folder)
    lower = bool(read_object(inner / SENTENCE_CONFIG).get("do_lower_case"))
    return TextTokenizer.planned(inner, plan, prompts, lower=lower) if plan else TextTokenizer(inner, prompts, lower=lower)


def read_max_length(folder: Path) -> int | None:
    """Return the tokens at which a model folder cuts texts, special ones included; None: it does not say."""
    found = read_object(transformer_folder(folder) / SENTENCE_CONFIG).get("max_seq_length")
    return found if isinstance(found, int) else None


def is_cut(module: Mapping[str, str]) -> bool:
    """Return whether a module of `read_modules` is CUT."""
    return module["path"].endswith(f"_{CUT}")


def read_dimensions(folder: Path) -> int | None:
    """Return the size at which a model folder's embeddings are published, see `CUT`; None: whole."""
    cut = [module["path"] for module in read_modules(folder) if is_cut(module)]
    return int(read_object(folder / cut[0] / "config.json")["out_features"]) if cut else None


def fetch_without_weights(uri: str, cache: Path) -> Path:
    """Return a local folder with the files of a model folder but its weights; the small ones of the head are among them.

    Raises:
        MissingInput: no files there.
    """
    if not store.is_s3(uri):
        return store.local_folder(uri, cache)
    if not (infos := store.list_objects(uri)):
        raise MissingInput("there is no model here", value=uri, remedy="check the URI")
    for info in infos:
        if info.uri.endswith("/head.safetensors") or not info.uri.endswith((*WEIGHT_SUFFIXES, *OTHER_FORMATS)):
            store.download(info.uri, cache / info.uri.removeprefix(uri.rstrip("/") + "/"))
    return cache
