"""AdamW: torch's own where operations run one by one; in flat vectors where they are compiled, or where ranks share its state.

Each parameter of torch's own has arithmetic and a step count of its own: 74 powers and 556 constants in the graph of an encoder
with 37 parameters. Flat, the graph has as many operations as there are buckets, and two corrections come as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.backends.buckets import buckets

if TYPE_CHECKING:
    from pipeline.backends.device import Device
    from pipeline.config import TrainConfig

BUCKET_ELEMENTS = 16 << 20
"""Elements of a bucket (64 MiB in fp32): a step has a few copies of one bucket, not of all parameters."""

MOMENTS = ("exp_avg", "exp_avg_sq")

Read = Callable[[nn.Parameter, str], Tensor]
"""Parameter and kind of its state, `step` or one of MOMENTS -> the tensor on the host."""
State = dict[Tensor, dict[str, Tensor]]
"""Parameter -> its `step` and MOMENTS, in the form of torch's AdamW."""


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW.

    Args:
        groups: as torch takes them, with `lr` and `weight_decay`.
    """

    sharded = False

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig, device: Device) -> None:
        super().__init__(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)
        self._device = device

    def reduce(self) -> list[Tensor]:
        """Replace every gradient by its mean over all ranks; return what `Device.sync` must keep besides the gradients."""
        self._device.reduce_gradients(_parameters(self))
        return []

    def clip(self, limit: float | None) -> Tensor:
        """Scale the gradients so that their norm is at most the limit; return the norm before, ()."""
        return torch.nn.utils.clip_grad_norm_(_parameters(self), limit or float("inf"))

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Return nothing: the parameters are in fp32 themselves."""
        return {}

    def host_state(self) -> State:
        """Copy the state to the host."""
        return {parameter: self._device.to_host(kinds) for parameter, kinds in self.state.items()}

    def load(self, read: Read) -> None:
        """Put back a state, which `read` returns tensor by tensor."""
        for parameter in _parameters(self):
            self.state[parameter] = self._device.from_host({kind: read(parameter, kind) for kind in ("step", *MOMENTS)})


