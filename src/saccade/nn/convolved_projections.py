"""ConvolvedProjections: a short convolution over projected tokens, with its state in the layer's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import functional as F

from saccade.caches import Cache, LayerCache
from saccade.masks import Documents, Mask
from saccade.masks.algebra import And
from saccade.mechanisms import ShortConvolution
from saccade.nn.base_layer import Layer
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import type_error


class ConvolvedProjections(Layer):
    """A short convolution of projected queries, keys and values, followed by a silu.

    A token reads only earlier tokens in the same document, and no padding. Windows and other patterns in the layer's
    mask do not limit the convolution.

    Args:
        channels: total number of channels of queries, keys and values.
        width: number of positions that a token reads, including its own.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.mechanism = ShortConvolution(channels, width)

    def forward(
        self, x: Tensor, *, mask: Mask | None, positions: GivenPositions, cache: LayerCache | None = None
    ) -> Tensor:
        """Return the convolved tokens, ``[batch, len, channels]``.

        Args:
            x: ``[batch, len, channels]``.
            mask: the mask of the batch; only its documents and padding are used.
            positions: positions of the tokens, in order; -1 marks padding.
            cache: the cache of earlier tokens, from `new_cache`.
        """
        channels, batch_mask = x.mT[..., None], batch_parts(mask)  # each channel is a head
        if cache is None:
            options = {"q_positions": positions, "kv_positions": positions}
            out = self.mechanism(channels, channels, mask=batch_mask, **options).matmul(channels)
        else:
            out = cache.attend(self.mechanism, channels, channels, channels, mask=batch_mask, positions=positions)
        return F.silu(out[..., 0].mT)

    def new_cache(self) -> LayerCache:
        """Return an empty cache for the last tokens, which the convolution reads."""
        return self.mechanism.new_cache()

    def extra_repr(self) -> str:
        return f"{self.mechanism.channels}, {self.mechanism.width}"


def batch_parts(mask: Mask | None) -> Mask | None:
    """Return the parts of a mask that describe the batch: padding, and documents without their inner mask.

    The result is None if there are no such parts.
    """
    if mask is None:
        return None
    parts = mask.parts if isinstance(mask, And) else (mask,)
    selected = [
        Documents(part.lengths) if isinstance(part, Documents) else part for part in parts if part.is_fact_of_batch
    ]
    return None if not selected else selected[0] if len(selected) == 1 else And(tuple(selected))


def split_cache(cache: LayerCache | Cache | None) -> tuple[LayerCache | None, LayerCache | None]:
    """Split the cache of a layer with a short convolution into the caches of its mechanism and its convolution.

    Raises:
        TypeError: the cache does not come from the layer's `new_cache`.
    """
    if cache is None:
        return None, None
    parts = tuple(cache) if isinstance(cache, Cache) else ()
    if len(parts) == 2 and all(isinstance(part, LayerCache) for part in parts):
        return parts  # type: ignore[return-value]  # both were just checked
    rule = "be a Cache of two layer caches, for attention and the short convolution"
    raise type_error("cache", rule, type(cache).__name__, hint="new_cache() of the layer makes one")


@contextmanager
def restored_on_error(cache: LayerCache | None) -> Iterator[None]:
    """Context manager that restores the cache if the ``with`` block raises an exception.

    A failed call therefore does not change the cache.
    """
    snapshot = None if cache is None else cache.fork()
    try:
        yield
    except BaseException:
        if cache is not None and snapshot is not None:
            vars(cache).update(vars(snapshot))
        raise
