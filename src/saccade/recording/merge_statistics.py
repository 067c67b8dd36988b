"""Merge the statistics of several recorded calls into statistics of all their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from saccade.statistics import MatrixInfo, Received, Statistic, Summary, TopK, Uniform
from saccade.statistics.summary import summary_of_results
from saccade.support.errors import unsupported
from saccade.support.numerics import widest_dtype

CALLED_AS = "record"  # in errors

_PROBE = (2, 3, 5, 7)  # distinct sizes, which identify the axes of a result


def joined_results(statistic: Statistic[Any, Any], answers: Sequence[Any], first_columns: Sequence[int]) -> Any:
    """Merge the results of a statistic for several calls into one.

    Args:
        statistic: the statistic.
        answers: the results for the calls, in order.
        first_columns: index of the first key of each call among the keys of all calls.

    Raises:
        UnsupportedError: the results are neither one value per row nor a known sum over rows.
    """
    if isinstance(statistic, Received):
        return joined_sums(answers, first_columns)
    if isinstance(statistic, TopK):
        moved = [
            answer._replace(indices=torch.where(answer.indices < 0, -1, answer.indices + first))
            for first, answer in zip(first_columns, answers, strict=True)
        ]
        return _stacked(moved, [2, 2])
    axes = _row_axes(statistic)
    if any(axis is None for axis in axes) or any(first_columns):
        reason = f"the results of {statistic} for {len(answers)} calls cannot be combined into one for all rows"
        hint = 'keep="qk" joins the matrices instead; Run.calls has the result of each call'
        raise unsupported("the recording", [reason], hint=hint)
    return _stacked(answers, [axis for axis in axes if axis is not None])


def joined_sums(sums: Sequence[Tensor], first_columns: Sequence[int]) -> Tensor:
    """Add the column sums of several calls, each ``[batch, heads, kv_len]``, at each call's first column."""
    placed = list(zip(first_columns, sums, strict=True))
    total = sums[0].new_zeros(*sums[0].shape[:2], max(first + part.shape[2] for first, part in placed))
    for first, part in placed:
        total[:, :, first : first + part.shape[2]] += part
    return total


def joined_summary(summaries: Sequence[Summary], first_columns: Sequence[int], rows: dict[str, Tensor]) -> Summary:
    """Merge the summaries of several calls into one, as if their rows formed a single matrix.

    Args:
        summaries: the summaries of the calls, in order.
        first_columns: index of the first key of each call among the keys of all calls.
        rows: the merged statistics of queries and keys by name; see `Run.statistics`.
    """
    answers = {name: values for name, values in rows.items() if name != "effective_tokens"}
    if "entropy" in rows:
        count = (rows["largest_weight"] > 0).sum(-1).clamp_min(1)
        received, entropy = (rows[name].to(widest_dtype(count.device)) for name in ("received", "entropy"))
        mean = torch.special.entr(received / count[..., None]).sum(-1)
        information = (mean - entropy.sum(-1) / count).clamp_min(0.0)
        answers["position_information"] = information.to(rows["entropy"].dtype)
    return summary_of_results(answers, _joined_uniform([summary.uniform for summary in summaries], first_columns))


def _joined_uniform(parts: Sequence[Uniform], first_columns: Sequence[int]) -> Uniform:
    """Merge the uniform baselines of several calls; some may have separate values for batch items and heads."""
    size = [max(part.visible.shape[axis] for part in parts) for axis in range(2)]

    def together(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.expand(*size, -1) for x in tensors], 2)

    return Uniform(
        together([part.visible for part in parts]),
        joined_sums([part.received.expand(*size, -1) for part in parts], first_columns),
        together([part.distance for part in parts]),
        {name: together([part.near[name] for part in parts]) for name in parts[0].near},
    )


def _stacked(answers: Sequence[Any], axes: Sequence[int]) -> Any:
    leaves = [tree_flatten(answer)[0] for answer in answers]
    joined = [torch.cat(parts, axis) for parts, axis in zip(zip(*leaves, strict=True), axes, strict=True)]
    return tree_unflatten(joined, tree_flatten(answers[0])[1])


def _row_axes(statistic: Statistic[Any, Any]) -> list[int | None]:
    """Return the row axis of each tensor in a statistic's result; None if rows cannot be concatenated.

    To identify the axes, compute the empty result for a matrix whose four sizes are distinct.
    """
    info = MatrixInfo(_PROBE, torch.float32, torch.device("cpu"))
    row_axes: list[int | None] = []
    for leaf in tree_flatten(statistic.finish(statistic.start(info)))[0]:
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
        candidates = [axis for axis, size in enumerate(shape) if size == _PROBE[2]]
        row_axes.append(candidates[0] if len(candidates) == 1 and _PROBE[3] not in shape else None)
    return row_axes
