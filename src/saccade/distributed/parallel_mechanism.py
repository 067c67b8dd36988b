"""ParallelMechanism: run a mechanism in parallel on many ranks, each of which stores some of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.caches import LayerCache
from saccade.distributed.collectives import Fetch, check_agreement
from saccade.distributed.state_passing import CarriedMatrix
from saccade.engine.positions.positioned_mask import check_domain
from saccade.masks import Mask, as_mask
from saccade.matrix import DerivedMatrix, Matrix
from saccade.mechanisms import RWKV7, S4D, DeltaProduct, Differential, Linear, Mechanism, Performer, Softmax, TopK
from saccade.mechanisms.entry_softmax import EntrySoftmax
from saccade.mechanisms.recurrences.mechanism import Recurrence
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.scorers import DotProducts
from saccade.statistics.row_block import Block
from saccade.support.errors import unsupported, value_error

if TYPE_CHECKING:
    from saccade.distributed.context_parallel import ContextParallel

CALLED_AS = "ContextParallel"  # the name in error messages

_FEATURES = (Linear, Performer)  # with a causal mask, their past is summarized in one memory state
_OF_SEEN_KEYS = (Softmax, TopK, Differential, *_FEATURES)  # their rows depend only on visible keys
_CARRIED = (Recurrence, S4D)  # their past is summarized in one memory state


class ParallelMechanism(Mechanism):
    """A mechanism that runs in parallel on many ranks; each rank computes the rows of its queries.

    Visible keys are fetched from other ranks. Recurrences, and linear attention with a causal mask, instead receive a
    recurrent state from the previous rank. Parameters are those of the mechanism, under the same names, so that a
    checkpoint fits any number of ranks.

    Args:
        mechanism: the mechanism.
        context: the `ContextParallel` of the ranks.

    Raises:
        UnsupportedError: the mechanism needs all keys at once.
    """

    def __init__(self, mechanism: Mechanism, context: ContextParallel):
        super().__init__()
        reasons = _reasons_against(mechanism)
        if reasons:
            hint = "Softmax, TopK of single keys, Differential, Linear, Performer, S4D and recurrences run over ranks"
            raise unsupported(type(mechanism).__name__, reasons, hint=hint)
        self.context = context
        # Share the dictionaries, because the name of a child module would prefix every parameter name.
        self._parameters, self._buffers, self._modules = (
            mechanism._parameters,
            mechanism._buffers,
            mechanism._modules,
        )
        self._non_persistent_buffers_set = mechanism._non_persistent_buffers_set
        self.__dict__["mechanism"] = mechanism

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["mechanism"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        mechanism = self.__dict__.get("mechanism")
        if mechanism is not None and name in mechanism.__dict__ and name != "training":
            setattr(mechanism, name, value)
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.mechanism._load_from_state_dict(*args)

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """Raise an error, because mechanisms that run across ranks process only full sequences."""
        reason = "only whole sequences run over ranks, and a cache adds new rows"
        hint = "sharded_cache(model, cp) decodes over ranks with a model that was not parallelized"
        raise unsupported("a cache", [reason], hint=hint)

    def train(self, mode: bool = True) -> ParallelMechanism:
        """Set the training mode of this module and of the wrapped mechanism."""
        self.mechanism.train(mode)
        super().train(mode)
        return self

    @property
    def treats_heads_alike(self) -> bool:
        return self.mechanism.treats_heads_alike

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return self.mechanism.reasons(mask)

    def with_bias(self, bias: Tensor | Bias) -> Mechanism:
        return ParallelMechanism(self.mechanism.with_bias(bias), self.context)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        **gates: Tensor,
    ) -> Matrix:
        """Return this rank's rows of the attention matrix; gates are ``[batch, heads, rows, ...]`` for these rows."""
        context = self.context
        if query.shape[2] != key.shape[2]:
            reason = f"there are {query.shape[2]} queries and {key.shape[2]} keys: only self-attention runs over ranks"
            raise unsupported("cross-attention", [reason])
        seq_len = context.seq_len(query.shape[2])
        positions = context.positions(seq_len, query.device)
        for name, given in (("q_positions", q_positions), ("kv_positions", kv_positions)):
            _check_positions(name, given, positions, len(query))
        pattern = as_mask(mask, (*query.shape[:2], seq_len, seq_len))
        check_domain(pattern, None, None, seq_len, seq_len)
        if isinstance(self.mechanism, _CARRIED) or (isinstance(self.mechanism, _FEATURES) and pattern.is_causal):
            return self._carried(query, key, pattern, seq_len, gates)
        plan = context._plan(query, key, pattern, seq_len, ["a matrix has this rank's rows of all heads"])
        if context.checks:
            check_agreement(f"{plan.fingerprint} {_describe_shapes(query, key)}", context.group, query.device)
        fetch = context._fetch(plan, query.device)
        positions_of_both = {"q_positions": positions, "kv_positions": fetch.columns}
        matrix = self.mechanism(query, fetch(key), mask=pattern, **positions_of_both, **gates)
        return ParallelMatrix(matrix, fetch, context)

    def _carried(self, query: Tensor, key: Tensor, mask: Mask, seq_len: int, gates: dict[str, Tensor]) -> CarriedMatrix:
        context, layout = self.context, self.context.layout(seq_len)

        def make(rows: slice, positions: Positions) -> Matrix:
            tensors = {name: x[:, :, rows] for name, x in gates.items()}
            positions_of_both = {"q_positions": positions, "kv_positions": positions}
            matrix: Matrix = self.mechanism(
                query[:, :, rows], key[:, :, rows], mask=mask, **positions_of_both, **tensors
            )
            return matrix

        sources = [query, key, *gates.values(), *self.mechanism.parameters()]
        like: Any = make(slice(0, 0), Positions(range(0)))
        if context.checks:
            shapes = _describe_shapes(query, key)
            plan = f"{type(self.mechanism).__name__} {like.source} {mask} {shapes} {layout.fingerprint}"
            check_agreement(plan, context.group, query.device)
        shape = (len(query), like.shape[1], query.shape[2], seq_len)
        return CarriedMatrix(make, layout.runs_of(context.rank), shape, context.channel, like, sources)


