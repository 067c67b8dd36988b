"""LatentCache: stores one short latent vector per token, which serves as key and value for all heads."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade.caches.call_arguments import Call, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.kv_cache import KVCache
from saccade.caches.state_tensors import Leaf
from saccade.support.errors import value_error
from saccade.support.torch_modes import has_values, mapped_levels
from saccade.support.validation import check_int


class LatentCache(KVCache):
    """A cache for latent attention, with the latent vector and the rotated part of the key of each token.

    Both are stored in one tensor: the first ``latent_dim`` channels of a key are its value, so only keys are stored. A
    `KVCache` works with the same layers, but stores latents twice. `saccade.nn.LatentAttention.new_cache` returns a
    LatentCache.

    Args:
        latent_dim: width of the values, which are the first channels of the keys.
        max_len: see `KVCache`.

    Raises:
        ValueError: the values are not a view of the first ``latent_dim`` channels of the keys; see also `KVCache`.

    Cost: memory for ``batch * columns * head_dim`` elements with one key head, where columns is ``max_len``, or at most
    twice the number of stored columns.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, query, latents = LatentCache(8), torch.randn(1, 4, 5, 10), torch.randn(1, 1, 5, 10)
        >>> cache.attend(mechanisms.Softmax(), query, latents, latents[..., :8], mask=masks.Causal()).shape
        torch.Size([1, 4, 5, 8])
        >>> cache.value.shape, cache.nbytes == 16 * 10 * 4
        (torch.Size([1, 1, 5, 8]), True)

    Reference: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    settings: ClassVar[tuple[str, ...]] = ("latent_dim", "max_len")
    leaves: ClassVar[tuple[Leaf, ...]] = (Leaf("key", "batch kv_heads columns head_dim"),)

    def __init__(self, latent_dim: int, max_len: int | None = None):
        super().__init__(max_len)
        self.latent_dim = check_int("latent_dim", latent_dim)

    @property
    def value(self) -> Tensor | None:
        """Values, ``[batch, kv_heads, length, latent_dim]``, as a view of the keys; None before the first call."""
        key = self.key
        return None if key is None else self._values_in(key)

    def advance(self, call: Call) -> Tensor:
        out, width = super().advance(call), call.key.shape[3]
        # Values are a view of the keys and take no memory.
        self._traffic = Traffic(*(moved * width // (width + self.latent_dim) for moved in self._traffic))
        return out

    def fill(self, key: Tensor, value: Tensor, *, positions: range | Tensor | None = None) -> None:
        if (
            key.dim() == 4
            and value.shape == (*key.shape[:3], self.latent_dim)
            and (not has_values(key) or torch.equal(value, self._values_in(key)))
        ):
            value = self._values_in(key)
        super().fill(key, value, positions=positions)
        self._traffic = Traffic(0, key.nbytes)

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_new(query, key, value)
        # Tensors of `vmap` and other transforms have no memory of their own.
        is_elsewhere = has_values(key) and mapped_levels(value)[1].data_ptr() != mapped_levels(key)[1].data_ptr()
        if value.shape[3] != self.latent_dim or is_elsewhere or value.stride() != key.stride():
            rule = f"be key[..., :{self.latent_dim}], a view: only the key is stored"
            got, hint = "another tensor", "KVCache() stores separate keys and values"
            raise value_error("value", rule, got, hint=hint)

    def _write_columns(self, name: str, start: int, new: Tensor) -> Tensor:
        if name != "value":
            return super()._write_columns(name, start, new)
        stop = start + new.shape[2]  # the values were written with the keys
        return self._values_in(self._state["key"][:, :, :stop])

    def _sizes(self, contents: Contents) -> dict[str, int]:
        return {"value_dim": self.latent_dim}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        key = state["key"]
        if key.shape[3] < self.latent_dim:
            raise contents.misfit("latent_dim")
        super()._check_restored(contents, state | {"value": self._values_in(key)})

    def _values_in(self, key: Tensor) -> Tensor:
        """Return the values, which are the first ``latent_dim`` channels of the keys."""
        return key[..., : self.latent_dim]
