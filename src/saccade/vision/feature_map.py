"""Check feature maps ``[batch, channels, H, W]``, and convert them to tokens and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.support.errors import describe, value_error
from saccade.support.validation import ShapeSpec, check_int

_FEATURES = ShapeSpec("features [batch, channels, H, W]")


class BatchNorm(nn.BatchNorm2d):
    """An ``nn.BatchNorm2d`` that accepts empty batches and does not update its running statistics for them."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        if input.numel():
            return super().forward(input)
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)

    def check_spread(self, count: int) -> None:
        """Raise an error if the batch norm would train on a single value per channel, which has no variance.

        Raises:
            ValueError: ``count``, the number of values per channel, is 1 in training.
        """
        if self.training and count == 1:
            rule = "have at least 2 values per channel in training, for the batch norm"
            hint = "use a larger batch, or eval(), which uses the running statistics"
            raise value_error("features", rule, count, hint=hint)


def check_features(features: Tensor, channels: int | None, parameter: Tensor | None) -> None:
    """Raise an error unless a feature map has the right shape, dtype and device.

    The map must be non-empty, ``[batch, channels, H, W]``, with the device and dtype of ``parameter``.

    Raises:
        TypeError: the features are not a tensor.
        ValueError: the shape, dtype or device is wrong, or the map is empty.
    """
    hint = "features[None] adds the batch" if isinstance(features, Tensor) and features.dim() == 3 else None
    known = {} if channels is None else {"channels": channels}
    sizes = _FEATURES.check(features, hint=hint, **known)
    if not sizes["channels"] * sizes["H"] * sizes["W"]:
        raise value_error("features", "have at least one channel, row and column", list(features.shape))
    if parameter is None:
        return
    if features.device != parameter.device:
        raise value_error("features", f"be on {parameter.device}, like the parameters", features.device)
    if features.dtype != parameter.dtype and not torch.is_autocast_enabled(features.device.type):
        rule = f"be {str(parameter.dtype).removeprefix('torch.')}, like the parameters"
        got = str(features.dtype).removeprefix("torch.")
        raise value_error("features", rule, got, facts=[describe("features", features)])


def bottleneck_width(channels: int, ratio: int) -> int:
    """Return the number of channels in a gate's bottleneck, ``channels / ratio``.

    Raises:
        ValueError: an argument is not an int of at least 1, or ``ratio`` does not divide ``channels``.
    """
    if check_int("channels", channels) % check_int("ratio", ratio):
        hint = None if ratio <= channels else "it would leave less than one channel"
        raise value_error("ratio", f"divide channels {channels}", ratio, hint=hint)
    return channels // ratio


def as_tokens(features: Tensor) -> Tensor:
    """Flatten a feature map, row by row, to one head of H·W tokens: ``[batch, 1, H·W, channels]``."""
    return features.flatten(2).mT[:, None]


def as_map(tokens: Tensor, height: int, width: int) -> Tensor:
    """Convert tokens ``[batch, 1, H·W, channels]`` back to a feature map, the inverse of `as_tokens`."""
    return tokens[:, 0].mT.unflatten(2, (height, width))
