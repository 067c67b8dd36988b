"""GroupedLinear: a linear layer that maps each group of channels separately."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.nn.base_layer import Layer


class GroupedLinear(Layer):
    """A linear layer without bias that maps each of several groups of channels with weights of its own.

    Args:
        in_features: number of input channels, a multiple of ``groups``.
        out_features: number of output channels of each group.
        groups: number of groups, which are adjacent in the input and in the output.
    """

    def __init__(self, in_features: int, out_features: int, groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features // groups))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., groups * out_features]``."""
        groups = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("...gi,goi->...go", groups, self.weight).flatten(-2)

    def reset_parameters(self) -> None:
        """Initialize each group's weights as Xavier-uniform."""
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)

    def extra_repr(self) -> str:
        groups, out_features, in_features = self.weight.shape
        return f"{groups * in_features}, {out_features}, groups={groups}"
