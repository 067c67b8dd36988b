"""ScoreMatrix: the checked ingredients of the scores; scale → softcap → bias → mask, written once."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable

import torch
from torch import Tensor

from saccade.engine.at_positions import AtPositions, GivenPositions, check_domain, check_positions, first_position
from saccade.engine.bias import DistanceTerm, Term
from saccade.engine.checks import (
    autocast,
    check_alike,
    check_query_key,
    checked_scale,
    checked_sink,
    checked_softcap,
    dense_term,
)
from saccade.engine.grouping import grouped, groups_of, joined, product, take
from saccade.errors import describe, hidden_by_vmap, type_error, value_error
from saccade.masks import Mask, as_mask
from saccade.masks.plans import plan_of
from saccade.plan import Plan, Strip, Tile
from saccade.positions import Bias
from saccade.scores import Score
from saccade.scores.base import TileFunction, prepared
from saccade.transforms import is_mapped

__all__ = ["ROOM_FOR_HIDDEN", "ScoreMatrix"]

ROOM_FOR_HIDDEN = 1 << 23  # entries of hidden pairs that a plan may keep: 8 MB


class ScoreMatrix:
    """``softcap(scale * score(query, key)) + bias`` where the mask allows, -inf elsewhere; nothing is computed yet.

    The one carrier of the ingredients: kernels and statistics read them from here, every check happens here, and
    only here are positions translated to indices. It holds tensors, never modules: scores are prepared and bias tables
    read when it is made.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``; head h reads group ``h // (heads // kv_heads)``.
        mask: see `saccade.attention`.
        score, bias, scale, softcap, sink_logit, q_positions, kv_positions: see `saccade.attention`.
        where: the user's function, for error messages.

    Attributes:
        shape: (batch, heads, q_len, kv_len).
        dtype: of the query as it was given, and of the output.
        query, key: as the score has prepared them.
        tile_function, parameters: how a few of them are compared; None and () for the dot product.
        scale: a float; the default already filled in.
        bias: what is added to the scores; None for nothing.
        sink_logit: ``[heads]``, in `compute_dtype`; None for no sink.
        rule: the mask on the positions that the plan counts.
        row_positions: where the rows stand, if they are in another order, int64 ``[q_len]``; else None.
        answers: what a rule that calls functions said in the forward pass, as fingerprints; the backward pass asks
            again, and must hear the same.
        compute_dtype: float64 for float64 inputs, else float32.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: object = None,
        *,
        score: Score | None = None,
        bias: Tensor | Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        where: str = "attention",
    ):
        if isinstance(query, Tensor) and not query.is_meta and torch.is_autocast_enabled(query.device.type):
            query, key = autocast(query), autocast(key)
        self.where = where
        self.answers: dict[Hashable, int] | None = None
        self.row_positions: Tensor | None = None
        self.shape = shape = check_query_key(query, key, score, where)
        self.dtype = query.dtype
        self.query, self.key = query, key
        self.tile_function: TileFunction | None = None
        self.parameters: tuple[Tensor, ...] = ()
        self.softcap = checked_softcap(softcap, where)
        if score is None:
            self.scale = query.shape[3] ** -0.5 if scale is None and query.shape[3] else checked_scale(scale, where)
        else:
            self.scale = score.default_scale(query.shape[3]) if scale is None else checked_scale(scale, where)
            with torch.autocast(query.device.type, enabled=False):
                self.query, self.key, self.tile_function, self.parameters = prepared(score, query, key)
        self.sink_logit = None if sink_logit is None else checked_sink(sink_logit, query, shape, where)
        self.rule = as_mask(mask, shape, where=where)
        if mask is not None and any(is_mapped(x) for x in self.rule.tensors()):
            raise hidden_by_vmap(where, "tensors of the mask")
        _, _, q_len, kv_len = shape
        if q_positions is None and kv_positions is None:
            check_domain(self.rule, None, None, q_len, kv_len, where)
            self.origin = (kv_len - q_len, 0)
        else:
            self._place(q_positions, kv_positions, raw_tensor=isinstance(mask, Tensor))
        self.bias: Term | None = None
        if bias is not None:
            self.bias = (
                self._distances(bias, query) if isinstance(bias, Bias) else dense_term(bias, query, shape, where)
            )
        # Where this is traced, it is not needed: what the plan is for happens behind one operation.
        self._plan = None if torch.compiler.is_compiling() else plan_of(self.rule, shape, *self.origin)

    @classmethod
    def assembled(
        cls,
        query: Tensor,
        key: Tensor,
        rule: Mask,
        origin: tuple[int, int],
        *,
        dtype: torch.dtype,
        bias: Term | None,
        scale: float,
        softcap: float | None,
        tile_function: TileFunction | None,
        parameters: tuple[Tensor, ...],
    ) -> ScoreMatrix:
        """From checked and prepared ingredients, as another one holds them; without a sink."""
        other = cls.__new__(cls)
        other.where, other.answers, other.row_positions, other._plan = "attention", None, None, None
        other.shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        other.query, other.key, other.dtype = query, key, dtype
        other.rule, other.origin, other.bias = rule, origin, bias
        other.scale, other.softcap, other.sink_logit = scale, softcap, None
        other.tile_function, other.parameters = tile_function, parameters
        return other

    @property
    def plan(self) -> Plan:
        """The tiles that hold every allowed pair."""
        if self._plan is None:
            self._plan = plan_of(self.rule, self.shape, *self.origin)
        return self._plan

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def ingredients(self) -> tuple[Tensor, ...]:
        """What gradients may be taken of."""
        bias = () if self.bias is None else (self.bias.source,)
        sink = () if self.sink_logit is None else (self.sink_logit,)
        return (self.query, self.key, *bias, *sink, *self.parameters)

    @property
    def device(self) -> torch.device:
        """Where the ingredients are."""
        return self.query.device

    def everything(self) -> Tile:
        """The whole matrix as one tile."""
        batch, heads, q_len, kv_len = self.shape
        keys = Strip(range(kv_len), True if self.plan.is_full else "all pairs")
        return Tile(slice(0, batch), slice(0, heads), range(q_len), (keys,), self.rule)

    @property
    def row_plan(self) -> Plan:
        """A plan in which every row stands in one tile: `plan`, unless that overlaps."""
        return plan_of(self.rule, self.shape, *self.origin, True) if self.plan.overlaps else self.plan

    def tile(self, tile: Tile) -> Tensor:
        """Scores of a tile, ``[batch, heads, rows, columns]`` in the compute dtype; -inf where not allowed."""
        groups = groups_of(tile.heads, self.shape[1], self.key.shape[1])
        columns = joined(tuple(strip.keys for strip in tile.columns))
        q = take(self.query[tile.batch, tile.heads], (tile.rows,), 2).to(self.compute_dtype)
        q = q * self.scale if self.tile_function is None else q
        k = take(self.key[tile.batch, groups], columns, 2).to(self.compute_dtype)
        scores = product(q, k.mT) if self.tile_function is None else self.compared(q, k)
        scores = self.biased(self.capped(scores), tile)
        if not scores.requires_grad:
            return self.hide_(scores, tile)
        allowed = self.allowed(tile)
        return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled scores after the softcap; in place where no gradient is recorded."""
        if self.softcap is None:
            return scores
        if scores.requires_grad:
            return self.softcap * torch.tanh(scores / self.softcap)
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def biased(self, scores: Tensor, tile: Tile) -> Tensor:
        """Capped scores with the bias; in place where no gradient is recorded."""
        if self.bias is None:
            return scores
        bias = self.read_bias(tile)
        if scores.requires_grad or bias.requires_grad:
            return scores + bias
        return scores.add_(bias)

    def read_bias(self, tile: Tile) -> Tensor:
        """What `biased` adds, in the compute dtype."""
        assert self.bias is not None  # who calls has looked
        return self.bias.read(tile).to(self.compute_dtype)

    def hide_(self, scores: Tensor, tile: Tile) -> Tensor:
        """-inf where not allowed, in place: most strips have nothing to hide, and to mask them all is dear."""
        start = 0
        for strip in tile.columns:
            stop = start + len(strip.keys)
            if strip.residual is not True:
                scores[..., start:stop].masked_fill_(self._hidden(tile._replace(columns=(strip,))), -math.inf)
            start = stop
        return scores

    @property
    def keeps_hidden(self) -> bool:
        """Whether the pairs that a strip hides are kept with the plan."""
        return self.rule.is_value and self.rule.shape == (1, 1)

    def key_of_hidden(self, tile: Tile) -> Hashable:
        """Of a tile of one strip: where keys are equal, the same pairs are hidden."""
        (strip,) = tile.columns
        return ("hidden", self.device, tile.height, len(strip.keys), strip.residual)

    def _hidden(self, tile: Tile) -> Tensor:
        """The pairs of one strip that are not allowed; kept with the plan where the rule is a value."""
        key = self.key_of_hidden(tile)
        memo = self.plan.memo
        kept = memo.get(key) if self.keeps_hidden else None
        if isinstance(kept, Tensor):
            return kept
        hidden = self.hidden(tile)
        room = memo.get("room for hidden", ROOM_FOR_HIDDEN)
        if self.keeps_hidden and isinstance(room, int) and hidden.numel() <= room:
            memo[key], memo["room for hidden"] = hidden, room - hidden.numel()
        return hidden

    def hidden(self, tile: Tile) -> Tensor:
        """The pairs of some unsure strips that are not allowed, bool ``[batch | 1, heads | 1, rows, columns]``."""
        allowed = self.allowed(tile)
        assert allowed is not None  # a strip is unsure
        # A rule that tells none apart may answer for each.
        return ~(allowed[:1, :1] if self.keeps_hidden else allowed)

    def compared(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of a few queries and keys by the score's own function, scaled: ``[batch, heads, rows, columns]``."""
        assert self.tile_function is not None
        function, parameters = self.tile_function, self.parameters
        return grouped(lambda left, right: function(left, right, *parameters), q, k) * self.scale

    def allowed(self, tile: Tile) -> Tensor | None:
        """Which pairs of a tile are allowed, bool ``[batch | 1, heads | 1, rows, columns]``; None if all are."""
        if all(strip.residual is True for strip in tile.columns):
            return None
        b, h, q = self.batch_index(tile), self.head_index(tile), self.q_index(tile)
        parts = []
        for strip in tile.columns:
            if strip.residual is True:
                parts.append(torch.ones(1, 1, 1, len(strip.keys), dtype=torch.bool, device=self.device))
            else:
                parts.append(tile.rule.allows(b, h, q, self.kv_index((strip.keys,))))
        sizes = torch.broadcast_shapes(*(part.shape[:3] for part in parts), (1, 1, tile.height))
        wide = [part.expand(*sizes, len(strip.keys)) for part, strip in zip(parts, tile.columns, strict=True)]
        allowed = wide[0] if len(wide) == 1 else torch.cat(wide, 3)
        if self.answers is not None and self.rule.asks_functions:
            self._check_answer(tile, allowed)
        return allowed

    def batch_index(self, tile: Tile) -> Tensor:
        """int64 ``[batch, 1, 1, 1]``."""
        return torch.arange(tile.batch.start, tile.batch.stop, device=self.device)[:, None, None, None]

    def head_index(self, tile: Tile) -> Tensor:
        """int64 ``[1, heads, 1, 1]``."""
        return torch.arange(tile.heads.start, tile.heads.stop, device=self.device)[None, :, None, None]

    def q_index(self, tile: Tile) -> Tensor:
        """What the rule calls the rows of a tile, int64 ``[1, 1, rows, 1]``."""
        return _count((tile.rows,), self.origin[0], self.device)[None, None, :, None]

    def kv_index(self, columns: tuple[range, ...]) -> Tensor:
        """What the rule calls these key columns, int64 ``[1, 1, 1, columns]``."""
        return _count(columns, self.origin[1], self.device)[None, None, None, :]

    def positions(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Where rows and columns of a tile stand, int64 ``[batch | 1, 1, rows, 1]``, ``[batch | 1, 1, 1, columns]``."""
        q, kv = self.q_index(tile), self.kv_index(tuple(strip.keys for strip in tile.columns))
        if isinstance(self.rule, AtPositions):
            return self.rule.positions(self.batch_index(tile), q, kv)
        return (q if self.row_positions is None else self.row_positions[q]), kv

    def detached(self) -> ScoreMatrix:
        """The same matrix outside of the autograd graph."""
        other = self.replaced(self.query.detach(), self.key.detach())
        other.answers = {}
        other.parameters = tuple(x.detach() for x in self.parameters)
        if self.bias is not None:
            other.bias = self.bias.of(self.bias.source.detach())
        return other

    def sources(self, value: Tensor) -> tuple[Tensor | None, ...]:
        """All tensors that a product is a function of, sinks aside: query, key, value, bias, parameters."""
        return (self.query, self.key, value, None if self.bias is None else self.bias.source, *self.parameters)

    def of(self, sources: tuple[Tensor | None, ...]) -> tuple[ScoreMatrix, Tensor]:
        """The same matrix made of other `sources`, and the value among them."""
        query, key, value, bias, *parameters = sources
        assert query is not None
        assert key is not None
        assert value is not None
        other = self.replaced(query, key)
        other.parameters = tuple(x for x in parameters if x is not None)
        if self.bias is not None and bias is not None:
            other.bias = self.bias.of(bias)
        return other, value

    def repeated(self, size: int) -> ScoreMatrix:
        """The same rule for a batch that is ``size`` times as large; only where it does not tell batch items apart."""
        batch, heads, q_len, kv_len = self.shape
        other = self.replaced(self.query, self.key)
        other.shape = (size * batch, heads, q_len, kv_len)
        other._plan = plan_of(self.rule, other.shape, *self.origin)
        return other

    def replaced(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> ScoreMatrix:
        """The same rule on other queries and keys of the same lengths; the plan is kept."""
        other = copy.copy(self)
        other.query, other.key = query, key
        other.scale = self.scale if scale is None else scale
        return other

    def in_order(self, rule: Mask, rows: Tensor) -> ScoreMatrix:
        """The same matrix with its rows in another order: row i is what row ``rows[i]`` was.

        Args:
            rule: the mask, its queries counted in the new order from 0.
            rows: int64 ``[q_len]``.
        """
        other = self.renumbered(rule)
        other.query = self.query.index_select(2, rows)
        other.row_positions = rows + self.origin[0]
        other.bias = None if self.bias is None else self.bias.in_order(rows, self.shape[3])
        return other

    def renumbered(self, rule: Mask) -> ScoreMatrix:
        """The rule and the plan of `in_order`, around queries that are where they were."""
        other = self.replaced(self.query, self.key)
        other.rule, other.origin = rule, (0, self.origin[1])
        other._plan = plan_of(rule, self.shape, *other.origin)
        return other

    def check_value(self, value: Tensor) -> None:
        """Raise if ``value`` is not ``[batch, kv_heads, kv_len, value_dim]`` of the key's dtype and device."""
        where, key = self.where, self.key
        if not isinstance(value, Tensor):
            raise type_error(where, "value", "be a tensor", type(value).__name__)
        if value.shape[:-1] != key.shape[:-1]:
            expected = f"[{key.shape[0]}, {key.shape[1]}, {key.shape[2]}, value_dim]"
            facts = [describe("key", key), describe("value", value)]
            raise value_error(where, "value", f"have shape {expected}", list(value.shape), facts=facts)
        if value.dtype != self.dtype or value.device != key.device:
            check_alike(where, query=self.query.to(self.dtype), key=key.to(self.dtype), value=value)

    def _check_answer(self, tile: Tile, allowed: Tensor) -> None:
        """Raise if a rule that calls functions answers otherwise than it did before, for the same pairs."""
        rows = torch.arange(allowed.shape[2], device=self.device) * 1_000_003
        columns = torch.arange(allowed.shape[3], device=self.device) * 7_919
        marks = (rows[:, None] + columns + 12_345) % 2_147_483_647
        fingerprint = int((allowed * marks).sum())
        where = (tile.batch.start, tile.heads.start, tile.rows, tile.columns)
        if self.answers is not None and self.answers.setdefault(where, fingerprint) != fingerprint:
            hint = "bind what the function reads, e.g. lambda b, h, q, kv, n=n: kv < n, or pass a tensor"
            sentence = f"{self.where}: mask must answer alike in the forward and backward pass; got another answer."
            raise RuntimeError(f"{sentence}\nHint: {hint}")

    def _distances(self, bias: Bias, query: Tensor) -> DistanceTerm:
        """The bias as a table of the distances that occur."""
        _, heads, q_len, kv_len = self.shape
        q, kv = self._addresses(bias)
        if q is None or kv is None:
            first = self.origin[0] - self.origin[1]
            lowest, highest = first - (kv_len - 1), first + q_len - 1
        elif q.numel() and kv.numel():
            first, lowest, highest = 0, int(q.min() - kv.max()), int(q.max() - kv.min())
        else:
            first, lowest, highest = 0, 0, 0
        if bias.reach is not None:
            lowest, highest = (min(max(end, -bias.reach), bias.reach) for end in (lowest, highest))
        distances = torch.arange(lowest, max(lowest, highest) + 1, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            table = bias.values(distances, query, self.scale)
        fits = all(own in (1, size) for own, size in zip(table.shape, self.shape[:3], strict=False))
        if table.dim() != 4 or not fits:
            name = type(bias).__name__
            got = f"{name} for {table.shape[1]} heads" if table.dim() == 4 else name
            raise value_error(self.where, "bias", f"be made for {heads} heads, or one", got)
        table = table if table.dtype == torch.float64 else table.float()
        return DistanceTerm(table.to(self.compute_dtype), lowest, first, q, kv)

    def _addresses(self, bias: Bias) -> tuple[Tensor | None, Tensor | None]:
        """What the bias subtracts, int64 ``[batch | 1, len]``; None where queries and keys follow one by one."""
        _, _, q_len, kv_len = self.shape
        if isinstance(self.rule, AtPositions):
            return bias.address(self.rule.q_positions), bias.address(self.rule.kv_positions)
        q, kv = (
            torch.arange(first, first + length, device=self.device)[None]
            for first, length in zip(self.origin, (q_len, kv_len), strict=True)
        )
        # Of more queries than keys the first stand before position 0: of those only distances can be taken.
        begun = q[:, max(0, -self.origin[0]) :]
        if bias.address(begun) is begun:
            return None, None
        return bias.address(q), bias.address(kv)

    def _place(self, q_positions: GivenPositions, kv_positions: GivenPositions, *, raw_tensor: bool) -> None:
        batch, _, q_len, kv_len = self.shape
        where = self.where
        if q_positions is None:
            hint = "without it the last query stands at the last key's index, which kv_positions may contradict"
            raise value_error(where, "q_positions", "be given together with kv_positions", None, hint=hint)
        q_positions = check_positions(q_positions, "q_positions", batch, q_len, where)
        kv_positions = check_positions(kv_positions, "kv_positions", batch, kv_len, where)
        if raw_tensor:
            hint = "wrap it as masks.Dense(tensor) if its rows and columns are to be read at positions"
            rule = "be a rule on positions (not a tensor) when positions are given"
            raise value_error(where, "mask", rule, "a bool tensor", hint=hint)
        check_domain(self.rule, q_positions, kv_positions, q_len, kv_len, where)
        q_first = first_position(q_positions, kv_len - q_len)
        kv_first = first_position(kv_positions, 0)
        if q_first is not None and kv_first is not None:
            self.origin = (q_first, kv_first)
            return
        self.rule = AtPositions.of(self.rule, q_positions, kv_positions, q_len, kv_len, self.device)
        self.origin = (0, 0)


def _count(spans: tuple[range, ...], first: int, device: torch.device) -> Tensor:
    parts = [torch.arange(span.start + first, span.stop + first, span.step, device=device) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
