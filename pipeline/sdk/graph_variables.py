"""The environment variables that change graphs on Neuron, and their values."""

from __future__ import annotations

import os
from collections.abc import Mapping

REDUCE_BUCKET = "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"
REDUCE_BUCKET_MIB = {"one node": 50, "gang": 512}
"""Gradients are reduced in pieces of this size. 50 is torch-xla's value on Neuron; AWS recommends 512 for BERT on several nodes
(torch-neuron-envvars.rst)."""

GRAPH_VARIABLES = (
    *("NEURON_CUSTOM_SILU", "NEURON_TRANSFER_WITH_STATIC_RING_OPS", "NEURON_TRANSFER_ALL_PARAMETERS_WITH_STATIC_RING"),
    *("XLA_DISABLE_FUNCTIONALIZATION", "XLA_ENABLE_PARAM_ALIASING", "XLA_USE_32BIT_LONG"),
)
"""Variables without a default here that change graphs or their lowering where they are set (torch-neuron-envvars.rst)."""


def graph_environment(nodes: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that change training's graphs: as the environment sets them, else as AWS's training scripts do.

    Args:
        nodes: of the gang.
    """
    bucket = REDUCE_BUCKET_MIB["gang" if nodes > 1 else "one node"]
    defaults = {"NEURON_FUSE_SOFTMAX": "1", REDUCE_BUCKET: str(bucket)}
    return defaults | {name: value for name in (*defaults, *GRAPH_VARIABLES) if (value := environment.get(name))}
