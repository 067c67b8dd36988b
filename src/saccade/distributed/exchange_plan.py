"""Exchange plans for attention across ranks: the tokens of each rank, the transfers between ranks, and the costs."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from saccade.distributed.key_requirements import KeyRequirements, work_of_chunks
from saccade.distributed.layouts import NAMES as LAYOUTS
from saccade.distributed.layouts import Layout, balanced, chunk_size, layout_of, positions_in
from saccade.masks import Full, Mask
from saccade.plan.key_ranges import Ints
from saccade.support.columns import left_aligned
from saccade.support.errors import unsupported, value_error
from saccade.support.language import Message, translated
from saccade.support.validation import check_choice, check_int, check_type

STRATEGIES = ("fetch", "gather", "ulysses")
"""Ways to exchange data: fetch the keys visible to the local queries, gather all keys, or exchange rows for heads."""
_LONGEST = 100


@dataclasses.dataclass(frozen=True)
class Machine:
    """The assumed speed of a rank, for comparing exchange plans. It is not measured.

    Args:
        flops: floating-point operations of attention per second.
        bandwidth: bytes that a rank sends and receives per second.
        latency: seconds that a communication round takes without data.
    """

    flops: float = 400e12
    bandwidth: float = 50e9
    latency: float = 20e-6


class RankPlan(NamedTuple):
    """One rank's part of an exchange plan.

    Attributes:
        rank: index of the rank.
        rows: the rank's tokens, in order.
        receives, sends: (peer, keys) pairs: the tokens whose keys and values are received from or sent to another rank.
            Empty with "ulysses", which exchanges all rows.
        bytes_sent, bytes_received: bytes in a forward pass; in a backward pass, the two are swapped.
        pairs: estimated number of query-key pairs, over all heads.
        peak_bytes: bytes of keys and values, local and received.
    """

    rank: int
    rows: tuple[range, ...]
    receives: tuple[tuple[int, range], ...]
    sends: tuple[tuple[int, range], ...]
    bytes_sent: int
    bytes_received: int
    pairs: int
    peak_bytes: int

    @property
    def columns(self) -> Ints:
        """Positions of the rank's keys after the exchange, local and received, ascending, int64."""
        return np.sort(np.concatenate([positions_in(self.rows), positions_in([keys for _, keys in self.receives])]))


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The exchange plan for attention across ranks: layout, strategy and costs.

    Attributes:
        mask, seq_len, heads, kv_heads, head_dim, dtype: properties of the attention.
        layout: the tokens of each rank.
        strategy: one of `STRATEGIES`.
        refused: the rejected strategies and layouts, with reasons.
        needs: the key ranges that each rank requires.
    """

    mask: Mask
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layout: Layout
    strategy: str
    refused: dict[str, tuple[str, ...]]
    needs: KeyRequirements

    @property
    def ranks(self) -> int:
        """Number of ranks in the exchange plan."""
        return self.layout.ranks

    @property
    def bytes_of_token(self) -> int:
        """Bytes of a token's keys and values in all heads."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @cached_property
    def bytes_sent(self) -> Ints:
        """Bytes that each rank sends in a forward pass, int64 ``[ranks]``."""
        return self._bytes(self.needs.sent, sends=True)

    @cached_property
    def bytes_received(self) -> Ints:
        """Bytes that each rank receives in a forward pass, int64 ``[ranks]``."""
        return self._bytes(self.needs.received, sends=False)

    @cached_property
    def pairs(self) -> Ints:
        """Number of query-key pairs of each rank, over all heads, int64 ``[ranks]``."""
        if self.strategy == "ulysses":
            return np.full(self.ranks, self.needs.pairs.sum() * self.heads // self.ranks)
        return self.needs.pairs * self.heads

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank divided by the mean work of a rank; 1 is perfectly balanced."""
        mean = self.pairs.mean()
        return float(self.pairs.max() / mean) if mean else 1.0

    @cached_property
    def peak_bytes(self) -> Ints:
        """Peak bytes of keys and values on each rank, local and received, int64 ``[ranks]``."""
        local = self.layout.counts * self.bytes_of_token
        if self.strategy == "ulysses":
            return local + self.seq_len * self.bytes_of_token // self.ranks
        return local + self.bytes_received

    @property
    def rounds(self) -> int:
        """Number of communication rounds in a forward pass; "ulysses" takes two: from rows to heads and back."""
        return 2 if self.strategy == "ulysses" else 1 if self.bytes_received.any() else 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal for equal plans; ranks compare it before they send data."""
        sizes = (str(self.mask), self.seq_len, self.heads, self.kv_heads, self.head_dim, str(self.dtype))
        digest = hashlib.sha256(repr((*sizes, self.strategy, self.layout.fingerprint)).encode())
        for array in (self.needs.ranks, self.needs.starts, self.needs.stops):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def rank(self, number: int) -> RankPlan:
        """Return one rank's part of the exchange plan."""
        check_int("number", number, 0)
        if number >= self.ranks:
            raise value_error("number", f"be below {self.ranks}", number)
        receives, sends = self._transfers(number)
        return RankPlan(
            number,
            self.layout.rows(number),
            receives,
            sends,
            int(self.bytes_sent[number]),
            int(self.bytes_received[number]),
            int(self.pairs[number]),
            int(self.peak_bytes[number]),
        )

    def seconds(self, machine: Machine | None = None) -> float:
        """Estimate the seconds of a forward pass on the slowest rank of an assumed machine, with communication."""
        machine = Machine() if machine is None else machine
        computing = 4 * self.head_dim * self.pairs / machine.flops
        sending = np.maximum(self.bytes_sent, self.bytes_received) / machine.bandwidth
        return float((computing + sending).max()) + self.rounds * machine.latency

    @property
    def mask_text(self) -> str:
        """The mask as text, shortened to 100 characters because a mask may contain thousands of lengths."""
        text = str(self.mask)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

    def __str__(self) -> str:
        mib = 1 / 2**20
        counts, tokens = self.layout.counts, "{ranks:,}; tokens per rank: {least:,} to {most:,}"
        if counts.min() == counts.max():
            tokens = "{ranks:,}; tokens per rank: {most:,}"
        strategy = "{strategy}, {rounds} round" if self.rounds == 1 else "{strategy}, {rounds} rounds"
        sent, most = "at most {most:,.1f} MiB per rank, {mean:,.1f} MiB on average", self.bytes_sent.max() * mib
        work = "{pairs:,} pairs on the busiest rank, {imbalance:.2f} times the mean"
        held = "at most {most:,.1f} MiB of keys and values per rank"
        rows = {
            "ranks": translated(tokens, ranks=self.ranks, least=counts.min(), most=counts.max()),
            "mask": translated("{mask} over {tokens:,} tokens", mask=self.mask_text, tokens=self.seq_len),
            "layout": self.layout.name,
            "strategy": translated(strategy, strategy=self.strategy, rounds=self.rounds),
            "sent": translated(sent, most=most, mean=self.bytes_sent.mean() * mib),
            "received": translated("at most {most:,.1f} MiB per rank", most=self.bytes_received.max() * mib),
            "work": translated(work, imbalance=self.imbalance, pairs=self.pairs.max()),
            "memory": translated(held, most=self.peak_bytes.max() * mib),
        }
        lines = [f"{left_aligned(translated(name), 11)}{text}" for name, text in rows.items()]
        for name, reasons in self.refused.items():
            lines += [translated("not {name}: {why}", name=name, why=translated(why)) for why in reasons]
        return "\n".join(lines)

    __repr__ = __str__

    def _bytes(self, tokens: Ints, *, sends: bool) -> Ints:
        counts = self.layout.counts
        if self.strategy == "gather":
            # A rank sends its tokens to all others and receives theirs.
            return (counts * (self.ranks - 1) if sends else self.seq_len - counts) * self.bytes_of_token
        if self.strategy == "ulysses":
            # Queries and outputs of all heads, and keys and values of all key heads, except the local part.
            width = 2 * self.heads * self.head_dim * self.dtype.itemsize + self.bytes_of_token
            others = counts * (self.ranks - 1) if sends else self.seq_len - counts
            return others * width // self.ranks
        return tokens * self.bytes_of_token

    def _transfers(self, number: int) -> tuple[tuple[tuple[int, range], ...], tuple[tuple[int, range], ...]]:
        if self.strategy == "fetch":
            return tuple(self.needs.from_others(number)), tuple(self.needs.to_others(number))
        if self.strategy == "ulysses":
            return (), ()
        peers = [peer for peer in range(self.ranks) if peer != number]
        local = self.layout.rows(number)
        return (
            tuple((peer, keys) for peer in peers for keys in self.layout.rows(peer)),
            tuple((peer, keys) for peer in peers for keys in local),
        )


def exchange(
    mask: Mask | None,
    seq_len: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 8,
    *,
    layout: str | Layout = "auto",
    strategy: str = "auto",
    machine: Machine | None = None,
) -> Exchange:
    """Plan self-attention over a sequence that is split across ranks, without a process group or communication.

    Args:
        mask: the mask; None for full attention.
        seq_len: number of tokens in the full sequence.
        heads, kv_heads: number of query heads and of key heads (the same number when None).
        head_dim: width of a head.
        dtype: dtype of keys and values.
        ranks: number of devices.
        layout: "contiguous", "zigzag", "striped", "balanced" (equal work, for packed documents), "auto" for the one
            estimated to be fastest, or a `Layout`.
        strategy: "fetch" (the keys visible to a rank's queries), "gather" (all keys), "ulysses" (all rows of some
            heads), or "auto".
        machine: assumed speed of a rank, for "auto".

    Raises:
        ValueError, TypeError: a mask, name or number is invalid.
        UnsupportedError: the named strategy would not be exact; every reason is listed.

    Cost: at most O(tokens / 128) work in NumPy; 1,024 ranks and a million tokens take a fraction of a second.

    Example:
        >>> from saccade.masks import sliding_window
        >>> plan = exchange(sliding_window(4096), 1 << 20, 32, 8, 128, ranks=1024)
        >>> plan.strategy, int(plan.bytes_sent.max()) / 2**20
        ('fetch', 15.99609375)
    """
    sizes = {"seq_len": seq_len, "heads": heads, "head_dim": head_dim, "ranks": ranks}
    seq_len, heads, head_dim, ranks = (check_int(name, size) for name, size in sizes.items())
    kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads)
    if heads % kv_heads:
        raise value_error("kv_heads", f"divide the {heads} heads", kv_heads)
    if not isinstance(layout, Layout):
        check_choice("layout", layout, ("auto", *LAYOUTS))
    check_choice("strategy", strategy, ("auto", *STRATEGIES))
    check_type("dtype", dtype, torch.dtype, "be a torch.dtype")
    check_type("mask", mask, (Mask, NoneType), "be a mask or None", hint="masks.Dense(tensor) converts a tensor")
    mask = Full() if mask is None else mask
    reasons = {name: _reasons(name, mask, heads, kv_heads, ranks) for name in STRATEGIES}
    if strategy != "auto" and reasons[strategy]:
        raise unsupported(f'strategy="{strategy}"', reasons[strategy])
    refused = {name: why for name, why in reasons.items() if why}
    names: tuple[str | Layout, ...] = LAYOUTS if layout == "auto" else (layout,)
    able = [name for name in STRATEGIES if not reasons[name]] if strategy == "auto" else [strategy]
    plans = [
        Exchange(mask, seq_len, heads, kv_heads, head_dim, dtype, needs.layout, one, {}, needs)
        for needs in (_needs(mask, name, seq_len, ranks) for name in names)
        for one in able
    ]
    times = [plan.seconds(machine) for plan in plans]
    best = min(range(len(plans)), key=times.__getitem__)
    for plan, time in zip(plans, times, strict=True):
        if plan is not plans[best]:
            reason = "estimated at {slower:.3g} ms per forward pass, instead of {faster:.3g} ms"
            reason = Message(reason, slower=1e3 * time, faster=1e3 * times[best])
            refused[f"{plan.strategy}, {plan.layout.name}"] = (reason,)
    return dataclasses.replace(plans[best], refused=refused)


