"""Mistakes about who may attend to whom, and about which head and item is meant."""

import torch
from torch import Tensor

from saccade.testing import Stepwise


class FlippedPolarity(Stepwise, caught_by=("polarity", "oracle", "sensitivity", "empty_rows")):
    """True is taken to mean that a query may *not* attend."""

    def read_mask(self, mask: Tensor) -> Tensor:
        return ~mask


class OneTooFar(Stepwise, caught_by=("causality", "polarity", "oracle", "sensitivity")):
    """Every row also sees the key behind each that it may see: `<=` where `<` was meant."""

    def read_mask(self, mask: Tensor) -> Tensor:
        return mask | torch.nn.functional.pad(mask[..., :-1], (1, 0))


class OneShort(Stepwise, caught_by=("oracle", "sensitivity")):
    """No query sees its last key: `<` where `<=` was meant."""

    def read_mask(self, mask: Tensor) -> Tensor:
        return mask & torch.nn.functional.pad(mask[..., 1:], (0, 1))


class UpperLeft(Stepwise, caught_by=("decode", "oracle")):
    """A causal mask is recognised and handed to a kernel that counts from the first key, not to the last."""

    def read_mask(self, mask: Tensor) -> Tensor:
        q_len, kv_len = mask.shape[2:]
        ones = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device)
        return ones.tril().expand_as(mask) if (mask == ones.tril(kv_len - q_len)).all() else mask


class DecodeSeesAll(Stepwise, caught_by=("decode", "oracle", "polarity")):
    """A single query skips the mask, as if the newest token saw everything."""

    def read_mask(self, mask: Tensor) -> Tensor:
        return torch.ones_like(mask) if mask.shape[2] == 1 else mask


class FirstItemsMask(Stepwise, caught_by=("batch", "oracle")):
    """The mask of the first batch item is used for all of them."""

    def read_mask(self, mask: Tensor) -> Tensor:
        return mask[:1].expand_as(mask)


class LastBlockDropped(Stepwise, caught_by=("key_order", "oracle", "sensitivity")):
    """Keys are read four at a time, and those left over at the end never."""

    def read_mask(self, mask: Tensor) -> Tensor:
        whole = mask.shape[3] // 4 * 4
        return mask & (torch.arange(mask.shape[3], device=mask.device) < whole)


class RepeatedGroups(Stepwise, caught_by=("gqa", "oracle")):
    """Grouped keys are tiled, so that head h reads group h % groups."""

    def repeat_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.repeat(1, num_heads // x.shape[1], 1, 1)


class FirstHeadsKeys(Stepwise, caught_by=("heads", "oracle")):
    """All heads read the keys and values of the first."""

    def repeat_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x[:, :1].expand(-1, num_heads, -1, -1)


class ItemsMixed(Stepwise, caught_by=("batch", "oracle")):
    """Batch and heads are folded in one order and unfolded in the other."""

    def repeat_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return super().repeat_heads(x.transpose(0, 1).reshape(x.shape), num_heads)
