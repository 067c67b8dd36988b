"""Second derivatives of attention, in torch operations, for gradient penalties, MAML and Hessians.

Kernels compute only first gradients. Here, autograd differentiates the definition of attention twice, for a few
complete rows at a time, so that no kernel needs formulas for second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine.bias.term import MaskedTerm, Term
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Tensors
from saccade.engine.kernels.reference import weighted
from saccade.engine.kernels.tiled_cost import blocks_of
from saccade.engine.nonfinite import contained
from saccade.engine.tiles.grouped_heads import add_at, at, groups_of, joined, take
from saccade.engine.tiles.tile_scores import allowed, visible_scores
from saccade.plan import Tile

CALLED_AS = "attention"  # in errors


class Backward(NamedTuple):
    """The inputs and results of a product whose first gradients are to be differentiated.

    Attributes:
        inputs, value, dropped: inputs, value and dropout of the product.
        lse: log-sum-exp of the product.
        grad_out, grad_lse: upstream gradients of the output and the lse.
    """

    inputs: AttentionInputs
    value: Tensor
    dropped: Dropped | None
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def derivatives(of: Backward, grads: Tensors, needed: Sequence[bool], *, create_graph: bool = False) -> Tensors:
    """Compute second derivatives with respect to the sources, ``grad_out`` and ``grad_lse``.

    Args:
        of: the inputs and results from which the first gradients were computed.
        grads: upstream gradients of the first gradients, one for each source; None for 0.
        needed: whether to compute the derivative with respect to each of `AttentionInputs.sources`, ``grad_out`` and
            ``grad_lse``.
        create_graph: whether the result can be differentiated again.

    Cost: several times the time of the first gradients. Memory is needed for one block of complete rows or, with
    ``create_graph``, for a dozen tensors with all pairs.
    """
    inputs, value, grad_out, grad_lse = contained(of.inputs, of.value, of.lse, of.grad_out, of.grad_lse)
    of = of._replace(inputs=inputs, value=value, grad_out=grad_out, grad_lse=grad_lse)
    tensors = (*inputs.sources(value), grad_out, grad_lse)
    totals = [
        torch.zeros_like(x, dtype=inputs.compute_dtype) if x is not None and need else None
        for x, need in zip(tensors, needed, strict=True)
    ]
    for tile in [inputs.everything] if create_graph else blocks_of(inputs):
        parts = _of_tile(of, _Slices(inputs, tile), tensors, grads, needed, create_graph)
        _Slices(inputs, tile).add(totals, parts)
    return tuple(
        None if total is None or x is None else total.to(x.dtype) for total, x in zip(totals, tensors, strict=True)
    )


class _Slices:
    """A slicer that cuts tensors to one tile: the sources, and the upstream gradients of the output and the lse.

    Args:
        inputs: the checked inputs.
        tile: complete rows.
    """

    def __init__(self, inputs: AttentionInputs, tile: Tile):
        self.inputs, self.tile, self._spans = inputs, tile, joined(tile.spans)
        self._groups = groups_of(tile.heads, inputs.shape[1], inputs.key.shape[1])

    @property
    def _term(self) -> Term | None:
        bias = self.inputs.bias
        return bias.term if isinstance(bias, MaskedTerm) else bias

    def of(self, tensors: Tensors) -> list[Tensor | None]:
        """Slice tensors to the tile and convert them to the compute dtype. Captured tensors are not sliced."""
        query, key, value, bias, *others, grad_out, grad_lse = tensors
        parameters, captured = others[: len(self.inputs.parameters)], others[len(self.inputs.parameters) :]
        term = None if bias is None or self._term is None else self._term.of(bias).read(self.tile)
        parts = [self._rows(query), self._keys(key), self._keys(value), term, *parameters]
        both = [self._rows(grad_out), self._rows(grad_lse)]
        wide = self.inputs.compute_dtype
        parts, both = ([None if x is None else x.to(wide) for x in part] for part in (parts, both))
        return [*parts, *captured, *both]

    def add(self, totals: list[Tensor | None], parts: Tensors) -> None:
        """Add the gradients of a tile's slices to the gradients of the full tensors in place."""
        names = ["rows", "keys", "keys", "bias", *["whole"] * (len(totals) - 6), "rows", "rows"]
        for kind, total, part in zip(names, totals, parts, strict=True):
            if total is None or part is None:
                continue
            if kind == "rows":
                at(total[self.tile.batch, self.tile.heads], self.tile.rows, 2).add_(part)
            elif kind == "keys":
                add_at(total[self.tile.batch, self._groups], part, self._spans, 2)
            elif kind == "whole":
                total.add_(part)
            elif self._term is not None:
                self._term.accumulate_gradient(total, self.tile, part)

    def _rows(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else at(x[self.tile.batch, self.tile.heads], self.tile.rows, 2)

    def _keys(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else take(x[self.tile.batch, self._groups], self._spans, 2)


def _of_tile(
    of: Backward, slices: _Slices, tensors: Tensors, grads: Tensors, needed: Sequence[bool], create_graph: bool
) -> Tensors:
    """Return the contribution of a tile's rows to the second derivatives."""
    with torch.enable_grad():
        captured = range(4 + len(of.inputs.parameters), len(tensors) - 2)
        leaves = [
            x if x is None or place in captured else _leaf(x, create_graph)
            for place, x in enumerate(slices.of(tensors))
        ]
        *sources, grad_out, grad_lse = leaves
        results = _results(of, slices.tile, sources)
        first = _gradients(results, sources, (grad_out, grad_lse), [grad is not None for grad in grads], True)
        return _gradients(first, leaves, slices.of((*grads, None, None)), needed, create_graph)


def _leaf(x: Tensor, create_graph: bool) -> Tensor:
    """Return ``x`` as a new leaf of the graph or, with ``create_graph``, as a view that is connected to its graph."""
    return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()


def _results(of: Backward, tile: Tile, sources: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Compute the output and the lse of a tile's rows, recorded by autograd for second derivatives."""
    query, key, value = cast("Sequence[Tensor]", sources[:3])
    bias, *parameters = sources[3 : 4 + len(of.inputs.parameters)]
    inputs = of.inputs.replaced(parameters=tuple(parameters))
    scores = visible_scores(inputs, query, key, bias, tile)
    visible = allowed(inputs, tile)
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    if isinstance(inputs.bias, MaskedTerm):
        scores = scores.masked_fill(inputs.bias.hidden(tile), -math.inf)
    return weighted(inputs, tile, scores, value, of.dropped)


def _gradients(
    results: Tensors,
    leaves: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    create_graph: bool,
) -> Tensors:
    """Return the gradients of the results with respect to all needed leaves; None for the other leaves."""
    pairs = [
        (x, grad)
        for x, grad in zip(results, grads, strict=False)
        if x is not None and grad is not None and x.requires_grad
    ]
    requested = [index for index, x in enumerate(leaves) if x is not None and needed[index]]
    if not pairs or not requested:
        return (None,) * len(leaves)
    gradients = torch.autograd.grad(
        [x for x, _ in pairs],
        [cast("Tensor", leaves[index]) for index in requested],
        [grad for _, grad in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    by_index = dict(zip(requested, gradients, strict=True))
    return tuple(by_index.get(index) for index in range(len(leaves)))
