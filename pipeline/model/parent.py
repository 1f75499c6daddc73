"""The model a run continues from, wherever it comes from, as a model folder that every stage can load.

Accepted: a Hugging Face or sentence-transformers folder, one of our checkpoint folders, a `.safetensors` file, what `torch.save`
wrote (a state_dict, also from a GPU, or a training checkpoint around one). Bare weight files take config.json and tokenizer from
`model.base`, or from the files in the same folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pipeline import store
from pipeline.allowed_uris import is_inside
from pipeline.config import ModelConfig
from pipeline.errors import BadConfig, BadData
from pipeline.log import log
from pipeline.model.classifier import load_classifiers
from pipeline.model.folder import CONFIG_FILES, WEIGHTS, load_encoder, save_folder
from pipeline.model.inventory import local_model, model_files, read_prompts


@dataclass(frozen=True, slots=True)
class ResolvedParent:
    """A parent that was loaded once to prove that it can be.

    Attributes:
        folder: local model folder.
        sha256: of the weight file as it was found (of all of them, if it is sharded).
        converted: `folder` was made here and stands nowhere else; otherwise it is (a copy of) the parent itself.
    """

    folder: Path
    sha256: str
    converted: bool


def resolve_parent(uri: str, config: ModelConfig, scratch: Path) -> ResolvedParent:
    """Fetch a parent, check every tensor of it, and convert it where it is not a model folder already, or lacks a prompt.

    Args:
        uri: s3:// or local; a folder or a weight file.
        config: the form of the encoder, its prompts, `base` and `weights_key`.
        scratch: local folder for downloads and the conversion.

    Raises:
        MissingInput: nothing there, or no config.json.
        BadConfig: weights that do not fit, a pickle with code in it, an unsupported encoder, no tokenizer, other prompts.
        BadData: truncated or corrupt files.
    """
    base = store.local_folder(config.base, scratch / "base") if config.base else None
    if store.exists(uri):
        model = store.local_file(uri, scratch / "parent")
        base = base or _beside(uri, scratch)
    else:
        model = store.local_folder(uri, scratch / "parent") if store.is_s3(uri) else local_model(uri)
        _verify_manifest(model)
    files, source = model_files(model, uri, base)
    known = read_prompts(source)
    prompts = {name: text for name, text in (config.prompts or {}).items() if text != known.get(name)}
    if other := [f"{name}: {known[name]!r}, model.prompts: {text!r}" for name, text in prompts.items() if known.get(name)]:
        raise BadConfig(
            "the model has other prompts",
            value=[f"{source}: {each}" for each in other],
            rule="a model embeds texts behind the prompts that it was trained with",
            remedy="set model.prompts as the folder has them, or leave it out; or continue from a model without prompts",
        )
    if prompts or source != model or [path.name for path in files] != [WEIGHTS]:
        # Without `files` a folder's head is read as well. A new one is train's: the parent is measured as it is.
        encoder = load_encoder(source, config, None if source == model else files, new_head=False)
        encoder.classifiers.update(load_classifiers(source, encoder))
        save_folder(encoder, scratch / "converted", source, prompts=prompts)
        log.info("converted %s into a model folder", files[0].name)
        return ResolvedParent(scratch / "converted", _digest(files), converted=True)
    load_encoder(model, config)
    return ResolvedParent(model, _digest(files), converted=False)


def _beside(uri: str, scratch: Path) -> Path:
    """Configuration and tokenizer from the folder that a weight file stands in."""
    if not store.is_s3(uri):
        return Path(uri.removeprefix("file://")).parent
    parent, folder = uri.rsplit("/", 1)[0], scratch / "beside"
    for name in CONFIG_FILES:
        if store.exists(store.join(parent, name)):
            store.download(store.join(parent, name), folder / name)
    return folder


def _verify_manifest(folder: Path) -> None:
    """A checkpoint of ours says what its files were; one that has changed since is not loaded."""
    path = folder / "manifest.json"
    if not path.is_file():
        return
    try:
        files = json.loads(path.read_text())["files"]
        if outside := [name for name in files if not is_inside(name)]:
            raise ValueError(f"files outside of the folder: {outside}")
        present = {name: store.sha256_file(folder / name) for name in files if (folder / name).is_file()}
        changed = [name for name, entry in files.items() if present.get(name) != entry["sha256"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadData("the checkpoint's manifest cannot be read", value=f"{path}: {error}") from error
    if changed:
        raise BadData("the checkpoint's files are not what its manifest says", value=[str(folder / name) for name in changed])


def _digest(files: list[Path]) -> str:
    digests = [store.sha256_file(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