class ParallelMatrix(DerivedMatrix):
    """This rank's rows of an attention matrix, with their visible keys as columns.

    Args:
        matrix: the matrix of the local queries and the fetched keys.
        fetch: the collective that fetches values.
        context: the `ContextParallel` of the ranks.
    """

    def __init__(self, matrix: Matrix, fetch: Fetch, context: ContextParallel):
        super().__init__(matrix)
        self._fetch, self._context = fetch, context

    @property
    def columns(self) -> Tensor:
        """Positions of the visible keys on all ranks, int64 ``[kv_len]``."""
        return self._fetch.columns

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        return self.inner.blocks(batch, head, rows)

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """Return the product of this rank's rows with the local values and the values fetched from other ranks.

        If ``seed`` is None, the first rank generates one for all ranks.
        """
        seed = self._context.shared_seed(value.device) if dropout_p and seed is None else seed
        return self.inner.matmul(self._fetch(value), dropout_p=dropout_p, seed=seed)


def _reasons_against(mechanism: Mechanism) -> list[str]:
    """Return the reasons why a mechanism cannot run in parallel across ranks; the list is empty if it can."""
    name = type(mechanism).__name__
    if not isinstance(mechanism, _OF_SEEN_KEYS + _CARRIED):
        return [f"{name} needs all keys at once, which no rank has"]
    if isinstance(mechanism, EntrySoftmax):
        return ["it attends to compressed entries of all earlier blocks, which no rank has"]
    if isinstance(mechanism, DeltaProduct | RWKV7):
        return [f"a token takes several steps in {name}, but ranks pass on states only between tokens of one step"]
    if isinstance(mechanism, TopK) and not (mechanism.block_size == 1 and type(mechanism.scorer) is DotProducts):
        return ["it selects by columns of keys, which differ between ranks; TopK(k), with blocks of one key, does not"]
    if isinstance(mechanism, Performer) and mechanism.redraw is not None:
        return ["it draws new features after a number of calls, but a rank makes more calls than one process"]
    return []


def _describe_shapes(query: Tensor, key: Tensor) -> str:
    """Return the dtype and the shapes of query and key as text, without the lengths, which may differ between ranks."""
    return f"{query.dtype} {[(*x.shape[:2], x.shape[3]) for x in (query, key)]}"


def _check_positions(name: str, given: GivenPositions, expected: Tensor, batch: int) -> None:
    """Raise an error unless the caller passed the positions of this rank's rows, in all batch items."""
    if given is None:
        rule, hint = "be given, for this rank's rows", "positions=cp.positions(seq_len)"
        raise value_error(name, rule, None, hint=hint)
    positions = Positions.of(given, name, length=len(expected), batch=batch)
    if not bool((positions.on(expected.device) == expected).all()):
        rule, hint = "be the positions of this rank's rows, in order", "positions=cp.positions(seq_len)"
        raise value_error(name, rule, "other positions", hint=hint)
