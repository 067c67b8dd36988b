"""Held: queries and keys of one layer, kept for later questions in memory that grows with the tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix, from_ingredients
from saccade.errors import unsupported
from saccade.matrix import Matrix
from saccade.recording.continuation import place_of_last
from saccade.recording.joined_rows import JoinedRows
from saccade.recording.some_heads import SomeHeads

__all__ = ["Held"]


class Held:
    """The matrices of the calls of one run; keys that were there before are kept once.

    Tensors of softmax attention are copied, so that a cache that is written to later changes nothing; masks and biases
    that a model wrote out are held as they are (copied in inference mode, where torch does not count changes), and so
    are the matrices of other mechanisms. A mask or bias that has been written into since answers no question any more.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Matrix, int, bool]] = []  # with its first column, and whether it reads the shared keys
        self._keys: Tensor | None = None  # shared: [batch, kv_heads, length and room for more, head_dim]
        self._length = 0
        self._tokens = 0  # keys that will not be written to any more; a cache may have room behind them
        self._versions: list[tuple[Tensor, int]] = []  # of what is not copied, and how often it had been changed

    def add(self, matrix: Matrix, first_column: int) -> None:
        """Keep one more call."""
        if not isinstance(matrix, AttentionMatrix):
            copied = _copied_heads(matrix)
            self._parts.append((copied, first_column, False))
            if isinstance(copied, SomeHeads) and isinstance(copied.whole, AttentionMatrix):
                self._watch(copied.whole)
            return
        key = matrix.ingredients.key.detach()
        if not self._parts:
            self._keys, self._length = key.clone(), key.shape[2]
            is_shared = True
        else:
            is_shared = first_column == 0 and self._takes(key)
        if is_shared:
            self._tokens = place_of_last(matrix) + 1
        # What reads the shared keys gets them when it is asked for.
        own = _copied(matrix, key[:, :, :0] if is_shared else key.clone())
        self._parts.append((own, first_column, is_shared))
        self._watch(own)

    def matrix(self) -> Matrix:
        """All calls as one matrix.

        Raises:
            UnsupportedError: a mask or bias of the model has been written into since.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            reason = "a mask or bias that the model wrote out has been changed in place since the call"
            hint = "name the questions in keep=, which are asked during the call; or hand the model mask.clone()"
            raise unsupported("Run.matrix", "the recording", [reason], hint=hint)
        matrices = [self._with_keys(matrix) if is_shared else matrix for matrix, _, is_shared in self._parts]
        return matrices[0] if len(matrices) == 1 else JoinedRows(matrices, [first for _, first, _ in self._parts])

    def _watch(self, matrix: AttentionMatrix) -> None:
        bias = matrix.ingredients.bias
        held = [*matrix.ingredients.rule.tensors(), *([] if bias is None else [bias.source])]
        self._versions += [(tensor, tensor._version) for tensor in held if not tensor.is_inference()]

    def _takes(self, key: Tensor) -> bool:
        """Take in keys that go on where those that are held end; False if they do not."""
        held, length, tokens = self._keys, self._length, self._tokens
        if held is None or key.shape[2] < length or not torch.equal(held[:, :, :tokens], key[:, :, :tokens]):
            return False
        if key.shape[2] > held.shape[2]:
            room = max(2 * held.shape[2], key.shape[2])
            wider = key.new_empty(*key.shape[:2], room, key.shape[3])
            wider[:, :, :length] = held[:, :, :length]
            self._keys = held = wider
        # What was room before is new keys now, which no earlier query may attend to.
        held[:, :, tokens : key.shape[2]] = key[:, :, tokens:]
        self._length = key.shape[2]
        return True

    def _with_keys(self, matrix: Matrix) -> AttentionMatrix:
        assert isinstance(matrix, AttentionMatrix)
        assert self._keys is not None
        own = matrix.ingredients.replaced(key=self._keys[:, :, : matrix.shape[3]])
        return from_ingredients(own, matrix.impl)


def _copied_heads(matrix: Matrix) -> Matrix:
    if not (isinstance(matrix, SomeHeads) and isinstance(matrix.whole, AttentionMatrix)):
        return matrix
    return SomeHeads(_copied(matrix.whole, matrix.whole.ingredients.key.detach().clone()), matrix.heads)


def _copied(matrix: AttentionMatrix, key: Tensor) -> AttentionMatrix:
    given = matrix.ingredients
    sink, bias, rule = given.sink_logit, given.bias, given.rule
    if bias is not None:
        source = bias.source.detach()
        bias = bias.of(source.clone() if source.is_inference() else source)
    changes: dict[str, Any] = {}
    if any(tensor.is_inference() for tensor in rule.tensors()):
        changes["rule"] = copy.deepcopy(rule)
    own = given.replaced(
        query=given.query.detach().clone(),
        key=key,
        parameters=tuple(x.detach().clone() for x in given.parameters),
        sink_logit=None if sink is None else sink.detach().clone(),
        bias=bias,
        **changes,
    )
    return from_ingredients(own, matrix.impl)
