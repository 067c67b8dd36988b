"""RelationTable: a bias with a trainable scalar for each relation between two tokens, such as a path length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.positions.token_positions import can_be_read
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import describe, type_error, value_error
from saccade.support.validation import ShapeSpec, check_int

_RELATIONS = ShapeSpec("relations [batch, q_len, kv_len]")


class RelationTable(ArgumentHints, nn.Module):
    r"""A bias with a trainable scalar for each head and relation, such as a chemical bond or a path length in a graph.

    .. math:: b_{hij} = w_{r_{ij},\, h}

    Relations cannot be computed from positions, so they are passed with each batch. Unlike a `Bias`, the module is
    called with these relations, and returns a tensor to pass as ``bias=``. The results of several tables can be added.
    All scalars start at 0.

    Args:
        num_heads: number of query heads.
        num_relations: number of relations, which are numbered from 0.

    Attributes:
        weight: ``[num_relations, num_heads]``, laid out like Graphormer's ``spatial_pos_encoder``.

    Raises:
        ValueError: a size is not an int of at least 1, or a relation is not in the table. Relations are checked only on
            the CPU, where reading them is cheap.
        TypeError: the relations are neither int64 nor int32.

    Cost: ``num_relations * num_heads`` parameters; the bias of a call is as large as the attention matrix. If
    that is too large, pass ``score=lambda score, b, h, q, kv: score + weight[relations[b, q, kv], h]`` instead, which
    is evaluated tile by tile.

    Example:
        >>> bonds = RelationTable(2, num_relations=3)
        >>> _ = bonds.weight.data.copy_(torch.tensor([[0.0, 0.0], [1.0, -1.0], [2.0, -2.0]]))
        >>> bonds(torch.tensor([[[0, 1], [2, -1]]])).tolist()
        [[[[0.0, 1.0], [2.0, 0.0]], [[0.0, -1.0], [-2.0, 0.0]]]]

    Reference: Ying et al. 2021, "Do transformers really perform bad for graph representation?", arXiv:2106.05234,
    section 3.1.2.
    """

    def __init__(self, num_heads: int, num_relations: int):
        super().__init__()
        self.num_heads = check_int("num_heads", num_heads)
        self.num_relations = check_int("num_relations", num_relations)
        self.weight = nn.Parameter(torch.zeros(num_relations, num_heads))

    def reset_parameters(self) -> None:
        """Set the bias of all relations to 0, so that attention starts as if there were no bias."""
        nn.init.zeros_(self.weight)

    def forward(self, relations: Tensor) -> Tensor:
        """Return the bias tensor for the relations of a batch.

        Args:
            relations: int64 or int32 ``[batch, q_len, kv_len]``; -1 means no relation and adds 0.

        Returns:
            ``[batch, num_heads, q_len, kv_len]``.
        """
        _RELATIONS.check(relations)
        if relations.dtype not in (torch.int64, torch.int32):
            raise type_error("relations", "be int64 or int32", str(relations.dtype).removeprefix("torch."))
        if can_be_read(relations) and not -1 <= int(relations.min()) <= int(relations.max()) < self.num_relations:
            rule, facts = f"be from -1 to {self.num_relations - 1}", [describe("relations", relations)]
            raise value_error("relations", rule, "other numbers", facts=facts)
        # Store the result head by head, as matrix products read it. Index -1 selects the padded 0, not a parameter.
        return nn.functional.pad(self.weight.T, (0, 1))[:, relations].transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, num_relations={self.num_relations}"