def _reasons(strategy: str, mask: Mask, heads: int, kv_heads: int, ranks: int) -> tuple[str, ...]:
    """Return the reasons why an exchange strategy would not be exact; the tuple is empty if it is exact."""
    if strategy != "ulysses":
        return ()
    why: list[str] = []
    if heads % ranks or kv_heads % ranks:
        indivisible = "{ranks:,} ranks do not divide {heads} heads and {kv_heads} key heads"
        why.append(Message(indivisible, ranks=ranks, heads=heads, kv_heads=kv_heads))
    if mask.shape[1] > 1:
        why.append("its mask differs between heads, and each rank would have different heads")
    return tuple(why)


def _needs(mask: Mask, layout: str | Layout, seq_len: int, ranks: int) -> KeyRequirements:
    """Return the keys that each rank requires; the result is cached if the mask can be compared by value."""
    function: Any = _cached_needs if mask.is_value else _cached_needs.__wrapped__
    needs: KeyRequirements = function(mask, layout, seq_len, ranks)
    return needs


@lru_cache(maxsize=64)
def _cached_needs(mask: Mask, layout: str | Layout, seq_len: int, ranks: int) -> KeyRequirements:
    if isinstance(layout, Layout):
        return KeyRequirements(mask, layout)
    if layout == "balanced":
        work = work_of_chunks(mask, seq_len, chunk_size(seq_len, ranks))
        return KeyRequirements(mask, balanced(seq_len, ranks, work))
    return KeyRequirements(mask, layout_of(layout, seq_len, ranks))
