"""The families of backbones. A row of FAMILIES is all that a family needs; docs/internals.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import BertModel, ModernBertModel, MPNetModel, PreTrainedConfig, RobertaModel, XLMRobertaModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaSelfAttention

from pipeline.errors import BadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences between families of backbones.

    Attributes:
        model: makes the library's model of its configuration, without a pooler.
        attention: the module of a layer that makes probabilities of scores.
        fused: the library computes attention through its own interface, which has a fused kernel (`sdpa`) and takes others.
        counts_from_padding: position ids start after the padding token's id, as in RoBERTa, instead of at 0.
        token_types: whether there are token type embeddings.
        windows: some layers see only the tokens within `config.sliding_window`; the library takes a mask for each kind of layer.
        gated: the inner product of a layer is `config.intermediate_size` wide twice: one half is the other's gate.
        dropout: the configuration's name for the dropout of hidden states.
        unused: beginnings of names, under any prefix: parts of pretrained models that an embedding never passes through.
        classifier: names of the two layers, with tanh between them, by which the library's classifiers of texts make logits of
            the first token; None: they have others.
    """

    model: Callable[[Any], Any]
    attention: type[nn.Module]
    fused: bool = True
    counts_from_padding: bool = False
    token_types: bool = False
    windows: bool = False
    gated: bool = False
    dropout: str = "hidden_dropout_prob"
    unused: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.")
    classifier: tuple[str, str] | None = ("classifier.dense", "classifier.out_proj")


FAMILIES = {
    "bert": Family(
        model=partial(BertModel, add_pooling_layer=False),
        attention=BertSelfAttention,
        token_types=True,
        classifier=("bert.pooler.dense", "classifier"),
    ),
    "roberta": Family(
        model=partial(RobertaModel, add_pooling_layer=False),
        attention=RobertaSelfAttention,
        counts_from_padding=True,
        token_types=True,
    ),
    "xlm-roberta": Family(
        model=partial(XLMRobertaModel, add_pooling_layer=False),
        attention=XLMRobertaSelfAttention,
        counts_from_padding=True,
        token_types=True,
    ),
    # Its relative position bias is added to the scores in the library's own code.
    "mpnet": Family(
        model=partial(MPNetModel, add_pooling_layer=False),
        attention=MPNetSelfAttention,
        fused=False,
        counts_from_padding=True,
    ),
    # Rotary positions, windows and gated layers: Warner et al. 2024, "Smarter, Better, Faster, Longer".
    "modernbert": Family(
        model=ModernBertModel,
        attention=ModernBertAttention,
        windows=True,
        gated=True,
        dropout="mlp_dropout",
        unused=("head.dense.", "head.norm.", "decoder.", "classifier."),
        classifier=None,
    ),
}
"""By `model_type` of config.json."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a backbone's configuration.

    Raises:
        BadConfig: none of ours.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise BadConfig(
            "this kind of encoder is not supported",
            value=f"model_type: {config.model_type}",
            rule=f"one of {', '.join(FAMILIES)}",
            remedy="docs/internals.md says how to add a family",
        )
    if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        raise BadConfig(
            "this kind of position embedding is not supported", value=config.position_embedding_type, rule="absolute positions"
        )
    return family
