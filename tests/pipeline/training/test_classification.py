"""Steps of tasks with classes against plain torch: the loss, one step among others, and in micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, BertForSequenceClassification

from pipeline.backends.device import Device, open_device
from pipeline.config import ModelConfig, TrainConfig
from pipeline.model.classifier import NORMALIZED_SCALE, add_classifiers, load_classifier
from pipeline.model.encoder import Encoder, prepare_for_training
from pipeline.model.folder import load_encoder, save_folder
from pipeline.model.loss import classification_loss
from pipeline.run.world import World
from pipeline.training.micro_batches import micro_batches
from pipeline.training.step import RecentLosses, build_optimizer, train_step
from tests.tiny import make_model

CLASSES = {"color": ("warm", "cold", "grey"), "size": ("large", "small")}


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


def classifying(folder: Path, *, normalize: bool = True) -> Encoder:
    encoder = make_model(folder).eval()
    encoder.normalize = normalize
    add_classifiers(encoder, folder, CLASSES)
    return encoder


def batch_of(task: str, rows: int, parts: int = 1) -> dict[str, torch.Tensor]:
    """Texts of a task, some of them filler, in micro-batches."""
    generator = torch.Generator().manual_seed(len(task))
    found = {
        f"classes:{task}": torch.randint(0, len(CLASSES[task]), (rows,), generator=generator, dtype=torch.int32),
        "weights": torch.full((rows,), 1 / (rows - 1)),
        "learning_rate": torch.tensor([1e-3]),
    }
    found["weights"][-1] = 0.0
    for number, tokens in enumerate(torch.randint(5, 100, (rows, 10), generator=generator).chunk(parts)):
        own = torch.arange(len(tokens))
        texts = {"tokens:0": tokens, "mask:0": torch.ones_like(tokens), "query_texts": own, "document_texts": 0 * own}
        found |= {f"{name}/{number}": tensor for name, tensor in texts.items()}
    return found


def plain_loss(encoder: Encoder, batch: dict[str, torch.Tensor], task: str) -> torch.Tensor:
    embeddings = torch.cat([encoder(part["tokens:0"], part["mask:0"]) for part in micro_batches(batch)])
    classifier: Any = encoder.classifiers[task]
    scale = NORMALIZED_SCALE if encoder.normalize else 1.0
    losses = F.cross_entropy(
        scale * F.linear(embeddings, classifier.weight) + classifier.bias, batch[f"classes:{task}"].long(), reduction="none"
    )
    return (losses * batch["weights"]).sum()


def test_the_loss_is_cross_entropy() -> None:
    logits, weights = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 9, torch.linspace(0, 1, 7)
    classes = torch.tensor([0, 4, 2, 2, 1, 3, 0], dtype=torch.int32)
    expected = (F.cross_entropy(logits, classes.long(), reduction="none") * weights).sum()
    assert classification_loss(logits, classes, weights).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_steps_of_two_tasks_equal_plain_torch(tmp_path: Path, device: Device, parts: int, normalize: bool) -> None:
    # A large epsilon: Adam makes full steps out of gradients that are nothing but rounding.
    config = TrainConfig(weight_decay=0.1, clip_norm=None, epsilon=1e-3, micro_batches=parts, batch_size=6)
    ours, plain = (classifying(tmp_path / name, normalize=normalize) for name in ("ours", "plain"))
    optimizer, losses = build_optimizer(ours, config, device, adds_up=parts > 1), RecentLosses(4, device)
    decayed = [one for one in plain.parameters() if one.ndim >= 2]
    rest = [one for one in plain.parameters() if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, foreach=False)
    expected = []
    for task in ("color", "size", "color"):
        batch = batch_of(task, 6, parts)
        train_step(ours, optimizer, device, batch, config, losses, seed_of=int)
        reference.zero_grad(set_to_none=False)
        loss = plain_loss(plain, batch, task)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        reference.step()
        expected.append(loss.item())
    assert [loss for loss, _ in losses.read()] == pytest.approx(expected, rel=1e-5)
    for (name, own), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, atol=2e-6), name


def test_a_folder_keeps_classifiers_bit_for_bit(tmp_path: Path) -> None:
    encoder = classifying(tmp_path / "model")
    with torch.no_grad():
        encoder.classifiers["color"].weight.normal_()  # type: ignore[operator, union-attr]
    save_folder(encoder, tmp_path / "saved", tmp_path / "model")
    found = load_classifier(tmp_path / "saved", "color", encoder.dimension, normalized=True)
    assert found is not None
    assert found.classes == CLASSES["color"]
    assert torch.equal(found.weight, encoder.classifiers["color"].weight)  # type: ignore[arg-type]
    assert load_classifier(tmp_path / "saved", "shape", encoder.dimension, normalized=True) is None


def test_bert_with_a_tanh_head_trains_as_transformers_has_it(tmp_path: Path, device: Device) -> None:
    """BertForSequenceClassification: the first token's vector, a tanh layer (its pooler), a linear layer; without dropout."""
    make_model(tmp_path / "model")
    backbone = AutoConfig.from_pretrained(tmp_path / "model")
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
        setattr(backbone, name, 0.0)
    backbone.num_labels = len(CLASSES["color"])
    theirs = BertForSequenceClassification(backbone).train()
    backbone.save_pretrained(tmp_path / "base")
    head = [{"out": backbone.hidden_size, "activation": "tanh"}]
    form = ModelConfig.model_validate({"pooling": "cls", "normalize": False, "head": head, "head_key": "bert.pooler.{}"})
    state = {name.replace("pooler.dense", "pooler.0"): tensor for name, tensor in theirs.state_dict().items()}
    torch.save(state, tmp_path / "gpu.pt")
    ours = load_encoder(tmp_path / "base", form, [tmp_path / "gpu.pt"])
    add_classifiers(ours, tmp_path, {"color": CLASSES["color"]})
    ours.classifiers["color"].load_state_dict(theirs.classifier.state_dict())
    prepare_for_training(ours, fused_attention=False, dropout=0.0)
    config = TrainConfig(weight_decay=0.0, clip_norm=None, epsilon=1e-3, batch_size=6)
    optimizer, losses = build_optimizer(ours, config, device), RecentLosses(8, device)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    expected = []
    batch = batch_of("color", 6)
    batch["weights"] = torch.full((6,), 1 / 6)
    for _ in range(6):
        train_step(ours, optimizer, device, batch, config, losses, seed_of=int)
        reference.zero_grad()
        loss = theirs(input_ids=batch["tokens:0/0"], attention_mask=batch["mask:0/0"], labels=batch["classes:color"].long()).loss
        loss.backward()
        reference.step()
        expected.append(loss.item())
    assert [loss for loss, _ in losses.read()] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.02
