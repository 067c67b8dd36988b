"""Statistics of attention rows and columns, computed by the compiled kernel in one pass over the matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.bias.term import MaskedTerm
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.kernels.native import Native, is_on, read_dtype
from saccade.engine.kernels.native_arguments import Call, chunks_of
from saccade.engine.nonfinite import is_clean
from saccade.support.torch_modes import is_plain

NUMBERS = ("largest_logit", "largest_weight", "held", "entropy", "squares", "variance", "distance")
"""Names of the statistics of each row, in the same order as in native/src/arguments.h."""
_FAR = 1 << 30


class Band(NamedTuple):
    """Keys whose weights the compiled kernel sums for each row: ``first <= key < stop``.

    If ``follows`` is set, ``first`` and ``stop`` are relative to the query's index.
    """

    follows: bool
    first: int
    stop: int


class SweepResults(NamedTuple):
    """Results of one pass of the compiled kernel over the matrix: row statistics and column sums.

    Attributes:
        rows: float32 ``[len(NUMBERS) + bands, batch, heads, q_len]``: the statistics of each row in the order of
            `NUMBERS`, then its sums over the bands.
        received: column sums, float64 ``[batch, heads, kv_len]``.
    """

    rows: Tensor
    received: Tensor


def can_sweep(inputs: AttentionInputs, impl: str | Kernel) -> bool:
    """Return whether the compiled kernel is permitted by ``impl`` and can compute statistics of these inputs."""
    is_named = impl == "native" or isinstance(impl, Native)
    if not is_named and not (impl == "auto" and is_on()):
        return False
    if (
        not (is_plain(inputs.query) and is_plain(inputs.key))
        or 0 in inputs.shape
        or isinstance(inputs.bias, MaskedTerm | DecayTerm)
    ):
        return False
    request = Request(impl="native")
    return not Native().verdict(inputs, request).cannot and is_clean(inputs, inputs.query, inputs.key)


def sweep_statistics(inputs: AttentionInputs, bands: list[Band], ahead: int) -> SweepResults:
    """Compute statistics of all attention rows and columns in one pass of the compiled kernel over the matrix.

    Args:
        inputs: inputs that `can_sweep` accepts.
        bands: ranges of keys whose weights are summed for each row.
        ahead: position of query i minus position of key i, which determines the distances.

    Cost: at most the time of one product with the same pairs. Memory is needed for the scores of `ROWS` rows per
    thread, and O(kv_len) for each part of the column sums. The parts are added in the same order on any number of
    threads.
    """
    call = Call.of(inputs, inputs.key[:0], None, read_dtype(inputs.query.dtype))  # no values are read
    edges = [[band.follows, *(min(max(edge, -_FAR), _FAR) for edge in band[1:])] for band in bands]
    sinks = None if inputs.sink_logit is None else inputs.sink_logit.float().contiguous()
    ranges = torch.tensor(edges, dtype=torch.int32, device="cpu").reshape(-1, 3)
    rows, received = torch.ops.saccade_cpu.look(*call.of_scores, sinks, ranges, ahead, chunks_of(inputs))
    return SweepResults(rows, received.sum(0))
