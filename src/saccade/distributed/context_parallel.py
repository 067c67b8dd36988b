"""ContextParallel: attention over a sequence that is split across ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from saccade.distributed.collectives import Fetch, Swap, check_agreement, with_hint
from saccade.distributed.exchange_plan import STRATEGIES, Exchange, Machine, exchange
from saccade.distributed.layouts import NAMES, Layout, layout_of
from saccade.distributed.parallel_mechanism import ParallelMechanism
from saccade.distributed.state_passing import StateChannel
from saccade.engine import dropout
from saccade.engine.positions.positioned_mask import check_domain
from saccade.masks import Mask
from saccade.matrix import AttentionMatrix
from saccade.matrix.attention_matrix import Impl
from saccade.mechanisms import Mechanism
from saccade.positions import Bias
from saccade.scores import Score
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_choice, check_type

_CACHE_SIZE = 16


class ContextParallel:
    """Attention over a sequence that is split across ranks, equal to attention over the full sequence.

    Each rank passes in the queries, keys and values of its rows and receives their outputs. Visible keys are fetched
    from other ranks, and their gradients are sent back. There is no global state, so a model may use several instances.

    Args:
        group: a one-dimensional DeviceMesh or a process group; all ranks when None.
        layout: how rows are assigned to ranks: "contiguous", "zigzag" or "striped", or a `Layout` (for "balanced", use
            the layout of an exchange plan). It describes the data, so it is the same for all layers.
        strategy: "fetch", "gather", "ulysses", or "auto" for the one estimated to be fastest; see `exchange`.
        machine: assumed speed of a rank, for "auto".
        checks: whether ranks compare plans with a small message before each exchange. If the plans differ, all ranks
            raise the same error. Without checks, ranks with different plans may hang or receive wrong data.

    Raises:
        TypeError, ValueError: the group, layout or strategy is invalid.
        RuntimeError: there is no process group.
    """

    def __init__(
        self,
        group: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        layout: str | Layout = "contiguous",
        strategy: str = "auto",
        machine: Machine | None = None,
        checks: bool = True,
    ):
        if not dist.is_initialized():
            hint = "call torch.distributed.init_process_group(...) first; torchrun sets the variables that it needs"
            raise RuntimeError(f"ContextParallel: a process group must be set up; got none.\nHint: {hint}")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise value_error("group", "be a one-dimensional mesh", f"{group.ndim}", hint='mesh["cp"]')
            group = group.get_group()
        if not isinstance(layout, Layout):
            check_choice("layout", layout, NAMES[:3], hint="exchange(...).layout can be a balanced one")
        check_choice("strategy", strategy, ("auto", *STRATEGIES))
        self.group, self.strategy, self.checks = group, strategy, check_type("checks", checks, bool, "be a bool")
        self.machine = machine if machine is None else check_type("machine", machine, Machine, "be a Machine")
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if isinstance(layout, Layout) and layout.ranks != self.ranks:
            raise value_error("layout", f"be for {self.ranks} ranks", layout.ranks)
        self._layout, self.channel = layout, StateChannel(group)
        self._cache: dict[tuple[Any, ...], Any] = {}

    def layout(self, seq_len: int) -> Layout:
        """Return the layout of a sequence across the ranks."""
        if isinstance(self._layout, str):
            return layout_of(self._layout, seq_len, self.ranks)
        if self._layout.seq_len != seq_len:
            raise value_error("seq_len", f"be {self._layout.seq_len}, as in the layout", seq_len)
        return self._layout

    def positions(self, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of this rank's rows, int64 ``[rows]``."""
        return torch.from_numpy(self.layout(seq_len).tokens(self.rank)).to(device)

    def shard_sequence(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of a tensor that every rank has in full."""
        return x.index_select(dim, self.positions(x.shape[dim], x.device))

    def unshard_sequence(self, x: Tensor, dim: int = 1, *, seq_len: int | None = None) -> Tensor:
        """Gather the rows of a tensor from all ranks on every rank; the gradients of all ranks are summed."""
        seq_len = self.seq_len(x.shape[dim], seq_len)
        others = [size for axis, size in enumerate(x.shape) if axis != dim % x.dim()]
        if self.checks:
            check_agreement(f"unshard_sequence {dim} {others} {x.dtype} {seq_len}", self.group, x.device)
        swap = self._swap(seq_len, x.device)
        lines = x.movedim(dim, 0).reshape(1, 1, x.shape[dim], math.prod(others))
        whole = swap.to_heads(lines.expand(-1, self.ranks, -1, -1))
        return whole.reshape(seq_len, *others).movedim(0, dim)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        *,
        seq_len: int | None = None,
        score: Score | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        """Compute exact softmax attention of this rank's rows over the full sequence.

        Args:
            query: ``[batch, heads, rows, head_dim]``, the local rows in the order of `positions`.
            key, value: ``[batch, kv_heads, rows, width]``, the same rows.
            mask, score, bias, scale, softcap, sink_logit, impl: as for `saccade.attention`. They apply to the full
                sequence and are the same on every rank; the mask is a `Mask` or None.
            seq_len: number of tokens in the full sequence; ``rows * ranks`` when None.
            dropout_p, seed: dropout probability and seed; they drop the same weights for any number of ranks. The seed
                must be the same on every rank; if it is None, the first rank generates it for all.

        Returns:
            ``[batch, heads, rows, width]``.

        Cost: one exchange, plus another one for gradients; memory for the keys visible to the local rows.
        """
        seq_len = self.seq_len(query.shape[2], seq_len)
        if dropout_p and seed is None:
            seed = self.shared_seed(query.device)
        if isinstance(mask, Mask):
            check_domain(mask, None, None, seq_len, seq_len)
        options: dict[str, Any] = {"score": score, "bias": bias, "scale": scale, "softcap": softcap, "impl": impl}
        options = {name: x for name, x in options.items() if x is not None}
        reasons = [f"{name} can differ between heads" for name in ("score", "bias") if name in options]
        reasons += ["sink_logit differs between heads"] if sink_logit is not None else []
        reasons += ["dropout depends on the index of the head"] if dropout_p else []
        plan = self._plan(query, key, mask, seq_len, reasons)
        if self.checks:
            facts = (len(query), key.shape[3], value.shape[3], value.dtype, dropout_p, seed, scale, softcap)
            check_agreement(f"{plan.fingerprint} {facts}", self.group, query.device)
        if plan.strategy == "ulysses":
            swap = self._swap(seq_len, query.device)
            q, k, v = (swap.to_heads(x) for x in (query, key, value))
            return swap.to_rows(AttentionMatrix(q, k, plan.mask, **options).matmul(v))
        fetch = self._fetch(plan, query.device)
        both = fetch(torch.cat([key, value], 3))
        k, v = both.split([key.shape[3], value.shape[3]], 3)
        positions = self.positions(seq_len, query.device)
        matrix = AttentionMatrix(
            query, k, plan.mask, sink_logit=sink_logit, q_positions=positions, kv_positions=fetch.columns, **options
        )
        return matrix.matmul(v, dropout_p=dropout_p, seed=seed)

    def __call__(self, mechanism: Mechanism) -> ParallelMechanism:
        """Wrap a layer's mechanism to run across ranks, with this rank's rows as its queries and keys."""
        return ParallelMechanism(mechanism, self)

    def plan(self, query: Tensor, key: Tensor, mask: Mask | None, seq_len: int) -> Exchange:
        """Return the exchange plan for this rank's tensors and a mask of the full sequence."""
        return self._plan(query, key, mask, seq_len, ())

    def _plan(
        self, query: Tensor, key: Tensor, mask: Mask | None, seq_len: int, not_ulysses: Sequence[str]
    ) -> Exchange:
        """Return the exchange plan; if ``not_ulysses`` contains reasons, the plan does not use "ulysses"."""
        strategy = self.strategy
        if not_ulysses and strategy == "ulysses":
            raise unsupported('strategy="ulysses"', not_ulysses, hint='strategy="fetch" supports it')
        if not_ulysses and strategy == "auto":
            strategy = "fetch"  # never sends more than "gather"
        sizes = (seq_len, query.shape[1], key.shape[1], key.shape[3], key.dtype, self.ranks)
        return exchange(mask, *sizes, layout=self.layout(seq_len), strategy=strategy, machine=self.machine)

    def shared_seed(self, device: torch.device | str = "cpu") -> int:
        """Return a dropout seed that is the same on all ranks, taken from the torch generator of the first rank.

        Every rank advances its generator, so that equal generators remain equal.
        """
        seed = torch.tensor(dropout.draw_seed(), device=device)
        with_hint(lambda: dist.broadcast(seed, group=self.group, group_src=0))
        return int(seed)

    def seq_len(self, rows: int, seq_len: int | None = None) -> int:
        """Return the length of the full sequence: ``seq_len``, the length of the layout, or rows × ranks.

        Raises:
            ValueError: the layout of this length gives the rank a different number of rows.
        """
        if seq_len is None:
            seq_len = rows * self.ranks if isinstance(self._layout, str) else self._layout.seq_len
        count = int(self.layout(seq_len).counts[self.rank])
        if count != rows:
            hint = "if the length is not a multiple of the ranks, pass seq_len= or ContextParallel(layout=cp.layout(n))"
            raise value_error("rows", f"be {count}, the rows of rank {self.rank} at length {seq_len}", rows, hint=hint)
        return seq_len

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Return the object itself, because copies of a model use the same process group."""
        return self

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return a value that depends on the exchange plan, from a cache of the most recent plans."""
        if key not in self._cache:
            while len(self._cache) >= _CACHE_SIZE:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = make()
        return self._cache[key]

    def _fetch(self, plan: Exchange, device: torch.device) -> Fetch:
        key = ("fetch", plan.fingerprint, device)
        fetch: Fetch = self._cached(key, lambda: Fetch.of(plan, self.rank, self.group, device))
        return fetch

    def _swap(self, seq_len: int, device: torch.device) -> Swap:
        key = ("swap", seq_len, device)
        swap: Swap = self._cached(key, lambda: Swap.of(self.layout(seq_len), self.group, device))
        return swap
