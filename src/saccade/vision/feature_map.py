"""Feature maps ``[batch, channels, H, W]``: what every module here takes, and what is said about anything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.arguments import is_integer
from saccade.errors import describe, type_error, value_error

__all__ = [
    "BatchNorm",
    "as_map",
    "as_tokens",
    "check_features",
    "check_flag",
    "check_kernel",
    "check_size",
    "reduced",
]


class BatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that lets an empty batch through and leaves its running statistics alone then."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        if input.numel():
            return super().forward(input)
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)

    def check_count(self, where: str, count: int) -> None:
        """Refuse to train on one value per channel, whose variance says nothing.

        Raises:
            ValueError: ``count`` is 1 in training.
        """
        if self.training and count == 1:
            rule = "have at least 2 values per channel in training, for the batch norm"
            hint = "use a larger batch, or eval(), which takes the running statistics"
            raise value_error(where, "features", rule, count, hint=hint)


def check_features(where: str, features: Tensor, channels: int | None, parameter: Tensor | None) -> None:
    """Accept only ``[batch, channels, H, W]`` in a parameter's dtype, if there is one, with at least one position.

    Raises:
        TypeError: not a tensor.
        ValueError: another shape, an empty map, or another dtype or device.
    """
    if not isinstance(features, Tensor):
        raise type_error(where, "features", "be a tensor", type(features).__name__)
    facts = [describe("features", features)]
    wanted = "channels" if channels is None else channels
    if features.dim() != 4 or (channels is not None and features.shape[1] != channels) or features.shape[1] == 0:
        hint = "features[None] adds the batch" if features.dim() == 3 else None
        rule = f"have shape [batch, {wanted}, H, W]"
        raise value_error(where, "features", rule, list(features.shape), facts=facts, hint=hint)
    if features.shape[2] == 0 or features.shape[3] == 0:
        raise value_error(where, "features", "have at least one row and one column", list(features.shape), facts=facts)
    if parameter is None:
        return
    if features.device != parameter.device:
        raise value_error(where, "features", f"be on {parameter.device}, like the parameters", features.device)
    if features.dtype != parameter.dtype and not torch.is_autocast_enabled(features.device.type):
        rule = f"be {str(parameter.dtype).removeprefix('torch.')}, like the parameters"
        raise value_error(where, "features", rule, str(features.dtype).removeprefix("torch."), facts=facts)


def check_size(where: str, name: str, size: object) -> None:
    """Accept only an int of at least 1.

    Raises:
        ValueError: anything else.
    """
    if not is_integer(size) or size < 1:
        raise value_error(where, name, "be an int of at least 1", repr(size))


def check_kernel(where: str, kernel_size: object) -> None:
    """Accept only an odd int: an even kernel has no centre, and its map would be shifted by half a position.

    Raises:
        ValueError: anything else.
    """
    check_size(where, "kernel_size", kernel_size)
    if isinstance(kernel_size, int) and kernel_size % 2 == 0:
        raise value_error(where, "kernel_size", "be odd, so that it has a centre", kernel_size)


def check_flag(where: str, name: str, flag: object) -> None:
    """Accept only True or False.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(flag, bool):
        raise type_error(where, name, "be True or False", repr(flag))


def reduced(where: str, channels: int, ratio: int) -> int:
    """``channels / ratio``, the width of a bottleneck.

    Raises:
        ValueError: not ints of at least 1, or ``ratio`` does not divide ``channels``.
    """
    check_size(where, "channels", channels)
    check_size(where, "ratio", ratio)
    if channels % ratio:
        hint = None if ratio <= channels else "it would leave less than one channel"
        raise value_error(where, "ratio", f"divide channels {channels}", ratio, hint=hint)
    return channels // ratio


def as_tokens(features: Tensor) -> Tensor:
    """``[batch, channels, H, W]`` as one head of H·W tokens, row by row: ``[batch, 1, H·W, channels]``."""
    return features.flatten(2).mT[:, None]


def as_map(tokens: Tensor, height: int, width: int) -> Tensor:
    """``[batch, 1, H·W, channels]`` as ``[batch, channels, H, W]``; undoes `as_tokens`."""
    return tokens[:, 0].mT.unflatten(2, (height, width))
