"""Classifiers of embeddings: a linear layer for each task with classes.

Their input is the whole embedding, normalized where embeddings are, so no second forward pass is needed. In a model
folder they are `classifiers/TASK`: a `Dense` module of sentence-transformers, and the names of the classes in `classes.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.config.sections import normalized
from pipeline.errors import BadConfig
from pipeline.log import log
from pipeline.model.encoder import Encoder
from pipeline.model.inventory import read_json
from pipeline.model.weights import read_weights

FOLDER = "classifiers"
CLASSES = "classes.json"
SEED = 0xC1A5
NORMALIZED_SCALE = 16.0
"""Of the logits of embeddings of length 1, as a temperature of 1/16: weights, which change by about the learning rate in a step,
would otherwise need very many steps to tell classes apart. A power of two, so that folders hold the product exactly."""


class Classifier(nn.Linear):
    """Embeddings (B, D) to logits (B, C): scale * W x + b.

    Args:
        dimension: D.
        classes: their names.
        normalized: whether embeddings have length 1.
    """

    def __init__(self, dimension: int, classes: Sequence[str], *, normalized: bool) -> None:
        super().__init__(dimension, len(classes))
        self.classes = tuple(classes)
        self.scale = NORMALIZED_SCALE if normalized else 1.0
        with torch.no_grad():
            self.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(SEED))
            self.bias.zero_()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's
        return input.float() @ self.weight.float().T * self.scale + self.bias.float()

    def classify(self, embeddings: npt.NDArray[np.floating]) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Return the most probable class of each embedding, (rows, D), and its probability."""
        with torch.no_grad():
            probabilities, numbers = self(torch.from_numpy(embeddings)).softmax(dim=1).max(dim=1)
        return [self.classes[number] for number in numbers.tolist()], probabilities.numpy()


def places_of(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the place that each class has among names, -1 where it has none."""
    places = {normalized(name): place for place, name in enumerate(names)}
    return [places.get(normalized(name), -1) for name in classes]


def load_classifier(folder: Path, task: str, dimension: int, *, normalized: bool) -> Classifier | None:
    """Return the classifier of a task in a model folder, None where it has none.

    Raises:
        BadConfig, BadData: files that do not fit each other.
    """
    home = folder / FOLDER / task
    if not home.is_dir():
        return None
    classifier = Classifier(dimension, read_json(home / CLASSES), normalized=normalized)
    found = {name.removeprefix("linear."): tensor for name, tensor in read_weights(home / "model.safetensors").items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != (expected := {name: tuple(tensor.shape) for name, tensor in classifier.state_dict().items()}):
        raise BadConfig("a classifier does not fit its classes", value=f"{home}: {shapes}", rule=f"shapes {expected}")
    classifier.load_state_dict({"weight": found["weight"] / classifier.scale, "bias": found["bias"]})
    return classifier


def load_classifiers(folder: Path, encoder: Encoder) -> dict[str, Classifier]:
    """Return the classifiers of a model folder by their tasks, in the order of these.

    Raises:
        BadConfig, BadData: see `load_classifier`.
    """
    found = {
        home.name: load_classifier(folder, home.name, encoder.dimension, normalized=encoder.normalize)
        for home in sorted((folder / FOLDER).glob("*/"))
    }
    return {task: classifier for task, classifier in found.items() if classifier}


def add_classifiers(encoder: Encoder, folder: Path, classes: Mapping[str, Sequence[str]]) -> None:
    """Add the classifiers of its tasks to an encoder. Classes in the model folder keep their weights; others start at random.

    Args:
        classes: `train.classes`.

    Raises:
        BadConfig, BadData: see `load_classifier`.
    """
    for task, names in classes.items():
        classifier = Classifier(encoder.dimension, names, normalized=encoder.normalize)
        if (known := load_classifier(folder, task, encoder.dimension, normalized=encoder.normalize)) is not None:
            places = torch.tensor(places_of(names, known.classes))
            kept = places >= 0
            if places.tolist() != [*range(len(known.classes))]:
                log.info("task %s: %d classes, %d of the parent's %d", task, len(names), int(kept.sum()), len(known.classes))
            with torch.no_grad():
                classifier.weight[kept] = known.weight[places[kept]]
                classifier.bias[kept] = known.bias[places[kept]]
        encoder.classifiers[task] = classifier
