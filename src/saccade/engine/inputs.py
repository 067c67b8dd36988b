"""AttentionInputs: the checked arguments of attention, in the form that kernels and statistics use."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from saccade.engine.bias.score_mod import Modification
from saccade.engine.bias.term import Term
from saccade.engine.check_inputs import (
    as_score,
    autocast,
    bias_term,
    check_query_key,
    checked_scale,
    checked_sink,
    checked_softcap,
)
from saccade.engine.positions.positioned_mask import PositionedMask, at_origin, checked_positions, resolve_positions
from saccade.engine.to_device import moved
from saccade.masks import Full, Mask, as_mask
from saccade.masks.convert.as_mask import check_batch_and_heads, from_causal_bias
from saccade.masks.convert.deferred_masks import AtOrigin, read_mask
from saccade.masks.convert.recognise_tensor import recognise_tensors
from saccade.masks.convert.serialize import decode, encode
from saccade.masks.plan_cache import plan_of
from saccade.plan import ColumnRange, Plan, Tile
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.scores import Score
from saccade.scores.base import ScoreMod, TileFunction, prepared
from saccade.support.errors import hidden_by_vmap, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import any_autocast, is_mapped, is_tracing, without_autocast
from saccade.support.validation import is_causal_bias

_FULL, _NOTHING = Full(), torch.empty(0)


class _Planned:
    """A descriptor that computes the plan of the inputs on first use, like a `cached_property` without a lock."""

    def __get__(self, inputs: AttentionInputs, kind: type) -> Plan:
        plan = inputs.__dict__["plan"] = plan_of(inputs.rule, inputs.shape, *inputs.origin)
        return plan


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The checked inputs of attention: query, key, mask, bias and options. Nothing is computed yet.

    They define the scores: ``modify(softcap(scale * score(query, key))) + bias`` for allowed pairs, -inf for masked
    pairs. Kernels and statistics read only this class, which holds checked arguments, with indices instead of
    positions. The fields contain tensors, never modules: `of` applies score modules and reads the tables of biases.

    Attributes:
        shape: (batch, heads, q_len, kv_len).
        dtype: dtype of the user's query and of the output.
        query: ``[batch, heads, q_len, width]``, after preparation by the score.
        key: ``[batch, kv_heads, kv_len, width]``; head h reads key head ``h // (heads // kv_heads)``.
        rule: the mask, in the coordinates of the plan.
        origin: coordinates of the first query and the first key in the mask. Further coordinates are consecutive.
        scale: factor that multiplies the scores; the default has been filled in.
        softcap: bound on the scores; None if there is none.
        bias: the bias added to the scores; None without a bias.
        sink_logit: ``[heads]``, in `compute_dtype`; None without a sink.
        tile_function, parameters: function that computes the scores of a tile, and its tensors; None and () for dot
            products.
        modification: the user's score function, called after scale and softcap; None if there is none.
        row_positions: positions of the rows if they are permuted, int64 ``[q_len]``; None if they are not.
        is_live: whether the mask reads tensors that may change between two products; see `current`.
        fingerprints: hashes of the results of the mask's functions in the forward pass, by tile, so that the backward
            pass can check that it gets the same results.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    query: Tensor
    key: Tensor
    rule: Mask
    origin: tuple[int, int]
    scale: float
    softcap: float | None = None
    bias: Term | None = None
    sink_logit: Tensor | None = None
    tile_function: TileFunction | None = None
    parameters: tuple[Tensor, ...] = ()
    modification: Modification | None = None
    row_positions: Tensor | None = None
    is_live: bool = False
    fingerprints: dict[Hashable, int] | None = None
    plan = _Planned()

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        mask: object = None,
        *,
        score: Score | ScoreMod | None = None,
        bias: Tensor | Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> AttentionInputs:
        """Check the arguments of `saccade.attention` and convert them to inputs."""
        if any_autocast():
            query, key = autocast(query), autocast(key)
        score = None if score is None else as_score(score)
        shape, dtype = check_query_key(query, key, score), query.dtype
        if softcap is not None:
            softcap = checked_softcap(softcap)
        width = query.shape[3]
        if scale is not None or not width:
            scale = checked_scale(scale)
        else:
            scale = width**-0.5 if score is None else score.default_scale(width)
        sink_logit = None if sink_logit is None else checked_sink(sink_logit, query, shape)
        has_positions = q_positions is not None or kv_positions is not None
        if bias is not None and is_causal_bias(bias):
            mask, bias = _with_causal(mask, bias, shape, has_positions), None
        if mask is None:
            rule: Mask = _FULL
        else:
            rule = (
                mask if isinstance(mask, Mask) and not is_tracing() and mask.shape == (1, 1) else as_mask(mask, shape)
            )
        tensors = () if mask is None else rule.tensors()
        for x in tensors:
            if is_mapped(x):
                raise hidden_by_vmap("tensors of the mask")
        q: Positions | None = None
        kv: Positions | None = None
        if has_positions:
            q, kv = checked_positions(q_positions, kv_positions, shape)
            if isinstance(mask, Tensor):
                raise _refused_at_positions(mask, "mask")
        origin = (shape[3] - shape[2], 0)
        is_default = mask is None and q is None
        rule, origin = (rule, origin) if is_default else resolve_positions(rule, q, kv, shape, query.device)
        term = None if bias is None else bias_term(bias, query, shape, rule, origin, scale)
        tile_function: TileFunction | None = None
        parameters: tuple[Tensor, ...] = ()
        modification = None
        if score is not None:
            with without_autocast(query.device):
                query, key, tile_function, parameters, modify = prepared(score, query, key)
                place = () if modify is None else _first_pair(rule, origin, query, key)
                modification = None if modify is None else Modification.of(modify, place, wide_dtype(dtype))
        inputs = object.__new__(cls)  # set all fields at once: twice as fast as a dataclass's __init__
        # fmt: off
        inputs.__dict__.update(
            shape=shape, dtype=dtype, query=query, key=key, rule=rule, origin=origin, scale=scale,
            softcap=softcap, bias=term, sink_logit=sink_logit, tile_function=tile_function, parameters=parameters,
            modification=modification, is_live=bool(tensors) and not isinstance(rule, PositionedMask),
        )
        # fmt: on
        return inputs

    def current(self) -> AttentionInputs:
        """Return inputs with a new plan if the tensors of the mask may have changed; otherwise, these inputs."""
        if not self.is_live:
            return self
        return self.replaced(rule=recognise_tensors(self.rule, self.shape, self.origin), is_live=False)

    def after_tracing(self) -> AttentionInputs:
        """Return inputs whose mask no longer belongs to a traced program, for use outside of the graph."""
        shape, encoded = self.shape, encode(self.rule)
        if encoded is None:
            rule = self.rule.with_atoms(lambda atom: cast("Mask", read_mask(atom, shape)))
        else:
            rule = decode(*encoded, shape)
        rule, origin = rule if isinstance(rule, AtOrigin) else at_origin(rule, self.origin, shape)
        check_batch_and_heads(rule, shape)
        return self.replaced(rule=rule, origin=origin)

    @property
    def row_plan(self) -> Plan:
        """A plan in which each row is in exactly one tile: `plan` itself, unless its tiles overlap."""
        return plan_of(self.rule, self.shape, *self.origin, True) if self.plan.overlaps else self.plan

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of scores and softmax: float64 for float64 inputs, and float32 for all others."""
        return wide_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the input tensors."""
        return self.query.device

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Input tensors that may need gradients."""
        bias = () if self.bias is None else (self.bias.source,)
        sink = () if self.sink_logit is None else (self.sink_logit,)
        return (self.query, self.key, *bias, *sink, *self.parameters, *self.captured)

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled dot products, with or without a softcap."""
        return self.tile_function is None and self.bias is None and self.modification is None

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Tensors that a user's score function captures and that need gradients."""
        return () if self.modification is None else self.modification.leaves

    @property
    def everything(self) -> Tile:
        """A single tile that covers the full score matrix."""
        batch, heads, q_len, kv_len = self.shape
        keys = ColumnRange(range(kv_len), True if self.plan.is_full else "all pairs")
        return Tile(slice(0, batch), slice(0, heads), range(q_len), (keys,), self.rule)

    def replaced(self, **changes: Any) -> AttentionInputs:
        """Return the inputs with some fields replaced. The plan is reused unless mask, shape or origin change."""
        other = object.__new__(AttentionInputs)
        other.__dict__.update(self.__dict__, **changes)
        if "rule" in changes or "shape" in changes or "origin" in changes:  # a form that a compiler can trace
            other.__dict__.pop("plan", None)
        return other

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> AttentionInputs:
        """Return the inputs on a different device or in a different dtype."""
        new_dtype = self.dtype if dtype is None else dtype
        narrow = self.query.dtype == self.dtype and self.tile_function is None
        query_dtype = new_dtype if narrow else wide_dtype(new_dtype)
        changes = {name: moved(getattr(self, name), device, dtype) for name in ("bias", "sink_logit", "parameters")}
        return self.replaced(
            **changes,
            dtype=new_dtype,
            query=self.query.to(device, query_dtype),
            key=self.key.to(device, query_dtype),
            rule=moved(self.rule, device, None),
            row_positions=moved(self.row_positions, device, None),
        )

    def sources(self, value: Tensor) -> tuple[Tensor | None, ...]:
        """Return all input tensors except the sink: query, key, value, bias, parameters and captured tensors."""
        bias = None if self.bias is None else self.bias.source
        captured = () if self.modification is None else self.modification.leaves  # `captured` would be one more call
        return (self.query, self.key, value, bias, *self.parameters, *captured)

    def of_sources(self, sources: tuple[Tensor | None, ...]) -> tuple[AttentionInputs, Tensor]:
        """Rebuild the inputs and the value from tensors in the order of `sources`."""
        query, key, value, bias, *parameters = sources[: len(sources) - len(self.captured)]
        assert value is not None
        term = self.bias if self.bias is None or bias is None else self.bias.of(bias)
        return self.replaced(query=query, key=key, bias=term, parameters=tuple(parameters)), value

    def emptied(self) -> AttentionInputs:
        """Return the inputs without their source tensors, so that saving them for the backward pass takes no memory."""
        bias = None if self.bias is None else self.bias.of(_NOTHING)
        return self.replaced(query=_NOTHING, key=_NOTHING, parameters=(), bias=bias, fingerprints={})


