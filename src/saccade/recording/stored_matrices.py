"""StoredMatrices: a layer's queries and keys, stored for later statistics; memory grows with the length."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.matrix import AttentionMatrix, Matrix, matrix_from_inputs
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.recording.call_matching import index_of_last_key
from saccade.recording.derived_matrices import DerivedFromCall, JoinedMatrices
from saccade.support.errors import unsupported


class _Part(NamedTuple):
    """The stored matrix of one call."""

    matrix: Matrix
    first_column: int


class StoredMatrices:
    """The stored matrices of a run's calls; keys that several calls share are stored once.

    Queries and keys of softmax attention are copied, so that later writes to a cache have no effect. The model's mask
    and bias tensors are not copied (except in inference mode, where torch does not count writes), so reading the matrix
    raises an error if they were modified after the call. Matrices of other mechanisms are not copied either. Rows of a
    recurrence are merged with those of the previous call.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._keys: Tensor | None = None  # shared: [batch, kv_heads, length plus free slots, head_dim]
        self._length = 0
        self._tokens = 0  # number of valid keys; free slots of a cache may follow them
        self._sharing: dict[int, AttentionMatrix] = {}  # by id: stored matrices that read the shared keys
        self._versions: list[tuple[Tensor, int]] = []  # tensors that are not copied, with their version counters

    def add(self, matrix: Matrix, first_column: int) -> None:
        """Store the matrix of another call."""
        stored = self._stored(matrix, first_column)
        joined = _merged_with_last(self._parts[-1], stored, first_column) if self._parts else []
        self._parts[-1:] = joined or [*self._parts[-1:], _Part(stored, first_column)]  # in one step, for other threads

    def matrix(self) -> Matrix:
        """Return the stored matrices of all calls, joined into one.

        Raises:
            UnsupportedError: a mask or bias of the model was modified after the call.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            reason = "a mask or bias tensor of the model was changed in place after the call"
            hint = "list statistics in keep=, to compute them during the call; or pass mask.clone() to the model"
            raise unsupported("the recording", [reason], hint=hint)
        matrices = [self._with_keys(part.matrix) for part in self._parts]
        if len(matrices) == 1:
            return matrices[0]
        return JoinedMatrices(matrices, [part.first_column for part in self._parts])

    def _share_keys(self, key: Tensor) -> bool:
        """Append the new keys of a call to the shared keys if it begins with them; return whether it does."""
        shared, length, tokens = self._keys, self._length, self._tokens
        if shared is None:
            self._keys, self._length = key.clone(), key.shape[2]
            return True
        if key.shape[2] < length or not torch.equal(shared[:, :, :tokens], key[:, :, :tokens]):
            return False
        if key.shape[2] > shared.shape[2]:
            room = max(2 * shared.shape[2], key.shape[2])
            wider = key.new_empty(*key.shape[:2], room, key.shape[3])
            wider[:, :, :length] = shared[:, :, :length]
            self._keys = shared = wider
        # Slots that were free now contain new keys, which no earlier query may attend to.
        shared[:, :, tokens : key.shape[2]] = key[:, :, tokens:]
        self._length = key.shape[2]
        return True

    def _copied(self, matrix: AttentionMatrix, key: Tensor) -> AttentionMatrix:
        """Copy a matrix for storage, with the given keys; record the versions of tensors that are not copied."""
        inputs = matrix.inputs
        sink, bias, rule = inputs.sink_logit, inputs.bias, inputs.rule
        if bias is not None:
            source = bias.source.detach()
            bias = bias.of(source.clone() if source.is_inference() else source)
        changes = {"rule": copy.deepcopy(rule)} if any(x.is_inference() for x in rule.tensors()) else {}
        copied = inputs.replaced(
            query=inputs.query.detach().clone(),
            key=key,
            parameters=tuple(x.detach().clone() for x in inputs.parameters),
            sink_logit=None if sink is None else sink.detach().clone(),
            bias=bias,
            **changes,
        )
        referenced = [*copied.rule.tensors(), *([] if bias is None else [bias.source])]
        self._versions += [(tensor, tensor._version) for tensor in referenced if not tensor.is_inference()]
        return matrix_from_inputs(copied, matrix.impl)

    def _stored(self, matrix: Matrix, first_column: int) -> Matrix:
        """Return the copy of a matrix to store, which reads the shared keys if possible; see the class docstring."""
        if isinstance(matrix, DerivedFromCall):
            return matrix.over(lambda inner: self._stored(inner, first_column))
        if not isinstance(matrix, AttentionMatrix):
            return matrix
        key = matrix.inputs.key.detach()
        if first_column or not self._share_keys(key):
            return self._copied(matrix, key.clone())
        self._tokens = index_of_last_key(matrix) + 1
        copied = self._copied(matrix, key.new_zeros(()).expand(key.shape))
        self._sharing[id(copied)] = copied
        return copied

    def _with_keys(self, matrix: Matrix) -> Matrix:
        """Insert the shared keys into a stored matrix that reads them; return any other matrix unchanged."""
        if isinstance(matrix, DerivedFromCall):
            return matrix.over(self._with_keys)
        if self._keys is None or not isinstance(matrix, AttentionMatrix) or id(matrix) not in self._sharing:
            return matrix
        return matrix_from_inputs(matrix.inputs.replaced(key=self._keys[:, :, : matrix.shape[3]]), matrix.impl)


def _merged_with_last(last: _Part, matrix: Matrix, first_column: int) -> list[_Part]:
    """Merge a new matrix with the previous part, and return the result in a list; [] if they are not one recurrence."""
    whole = None
    if isinstance(matrix, RecurrenceMatrix) and isinstance(last.matrix, RecurrenceMatrix) and not first_column:
        whole = matrix.below(last.matrix)
    return [] if whole is None else [_Part(whole, 0)]
