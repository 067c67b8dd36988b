"""Use saccade's caches in transformers' ``generate``: for constant memory, block selection or stored prefixes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from saccade.caches import Cache, KVCache, LayerCache, SinkWindowCache
from saccade.integrations.attention_arguments import check_no_weights
from saccade.integrations.lazy_mask import LazyMask
from saccade.integrations.transformers import Attention, check, registered
from saccade.integrations.transformers_call import AttentionCall
from saccade.masks import Full
from saccade.mechanisms import Softmax
from saccade.support.errors import missing_extra, unsupported
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from transformers import Cache as TransformersCache

_NAME = "saccade-cache"
_WITHOUT_CACHE = Attention(_NAME, None)
_softmax = functools.lru_cache(Softmax)  # shared by all forward passes of a model


def install_caches(name: str = _NAME) -> str:
    """Register attention on saccade's caches, to be used by ``model.set_attn_implementation("saccade-cache")``.

    A cache that selects which keys to read needs the query, but transformers does not pass queries to caches. So the
    layers of `transformers_cache` return only the new keys, with a reference to the cache, and this implementation lets
    the cache compute the attention. With any other cache, or none, it works like `install`.

    Args:
        name: the name of the implementation.

    Returns:
        The name, for ``set_attn_implementation``.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: the name is invalid, or has a special meaning in transformers.

    Example:
        >>> install_caches()
        'saccade-cache'
    """
    check(name, None)
    return registered(name, _attend)


def transformers_cache(cache: Cache) -> TransformersCache:
    """Wrap a `saccade.caches.Cache` for transformers, for ``model.generate(..., past_key_values=...)``.

    The model must use the attention of `install_caches`. It generates the same tokens as with transformers' own cache
    if the cache is exact: a `KVCache`, a `saccade.caches.BlockSelectCache` or an evicting cache while the sequence fits
    in its budget, or a `SinkWindowCache` while the sequence fits in its window. Beam search, cropping and assisted
    generation call the cache's ``reorder`` and ``crop``, which raise an error if the cache does not support them.

    As in transformers, a token's position is its column, so left padding is part of the mask. All caches support left
    padding except `SinkWindowCache`, because its first tokens would be padding.

    Args:
        cache: one cache for each layer. It is filled in place, and can be saved or added to a
            `saccade.caches.PrefixStore`.

    Raises:
        ImportError: transformers is not installed.
        TypeError: ``cache`` is not a `Cache`, or a layer has several caches (cross-attention).

    Example:
        >>> from saccade.caches import BlockSelectCache, Cache
        >>> past = transformers_cache(Cache(BlockSelectCache(16, 256) for _ in range(2)))
        >>> len(past), past.get_seq_length()
        (2, 0)
    """
    hint = "Cache(KVCache() for _ in range(model.config.num_hidden_layers))"
    check_type("cache", cache, Cache, "be a saccade.caches.Cache", hint=hint)
    layers = [check_type("cache", layer, LayerCache, "contain one cache for each layer") for layer in cache]
    whole, layer_class = _classes()
    return whole([layer_class(layer) for layer in layers])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run attention on a saccade cache, with the signature of transformers' attention functions."""
    cache = getattr(key, "saccade_cache", None)
    if cache is None:
        return _WITHOUT_CACHE(module, query, key, value, attention_mask, dropout, **kwargs)
    check_no_weights(module, kwargs)
    call = AttentionCall.of(module, query, key, None, kwargs)
    reasons = []
    if not isinstance(attention_mask, LazyMask):
        reasons.append("it received a materialized mask, but caches need a mask rule")
    if call.bias is not None or call.sink_logit is not None:
        reasons.append(f"{type(module).__name__} adds a bias or a sink to its scores, which caches do not support here")
    rule = Full() if not isinstance(attention_mask, LazyMask) else attention_mask.placed.rule
    if isinstance(cache, SinkWindowCache) and not rule.is_relative:
        reasons.append(f"its first tokens would be padding, or belong to another text: {rule}")
    if reasons:
        raise unsupported(type(cache).__name__, reasons, hint="transformers' own cache, and install()")
    assert isinstance(attention_mask, LazyMask)
    mechanism = _softmax(scale=call.scale, softcap=call.softcap)
    positions = attention_mask.placed.q_positions
    out = cache.attend(mechanism, query, key, value, mask=rule, positions=positions, dropout_p=float(dropout))
    return out.transpose(1, 2).contiguous(), None


class _Layer:
    """A saccade cache with the interface of transformers' cache layers."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: LayerCache):
        self.cache, self.rows = cache, 0
        self.keys = self.values = None  # attributes of transformers' layers
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return only the new keys and values, and attach the cache to the keys; it computes the attention later."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.rows = len(key_states)
        keys = key_states.view_as(key_states)
        keys.saccade_cache = self.cache  # type: ignore[attr-defined]
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        room = self.cache.max_len if isinstance(self.cache, KVCache) else None
        return -1 if room is None else room

    def reset(self) -> None:
        self.cache.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        self.cache.crop(self.cache.length - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.cache.length:
            self.cache.reorder(beam_idx)
            self.rows = len(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        key = self.cache.key if isinstance(self.cache, KVCache) else None
        batch = self.rows if key is None else len(key)
        self.reorder_cache([row for row in range(batch) for _ in range(repeats)])

    def offload(self) -> None:
        reason = "saccade's caches stay on the model's device"
        raise unsupported("offloading", [reason], hint="caches.save_cache writes them to a file")

    prefetch = offload


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return transformers' cache class, and a subclass of its layer class that wraps a saccade cache."""
    try:
        from transformers import Cache as TransformersCache  # noqa: PLC0415  imported when used
        from transformers.cache_utils import CacheLayerMixin  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("transformers", "transformers") from error

    return TransformersCache, type("SaccadeLayer", (_Layer, CacheLayerMixin), {})
