"""ShardedCache: a layer's cache whose keys and values are distributed across ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Never, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saccade.caches import Cache, KVCache
from saccade.caches.call_arguments import Call, Traffic
from saccade.distributed.collectives import check_agreement, with_hint
from saccade.distributed.context_parallel import ContextParallel
from saccade.matrix import AttentionMatrix
from saccade.matrix.attention_matrix import matrix_from_inputs
from saccade.mechanisms import Softmax
from saccade.positions.token_positions import Positions
from saccade.support.errors import unsupported
from saccade.support.validation import check_int, check_type


class ShardedCache(KVCache):
    """A `saccade.caches.KVCache` across ranks, for sequences whose keys and values do not fit on one device.

    Every rank runs the model on the same new tokens, but stores the keys and values of only some of them: stripes of
    tokens are assigned to the ranks in turn. Each rank attends to its own keys, and the results are merged with two
    messages: one number and one output vector per head and query. A prefill and decoding steps of any size give the
    same result as a full run.

    Args:
        cp: the `ContextParallel` of the ranks.
        stripe_size: number of consecutive tokens on a rank.

    Raises:
        UnsupportedError: the mechanism is not softmax attention, dropout or gradients are used, or the cache is saved.

    Cost: memory and time for a rank's part of the tokens; per call, two messages of at most
    ``batch * heads * q_len * (value_dim + 1)`` numbers, whatever the length of the sequence. Pass a long prompt in
    chunks, so that nothing else grows with its length.
    """

    settings: ClassVar[tuple[str, ...]] = ("stripe_size",)

    def __init__(self, cp: ContextParallel, stripe_size: int = 128):
        super().__init__()
        self.cp = check_type("cp", cp, ContextParallel, "be a ContextParallel")
        self.stripe_size = check_int("stripe_size", stripe_size)

    @property
    def own(self) -> Tensor:
        """Indices of the cached tokens that this rank stores, int64."""
        return self._columns(self.length)

    @property
    def key(self) -> Tensor | None:
        """The cached keys of this rank, ``[batch, kv_heads, own, head_dim]``; None before the first call."""
        return self._state["key"][:, :, : len(self.own)] if self._state else None

    @property
    def value(self) -> Tensor | None:
        """The cached values of this rank; None before the first call."""
        return self._state["value"][:, :, : len(self.own)] if self._state else None

    def advance(self, call: Call) -> Tensor:
        """Store this rank's new keys, attend to all keys on this rank, and merge the results of all ranks."""
        cp, start = self.cp, self.length
        stop = start + call.key.shape[2]
        if call.dropout_p or (torch.is_grad_enabled() and call.needs_graph):
            reason = "a cache over ranks supports only decoding: without dropout, and under torch.no_grad()"
            raise unsupported("training", [reason])
        if not isinstance(call.mechanism, Softmax):
            reason = (
                f"a {type(call.mechanism).__name__} selects from all keys or sums them, but each rank has only a part"
            )
            raise unsupported(type(call.mechanism).__name__, [reason], hint="Softmax() runs over ranks")
        if cp.checks:
            plan = f"{call.mask} {start} {tuple(call.query.shape)} {tuple(call.value.shape)} {call.key.dtype}"
            check_agreement(plan, cp.group, call.key.device)
        columns = self._columns(stop)
        held = len(self._columns(start))
        new = (columns[held:] - start).to(call.key.device)
        keys, values = (
            self._write_columns(name, held, x.index_select(2, new))
            for name, x in (("key", call.key), ("value", call.value))
        )
        positions = call.kv_positions.on(call.key.device).index_select(1, columns.to(call.key.device))
        matrix = call.mechanism(
            call.query, keys, mask=call.mask, q_positions=call.positions, kv_positions=Positions(None, positions)
        )
        out = self._merge_ranks(cast("AttentionMatrix", matrix), values)
        self._traffic = Traffic(keys.nbytes + values.nbytes, keys[:, :, held:].nbytes + values[:, :, held:].nbytes)
        return out.to(call.query.dtype)

    def fill(self, key: Tensor, value: Tensor, *, positions: range | Tensor | None = None) -> Never:
        """Raise an error, because a prefix must be passed to `attend`, like all other tokens."""
        raise unsupported("a prefix", ["each rank has only a part"], hint="attend(...) accepts a prefix")

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Raise an error, because a saved file would contain only one rank's part of the cache."""
        reason = "each rank has only a part, so a file would be incomplete"
        raise unsupported("saving", [reason], hint="KVCache() on one process can be saved")

    def _merge_ranks(self, matrix: AttentionMatrix, values: Tensor) -> Tensor:
        """Merge the attention output over this rank's keys with the outputs of all other ranks."""
        given, group = matrix.inputs, self.cp.group
        part = matrix_from_inputs(dataclasses.replace(given, sink_logit=None), matrix.impl)
        out, lse = part.matmul(values), part.lse
        most = lse.clone(memory_format=torch.contiguous_format)  # the memory layout may differ between ranks
        with_hint(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=group))
        sink = None if given.sink_logit is None else given.sink_logit.to(most.dtype)[None, :, None]
        most = most if sink is None else torch.maximum(most, sink)
        most = most.masked_fill(most == -torch.inf, 0.0)  # rows without visible keys
        weight = (lse - most).exp()[..., None]
        sums = torch.cat([weight * out.to(weight.dtype), weight], 3)
        with_hint(lambda: dist.all_reduce(sums, group=group))
        out, total = sums[..., :-1], sums[..., -1:]
        total = total if sink is None else total + (sink - most).exp()[..., None]
        return out / total.masked_fill(total == 0, 1.0)

    def _columns(self, length: int) -> Tensor:
        """Return the indices of the cached tokens before ``length`` that this rank stores, int64."""
        every = torch.arange(length)
        return every[every // self.stripe_size % self.cp.ranks == self.cp.rank]

    def _selected(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]


def sharded_cache(model: nn.Module, cp: ContextParallel, *, stripe_size: int = 128) -> Cache:
    """Return a `Cache` for a model that distributes the keys and values of its layers across ranks.

    Args:
        model: a model with ``new_cache``, such as `saccade.models.Decoder`. It must not be changed by `parallelize`,
            because every rank runs it on all new tokens.
        cp: the `ContextParallel` of the ranks.
        stripe_size: see `ShardedCache`.

    Raises:
        UnsupportedError: a layer caches anything other than keys and values.

    Example:
        >>> from saccade.distributed import sharded_cache
        >>> cache = sharded_cache(decoder, cp)  # doctest: +SKIP
        >>> for piece in prompt.split(4096, 1):  # doctest: +SKIP
        ...     logits = decoder(piece, cache=cache)
    """
    make = getattr(model, "new_cache", None)
    if make is None:
        raise unsupported(type(model).__name__, ["it has no new_cache()"], hint="Decoder and DecoderStack have one")
    layers = make().flat
    reasons = [
        f"layer {number} has a {type(layer).__name__}, but only keys and values can be spread over ranks"
        for number, layer in enumerate(layers)
        if type(layer) is not KVCache
    ]
    if reasons:
        raise unsupported(type(model).__name__, reasons)
    return Cache([ShardedCache(cp, stripe_size) for _ in layers])
