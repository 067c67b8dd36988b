"""Cache: the caches of all layers in a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Traffic, check_crop
from saccade.caches.cross_cache import CrossCache
from saccade.support.errors import type_error, value_error


class Cache:
    """The caches of all layers of a model, in order. Its methods act on all of them.

    For a layer with two attention modules, nest a Cache: ``Cache([Cache([KVCache(), CrossCache()]), ...])``.

    Args:
        layers: `LayerCache` or `Cache` objects.

    Raises:
        TypeError: an object in ``layers`` is neither a `LayerCache` nor a `Cache`.
        ValueError: there are no layers, or ``layers`` contains the same object twice.

    Example:
        >>> from saccade.caches import KVCache
        >>> cache = Cache([KVCache(), KVCache()])
        >>> len(cache), cache.length, cache.positions(2)
        (2, 0, range(0, 2))
    """

    def __init__(self, layers: Iterable[LayerCache | Cache]):
        self._layers = tuple(layers)
        for layer in self._layers:
            if not isinstance(layer, LayerCache | Cache):
                raise type_error("layers", "be layer caches", type(layer).__name__)
        if not self._layers:
            raise value_error("layers", "contain at least one cache", "none")
        ids = [id(layer) for layer in self.flat]
        if len(set(ids)) != len(ids):
            hint = "[KVCache() for _ in range(n)], not [KVCache()] * n"
            raise value_error("layers", "be different objects", "the same cache twice", hint=hint)

    @property
    def flat(self) -> tuple[LayerCache, ...]:
        """Caches of all layers in one flat tuple, including those of nested Caches."""
        layers: list[LayerCache] = []
        for layer in self._layers:
            layers.extend(layer.flat if isinstance(layer, Cache) else [layer])
        return tuple(layers)

    @property
    def length(self) -> int:
        """Number of columns in the self-attention caches; the context of cross-attention does not count."""
        layers = self._self_attention
        return 0 if layers is None else layers.length

    @property
    def nbytes(self) -> int:
        """Memory of all layers' caches in bytes."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that the last pass through all layers read and appended."""
        each = [layer.traffic for layer in self._layers]
        return Traffic(sum(layer.bytes_read for layer in each), sum(layer.bytes_appended for layer in each))

    def positions(self, q_len: int) -> range | Tensor | None:
        """Return the positions of the model's next tokens: a range, or int64 ``[batch, q_len]`` if items differ."""
        layers = self._self_attention
        return None if layers is None else layers.positions(q_len)

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Keep only the given batch items in all layers' caches, in the given order. Items may repeat (beam search)."""
        for layer in self._layers:
            layer.reorder(rows)

    def crop(self, length: int) -> None:
        """Forget all columns after the first ``length`` in all layers' caches."""
        check_crop(length, self.length)
        for layer_cache in self.flat:  # check all caches before any of them changes
            layer_cache.check_crop(length)
        for layer in self._layers:
            layer.crop(length)

    def fork(self) -> Cache:
        """Return an independent copy of all layers' caches. Memory is shared until one of them is written to."""
        return Cache(layer.fork() for layer in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerCache | Cache]:
        return iter(self._layers)

    def __getitem__(self, index: int) -> LayerCache | Cache:
        return self._layers[index]

    def __repr__(self) -> str:
        return f"Cache({len(self)} layers, length={self.length}, nbytes={self.nbytes})"

    @property
    def _self_attention(self) -> LayerCache | None:
        """The first self-attention cache, which counts the model's tokens; None if there is only cross-attention."""
        return next((layer for layer in self.flat if not isinstance(layer, CrossCache)), None)