def _with_causal(mask: object, bias: object, shape: tuple[int, int, int, int], has_positions: bool) -> Mask:
    """Convert torch's ``causal_lower_right`` or ``causal_upper_left``, passed as the bias, to a mask."""
    for name, x in (("mask", mask), ("bias", bias)):
        if has_positions and isinstance(x, Tensor):
            raise _refused_at_positions(x, name)
    causal = from_causal_bias(bias, shape[2], shape[3], "bias")
    return causal if mask is None else as_mask(mask, shape) & causal


def _refused_at_positions(x: Tensor, name: str) -> Exception:
    is_causal = is_causal_bias(x)
    hint = "wrap it as masks.Dense(tensor) if its rows and columns are indexed by positions"
    hint = "masks.Causal() is the rule on positions" if is_causal else hint
    what = "be a rule on positions (not a tensor) when positions are given"
    return value_error(name, what, "a CausalBias" if is_causal else "a bool tensor", hint=hint)


def _first_pair(rule: Mask, origin: tuple[int, int], query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Return the batch item, head and positions of the matrix's first pair, int64 ``[1, 1, 1, 1]`` each."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=query.device)
    if isinstance(rule, PositionedMask) and query.numel() and key.numel():
        q, kv = rule.positions(zero, zero, zero)
        return zero, zero, q.clamp_min(0), kv.clamp_min(0)
    return zero, zero, zero + origin[0], zero + origin[1]
