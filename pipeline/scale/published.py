"""What is documented of the hosts, and what was published of models on them: the figures that the scale model rests on.

Sources: the Neuron SDK's documentation (aws-neuron/aws-neuron-sdk), by page. Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TERA, MIB, GIB = 1e12, 1 << 20, 1 << 30

CORE_FLOPS = 95 * TERA
"""Peak of a NeuronCore-v2 in bf16, fp16, tf32 or fp8, the same on Trn1 and Inf2 (about-neuron/arch/neuron-hardware/trn1-arch.rst,
inf2-arch.rst: 190 TFLOPS a chip of two cores)."""

CORES_PER_CHIP = 2

NEURONLINK_BYTES = 384 * GIB
"""Per second. trn1-arch.rst lists 384 for a trn1.32xlarge without a unit; taken as GiB/s of a chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """An instance type.

    Attributes:
        family: `trn1` or `inf2`, as neuronx-cc's target is called.
        chips: of two NeuronCores each (trn1-arch.rst, inf2-arch.rst).
        vcpus, memory_gib: of the host (same pages).
        network: bytes per second between hosts, 0 where gangs are not possible (trn1-arch.rst: 800 Gbps of EFA).
    """

    family: str
    chips: int
    vcpus: int
    memory_gib: int
    network: float = 0.0

    @property
    def cores(self) -> int:
        """NeuronCores, one rank each."""
        return self.chips * CORES_PER_CHIP

    @property
    def flops(self) -> float:
        """Peak in bf16."""
        return self.cores * CORE_FLOPS

    @property
    def job_vcpus(self) -> int:
        """Of a job that has the host to itself, as its definition asks (infra/settings.Hardware)."""
        return self.vcpus * 3 // 4

    @property
    def job_memory(self) -> int:
        """Bytes, likewise."""
        return (self.memory_gib * 1024 * 15 // 16 - 1024) * MIB


TRAIN_HOST = "trn1.32xlarge"

HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        TRAIN_HOST: Host(family="trn1", chips=16, vcpus=128, memory_gib=512, network=800e9 / 8),
        "inf2.xlarge": Host(family="inf2", chips=1, vcpus=4, memory_gib=16),
        "inf2.8xlarge": Host(family="inf2", chips=1, vcpus=32, memory_gib=128),
        "inf2.24xlarge": Host(family="inf2", chips=6, vcpus=96, memory_gib=384),
        "inf2.48xlarge": Host(family="inf2", chips=12, vcpus=192, memory_gib=768),
    }
)
"""What training and embedding are estimated on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A BERT by its shape, as far as floating-point operations go.

    Attributes:
        layers, hidden, intermediate, vocabulary: of config.json on the Hugging Face Hub.
        parameters: elements of all weights, those of the pretraining heads included.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    parameters: int


BERT_LARGE = PublishedModel(layers=24, hidden=1024, intermediate=4096, vocabulary=30_522, parameters=336_226_108)
"""bert-large-uncased with BertForPreTraining's heads, whose decoder shares the word embeddings."""

BERT_BASE = PublishedModel(layers=12, hidden=768, intermediate=3072, vocabulary=30_522, parameters=110_106_428)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTraining:
    """A row of about-neuron/benchmarks/trn1/training_data_encoder.csv (SDK 2.28): BERT-Large, 128 tokens, on trn1.32xlarge.

    Attributes:
        per_second: sequences, over all nodes.
        per_step: sequences of an optimizer step.
    """

    nodes: int
    per_second: float
    per_step: int


TRAINING_LENGTH = 128
ONE_NODE = PublishedTraining(nodes=1, per_second=3_827.0, per_step=16_384)
SIXTEEN_NODES = PublishedTraining(nodes=16, per_second=57_408.0, per_step=1_048_576)
"""Both bf16 with stochastic rounding. The single node steps with AdamW, the sixteen with LAMB."""

FP32_SHARE = 32_363 / 57_408
"""Sequences per second in fp32 for one in bf16, both on 16 nodes (same table)."""

INFERENCE_LENGTH = 128

INFERENCE: Mapping[str, Mapping[int, tuple[PublishedModel, float]]] = MappingProxyType(
    {
        "trn1": MappingProxyType({768: (BERT_BASE, 3_421.6), 1024: (BERT_LARGE, 1_104.4)}),
        "inf2": MappingProxyType({768: (BERT_BASE, 2_674.2), 1024: (BERT_LARGE, 950.0)}),
    }
)
"""Family -> hidden width -> a model without heads, and its inferences of 128 tokens per second on one chip, bf16 products.

about-neuron/benchmarks/trn1/throughput_data_encoder.csv (trn1.2xlarge, SDK 2.27) and .../inf2/throughput_data_encoder.csv
(inf2.xlarge: bert-base-uncased of SDK 2.27, bert-large-uncased of 2.21), throughput optimized."""
