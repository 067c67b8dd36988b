"""Distances between the nodes of a graph: lengths of the shortest paths."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import type_error
from saccade.support.validation import ShapeSpec, check_int

_EDGES = ShapeSpec("edges [batch, n, n]")


@argument_hints()
def path_lengths(edges: Tensor, reach: int) -> Tensor:
    """Return the length of the shortest path between any two nodes of a graph, up to a maximum.

    Args:
        edges: bool ``[batch, n, n]``, True where an edge leads from node i to node j.
        reach: maximum length of a path, at least 1.

    Returns:
        int64 ``[batch, n, n]``: the number of edges on the path; 0 from a node to itself, and ``reach + 1`` if no path
        has at most ``reach`` edges. To use these values as relations, create a `RelationTable` with ``reach + 2``
        relations.

    Raises:
        TypeError, ValueError: ``edges`` has the wrong shape or dtype, or ``reach`` is below 1.

    Cost: O(batch * reach * n ** 3) time, in matrix products; O(batch * n ** 2) memory.

    Example:
        >>> edges = torch.zeros(1, 4, 4, dtype=torch.bool)
        >>> for i, j in ((0, 1), (1, 2)):
        ...     edges[:, i, j] = edges[:, j, i] = True
        >>> path_lengths(edges, reach=3)[0].tolist()
        [[0, 1, 2, 4], [1, 0, 1, 4], [2, 1, 0, 4], [4, 4, 4, 0]]
    """
    n = _EDGES.check(edges)["n"]
    if edges.dtype != torch.bool:
        raise type_error("edges", "be a bool tensor", str(edges.dtype).removeprefix("torch."))
    check_int("reach", reach)
    reached = torch.eye(n, dtype=torch.bool, device=edges.device).expand_as(edges)
    lengths = torch.where(reached, 0, reach + 1)
    for length in range(1, min(reach, n - 1) + 1):
        now = (reached.float() @ edges.float() > 0) | reached
        lengths = torch.where(now & ~reached, length, lengths)
        reached = now
    return lengths