@dataclass(slots=True)
class Bucket:
    """Parameters that are updated as one flat vector: one behind the other, then zeros up to a multiple of the shares.

    Attributes:
        padding: the zeros; empty where none are missing.
    """

    parameters: list[nn.Parameter]
    decay: float
    padding: list[Tensor]

    def flat(self, tensors: Iterable[Tensor]) -> Tensor:
        """Join a tensor of each parameter."""
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), *self.padding])

    def pieces(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its part of a vector, in the parameter's shape."""
        sizes = [tensor.numel() for tensor in (*self.parameters, *self.padding)]
        for parameter, piece in zip(self.parameters, torch.split(flat, sizes), strict=False):
            yield parameter, piece.view(parameter.shape)


class FlatAdamW(torch.optim.Optimizer):
    """AdamW in flat vectors, one of each kind for a bucket. `state` has them under the bucket's first parameter.

    Sharded, every rank keeps one share of each vector, and the weights of its share too: cut out of the parameters in a step,
    they would be at another place in every rank's graph. With `train.bf16_weights` these are the only ones in fp32.
    (ZeRO stage 1: Rajbhandari et al. 2020, arXiv:1910.02054. torch-xla's own stores the state by rank, so that another number of
    ranks cannot resume from it.)

    Args:
        groups: as torch takes them, with `lr` and `weight_decay`; their parameters are on the device.
        sharded: each rank keeps a share; all ranks must then call `reduce`, `clip`, `step` and `host_state` together.
        adds_up: gradients stay allocated from step to step, see `RunConfig.adds_up`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], config: TrainConfig, device: Device, *, sharded: bool = False, adds_up: bool = False
    ) -> None:
        super().__init__(groups, {})
        self.sharded = sharded
        self._adds_up = adds_up
        self._config = config
        self._device = device
        self._shares = device.world.size if sharded else 1
        self._steps = 0
        self._gradients: list[Tensor] = []
        self._buckets = [
            self._bucket(parameters, group["weight_decay"])
            for group in self.param_groups
            for parameters in buckets(group["params"], BUCKET_ELEMENTS)
        ]
        self._has_masters = sharded and config.bf16_weights
        if self._has_masters:
            for bucket in self._buckets:
                bucket.padding = [zeros.bfloat16() for zeros in bucket.padding]
                for parameter in bucket.parameters:
                    parameter.data = parameter.data.bfloat16()

    def reduce(self) -> list[Tensor]:
        """Join the means of all ranks' gradients, or this rank's share of them; return them, which `Device.sync` must keep."""
        if not self.sharded:
            self._device.reduce_gradients(_parameters(self))
        self._gradients = [bucket.flat(map(_gradient, bucket.parameters)) for bucket in self._buckets]
        if self.sharded:
            self._gradients = [self._device.reduce_scatter(gradient).float() / self._shares for gradient in self._gradients]
        if not self._adds_up:
            self.zero_grad()
        return self._gradients

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or fill them with zeros: all with the same one, as each would be a constant of the graph."""
        if set_to_none:
            super().zero_grad()
            return
        gradients = [_gradient(parameter) for parameter in _parameters(self)]
        zero = gradients[0].new_zeros(())
        for gradient in gradients:
            gradient.copy_(zero)

    def clip(self, limit: float | None) -> Tensor:
        """Scale the gradients so that their norm is at most the limit; return the norm before, ()."""
        squares = torch.stack([(gradient * gradient).sum() for gradient in self._gradients]).sum()
        norm = (self._device.all_reduce(squares) if self.sharded else squares).sqrt()
        scale = ((limit or float("inf")) / (norm + 1e-6)).clamp(max=1.0)
        self._gradients = [gradient * scale for gradient in self._gradients]
        return norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's
        """Update the weights, and gather them where they are sharded."""
        beta1, beta2 = self._config.beta1, self._config.beta2
        self._steps += 1
        rate = self.param_groups[0]["lr"]
        # From the host, whose doubles lose nothing where powers are close to 1. Not two scalars: a 1 would become a constant.
        found = torch.tensor([1 / (1 - beta1**self._steps), (1 - beta2**self._steps) ** -0.5], dtype=rate.dtype)
        first, second = self._device.from_host({"corrections": found})["corrections"].unbind()
        size = rate * first
        kept = {group["weight_decay"]: 1 - rate * group["weight_decay"] for group in self.param_groups}
        for bucket, gradient in zip(self._buckets, self._gradients, strict=True):
            state = self.state[bucket.parameters[0]]
            mean, square = (state[kind] for kind in MOMENTS)
            mean.mul_(beta1).add_(gradient * (1 - beta1))
            square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
            weights = state["weights"] if self.sharded else bucket.flat(bucket.parameters)
            weights = weights * kept[bucket.decay] - size * mean / (square.sqrt() * second + self._config.epsilon)
            if self.sharded:
                state["weights"].copy_(weights)
                weights = self._device.gather(weights.to(bucket.parameters[0].dtype))
            for parameter, piece in bucket.pieces(weights):
                parameter.copy_(piece)
        self._gradients = []

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Copy the fp32 weights to the leader's host, where parameters are in bf16; all ranks take part."""
        return dict(self._whole("weights")) if self._has_masters else {}

    def host_state(self) -> State:
        """Copy the state to the host. Sharded, all ranks take part, and every rank but the leader gets the step alone."""
        found: State = {parameter: {"step": torch.tensor(float(self._steps))} for parameter in _parameters(self)}
        for kind in MOMENTS:
            # One kind at a time: gathered, it needs as much memory as the gradients did.
            for parameter, value in self._whole(kind):
                found[parameter][kind] = value
        return found

    @torch.no_grad()
    def _whole(self, kind: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its tensor of a kind of state, on the host; sharded, on the leader alone."""
        vectors = {str(number): self.state[bucket.parameters[0]][kind] for number, bucket in enumerate(self._buckets)}
        if self.sharded:
            vectors = {number: self._device.gather(vector) for number, vector in vectors.items()}
            self._device.sync(*vectors.values())
            if not self._device.world.is_leader:
                return
        copies = self._device.to_host(vectors)
        for number, bucket in enumerate(self._buckets):
            for parameter, piece in bucket.pieces(copies.pop(str(number))):
                yield parameter, piece.clone()

    def load(self, read: Read) -> None:
        """Put back a state, which `read` returns tensor by tensor; of a sharded one, this rank's share."""
        for bucket in self._buckets:
            for kind in MOMENTS:
                self.state[bucket.parameters[0]][kind] = self._share([read(parameter, kind) for parameter in bucket.parameters])
        self._steps = int(read(self._buckets[0].parameters[0], "step"))

    def _bucket(self, parameters: list[nn.Parameter], decay: float) -> Bucket:
        """Make a bucket and its state."""
        first = parameters[0]
        elements = sum(parameter.numel() for parameter in parameters)
        missing = -elements % self._shares
        # From the host: made on a device that compiles, they would be constants of the graph.
        zeros = self._device.from_host({"padding": first.new_zeros(missing, device="cpu")} if missing else {})
        bucket = Bucket(parameters, decay, list(zeros.values()))
        self.state[first] = {kind: first.detach().new_zeros((elements + missing) // self._shares) for kind in MOMENTS}
        if self.sharded:
            weights = self._device.to_host({str(number): parameter for number, parameter in enumerate(parameters)})
            self.state[first]["weights"] = self._share(weights.values())
        return bucket

    def _share(self, whole: Iterable[Tensor]) -> Tensor:
        """Put this rank's share of a vector on the device, given each parameter's tensor on the host."""
        flat = torch.cat([tensor.reshape(-1) for tensor in whole])
        shares = F.pad(flat, (0, -flat.numel() % self._shares)).view(self._shares, -1)
        return self._device.from_host({"share": shares[self._device.world.rank % self._shares].clone()})["share"]


AdamW = FusedAdamW | FlatAdamW


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad
