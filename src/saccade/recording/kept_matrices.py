"""KeptMatrices: queries and keys of one layer, kept for later questions in memory that grows with the tokens."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.matrix import AttentionMatrix, Matrix, matrix_from_inputs
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.recording.call_matching import place_of_last
from saccade.recording.derived_matrices import ChosenHeads, JoinedMatrices
from saccade.support.errors import unsupported


class _Part(NamedTuple):
    """The matrix of one call; one that reads the shared keys holds none."""

    matrix: Matrix
    first_column: int
    reads_shared: bool


class KeptMatrices:
    """The matrices of the calls of one run; keys that were there before are kept once.

    Tensors of softmax attention are copied, so that a cache that is written to later changes nothing; masks and biases
    that a model wrote out are kept as they are (copied in inference mode, where torch does not count changes), and so
    are the matrices of other mechanisms; rows of a recurrence become one matrix with those before. A mask or bias that
    has been written into since answers no question any more.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._keys: Tensor | None = None  # shared: [batch, kv_heads, length and room for more, head_dim]
        self._length = 0
        self._tokens = 0  # keys that will not be written to any more; a cache may have room behind them
        self._versions: list[tuple[Tensor, int]] = []  # of what is not copied, and how often it had been changed

    def add(self, matrix: Matrix, first_column: int) -> None:
        """Keep one more call."""
        if isinstance(matrix, ChosenHeads) and isinstance(matrix.inner, AttentionMatrix):
            whole = self._copied(matrix.inner, matrix.inner.inputs.key.detach().clone())
            self._parts.append(_Part(ChosenHeads(whole, matrix.heads), first_column, False))
        elif not isinstance(matrix, AttentionMatrix):
            joined = _below(self._parts[-1], matrix, first_column) if self._parts else []
            self._parts[-1:] = joined or [_Part(matrix, first_column, False)]  # at once: others may read meanwhile
        else:
            key = matrix.inputs.key.detach()
            is_shared = first_column == 0 and self._takes(key)
            if is_shared:
                self._tokens = place_of_last(matrix) + 1
            # What reads the shared keys gets them when it is asked for.
            own = self._copied(matrix, key.new_zeros(()).expand(key.shape) if is_shared else key.clone())
            self._parts.append(_Part(own, first_column, is_shared))

    def matrix(self) -> Matrix:
        """All calls as one matrix.

        Raises:
            UnsupportedError: a mask or bias of the model has been written into since.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            reason = "a mask or bias that the model wrote out has been changed in place since the call"
            hint = "name the questions in keep=, which are asked during the call; or hand the model mask.clone()"
            raise unsupported("the recording", [reason], hint=hint)
        matrices = [self._with_keys(part) for part in self._parts]
        if len(matrices) == 1:
            return matrices[0]
        return JoinedMatrices(matrices, [part.first_column for part in self._parts])

    def _takes(self, key: Tensor) -> bool:
        """Take in keys that go on where the kept ones end; False if they do not."""
        kept, length, tokens = self._keys, self._length, self._tokens
        if kept is None:
            self._keys, self._length = key.clone(), key.shape[2]
            return True
        if key.shape[2] < length or not torch.equal(kept[:, :, :tokens], key[:, :, :tokens]):
            return False
        if key.shape[2] > kept.shape[2]:
            room = max(2 * kept.shape[2], key.shape[2])
            wider = key.new_empty(*key.shape[:2], room, key.shape[3])
            wider[:, :, :length] = kept[:, :, :length]
            self._keys = kept = wider
        # What was room before is new keys now, which no earlier query may attend to.
        kept[:, :, tokens : key.shape[2]] = key[:, :, tokens:]
        self._length = key.shape[2]
        return True

    def _copied(self, matrix: AttentionMatrix, key: Tensor) -> AttentionMatrix:
        """A matrix of tensors of its own and this key; what is not copied is watched."""
        given = matrix.inputs
        sink, bias, rule = given.sink_logit, given.bias, given.rule
        if bias is not None:
            source = bias.source.detach()
            bias = bias.of(source.clone() if source.is_inference() else source)
        changes = {"rule": copy.deepcopy(rule)} if any(x.is_inference() for x in rule.tensors()) else {}
        own = given.replaced(
            query=given.query.detach().clone(),
            key=key,
            parameters=tuple(x.detach().clone() for x in given.parameters),
            sink_logit=None if sink is None else sink.detach().clone(),
            bias=bias,
            **changes,
        )
        held = [*own.rule.tensors(), *([] if bias is None else [bias.source])]
        self._versions += [(tensor, tensor._version) for tensor in held if not tensor.is_inference()]
        return matrix_from_inputs(own, matrix.impl)

    def _with_keys(self, part: _Part) -> Matrix:
        matrix = part.matrix
        if not (part.reads_shared and self._keys is not None and isinstance(matrix, AttentionMatrix)):
            return matrix
        own = matrix.inputs.replaced(key=self._keys[:, :, : matrix.shape[3]])
        return matrix_from_inputs(own, matrix.impl)


def _below(last: _Part, matrix: Matrix, first_column: int) -> list[_Part]:
    """A call and the one before; as one where they are rows of one recurrence."""
    whole = None
    if isinstance(matrix, RecurrenceMatrix) and isinstance(last.matrix, RecurrenceMatrix) and not first_column:
        whole = matrix.below(last.matrix)
    return [last, _Part(matrix, first_column, False)] if whole is None else [_Part(whole, 0, False)]
