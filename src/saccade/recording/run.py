"""Run: what was kept of one layer, over the calls that belong together."""

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.errors import unsupported
from saccade.matrix import Matrix
from saccade.recording.held import Held
from saccade.recording.joined_answers import joined_answers
from saccade.recording.some_heads import SomeHeads
from saccade.statistics import Fold

__all__ = ["Call", "Run"]


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        shape: (batch, heads, q_len, kv_len) of its matrix.
        first_column: which key of the whole text its first key is; not 0 where a cache has let go of some.
        answers: to the questions that were asked while recording, in their order.
    """

    shape: tuple[int, int, int, int]
    first_column: int
    answers: tuple[Any, ...]


class Run:
    """What was kept of one layer: of one forward pass, or of a prompt and all tokens that were decoded after it.

    Attributes:
        name: of the layer.
        calls: every call, in order.
    """

    def __init__(
        self, name: str, folds: tuple[Fold[Any, Any], ...], held: Held | None, heads: tuple[int, ...] | None = None
    ):
        self.name = name
        self.calls: list[Call] = []
        self._folds, self._held, self._heads = folds, held, heads
        self._like: tuple[object, ...] = ()

    def fits(self, matrix: Matrix) -> bool:
        """Whether the rows of a matrix can stand below those that are here."""
        return _kind(matrix) == self._like

    def take(self, matrix: Matrix, first_column: int) -> None:
        """Take in a call, with all its heads."""
        self._like = _kind(matrix)
        few = self._few(matrix)
        self.calls.append(Call(few.shape, first_column, few.ask(*self._folds)))
        if self._held is not None:
            self._held.add(matrix, first_column)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries of all calls, keys)."""
        batch, heads, _, _ = self.calls[0].shape
        q_len = sum(call.shape[2] for call in self.calls)
        return (batch, heads, q_len, max(call.first_column + call.shape[3] for call in self.calls))

    @property
    def matrix(self) -> Matrix:
        """The matrix, made of the queries and keys that were kept; all calls as one.

        Raises:
            UnsupportedError: they were not kept.
        """
        if self._held is None:
            reason = f"queries and keys of {self.name} were not kept"
            raise unsupported("Run.matrix", "the recording", [reason], hint='record(model, keep="qk")')
        return self._few(self._held.matrix())

    def ask(self, *folds: Fold[Any, Any]) -> tuple[Any, ...]:
        """Answers to questions: those that were asked while recording, or any where queries and keys were kept.

        Args:
            folds: of `saccade.statistics`, or one's own.

        Raises:
            UnsupportedError: a question that was not asked, or whose answers for several calls do not make one.

        Cost: none for what was kept; else see `saccade.Matrix.ask`.
        """
        if self._held is not None and not (len(self.calls) == 1 and all(fold in self._folds for fold in folds)):
            return self.matrix.ask(*folds)
        return tuple(self._answer(fold) for fold in folds)

    def _answer(self, fold: Fold[Any, Any]) -> Any:
        if fold not in self._folds:
            asked = ", ".join(map(str, self._folds)) or "nothing"
            reason = f"{fold} was not asked while recording; {asked} was"
            raise unsupported("Run.ask", "the recording", [reason], hint='name it in keep=, or keep="qk"')
        answers = [call.answers[self._folds.index(fold)] for call in self.calls]
        if len(answers) == 1:
            return answers[0]
        return joined_answers(fold, answers, [call.first_column for call in self.calls])

    def _few(self, matrix: Matrix) -> Matrix:
        return matrix if self._heads is None else SomeHeads(matrix, self._heads)

    def __repr__(self) -> str:
        kept = ["queries and keys"] if self._held is not None else []
        return f"Run({self.name!r}, shape={list(self.shape)}, kept={', '.join([*kept, *map(str, self._folds)])})"


def _kind(matrix: Matrix) -> tuple[object, ...]:
    return (type(matrix), matrix.is_stochastic, matrix.shape[:2], matrix.kv_heads, matrix.dtype, matrix.device)
