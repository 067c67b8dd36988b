"""Find the texts in a collator's batch, and check the batch's mask, positions and labels against the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.auditing.finding import ClaimResult, CounterExample, Kind
from saccade.support.errors import kind, type_error, value_error
from saccade.support.language import Message
from saccade.tasks import IGNORED

_BOUNDARY_ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seqlens", "document_ids")


class TextLocation(NamedTuple):
    """The location of a text in a batch: its row, and the range of its tokens."""

    item: int
    tokens: slice


class SetupBatch:
    """A batch that a collator built, and the location of each text in the batch.

    Args:
        batch: the collator's result: a mapping with ``input_ids`` ``[batch, length]``, or the ids alone.
        texts: token ids of the texts, in the order in which the collator received them.

    Attributes:
        locations: the location of each text; None for a text that does not occur unchanged in the batch.
        documents: the index of each token's text, int ``[batch, length]``; -1 at padding.
    """

    def __init__(self, batch: object, texts: Sequence[Tensor]):
        self.inputs: dict[str, Any] = {"input_ids": batch} if isinstance(batch, Tensor) else _mapping(batch)
        ids = self.inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise value_error("collator", "return input_ids [batch, length]", sorted(self.inputs))
        self.ids, self.texts = ids, texts
        self.documents = torch.full(ids.shape, -1, dtype=torch.long)
        self.locations: list[TextLocation | None] = []
        for number, text in enumerate(texts):
            location = self._find(text)
            self.locations.append(location)
            if location is not None:
                self.documents[location.item, location.tokens] = number
        if not any(self.locations):
            hint = "texts= takes the mappings with input_ids that the collator receives"
            raise value_error(
                "collator", "keep at least one text unchanged", f"none of {len(texts)} texts in the batch", hint=hint
            )

    def _find(self, text: Tensor) -> TextLocation | None:
        for item, row in enumerate(self.ids.cpu()):
            for start in range(len(row) - len(text) + 1):
                part = slice(start, start + len(text))
                if torch.equal(row[part], text) and bool((self.documents[item, part] == -1).all()):
                    return TextLocation(item, part)
        return None

    @property
    def lengths(self) -> list[list[int]]:
        """Lengths of the texts and runs of padding in each row, in order."""
        return [torch.unique_consecutive(own, return_counts=True)[1].tolist() for own in self.documents]

    @property
    def is_packed(self) -> bool:
        """Whether any row contains several texts."""
        return any(len(own[own >= 0].unique()) > 1 for own in self.documents)

    def claims(self) -> Iterator[ClaimResult]:
        """Check the collator's batch: its texts, mask, positions and labels."""
        yield self._whole_texts()
        yield self._mask()
        yield self._positions()
        yield self._labels()

    def _whole_texts(self) -> ClaimResult:
        missing = [number for number, location in enumerate(self.locations) if location is None]
        if not missing:
            return ClaimResult("collator: texts", "held")
        words = "text {number} of {count} is not in the batch unchanged: it was cut, changed or left out"
        why = Message(words, number=missing[0], count=len(self.texts))
        return ClaimResult("collator: texts", "broken", why=why)

    def _mask(self) -> ClaimResult:
        name, mask, real = "collator: attention_mask", self.inputs.get("attention_mask"), self.documents >= 0
        if isinstance(mask, Tensor) and mask.dim() != 2:
            return ClaimResult(name, "not answered", why=_shape_of("attention_mask", mask))
        if mask is None:
            return self._broken(name, ~real, "leak", "padding is not marked") if not bool(real.all()) else _held(name)
        seen = mask.bool().cpu()
        wrong = self._broken(name, seen & ~real, "leak", "padding is marked as tokens")
        return (
            self._broken(name, real & ~seen, "blind", "tokens are marked as padding")
            if wrong.verdict == "held"
            else wrong
        )

    def _positions(self) -> ClaimResult:
        name, position_ids = "collator: positions", self.inputs.get("position_ids")
        if position_ids is None:
            is_marked = any(one in self.inputs for one in _BOUNDARY_ARGUMENTS)
            mask = self.inputs.get("attention_mask")
            if self.is_packed and not is_marked and not (isinstance(mask, Tensor) and mask.dim() > 2):
                starts = torch.zeros_like(self.documents, dtype=torch.bool)
                starts[:, 1:] = (self.documents[:, 1:] != self.documents[:, :-1]) & (self.documents[:, 1:] >= 0)
                return self._broken(name, starts, "leak", "no argument marks where the texts of a packed row begin")
            return ClaimResult(name, "not answered", why="the collator returns none")
        if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
            return ClaimResult(name, "not answered", why="position_ids are not [batch, length]")
        first = next(location for location in self.locations if location is not None)
        first_position = int(position_ids[first.item, first.tokens.start])
        wrong = torch.zeros_like(self.documents, dtype=torch.bool)
        for location in filter(None, self.locations):
            own = position_ids[location.item, location.tokens].cpu()
            wrong[location.item, location.tokens] = own != torch.arange(first_position, first_position + len(own))
        return self._broken(
            name, wrong, "leak", Message("positions of a text do not count from {first}", first=first_position)
        )

    def _labels(self) -> ClaimResult:
        name, labels = "collator: labels", self.inputs.get("labels")
        if not isinstance(labels, Tensor):
            return ClaimResult(name, "not answered", why="the collator returns none")
        if labels.shape != self.ids.shape:
            return ClaimResult(name, "not answered", why=_shape_of("labels", labels))
        labels, ids, real = labels.cpu(), self.ids.cpu(), self.documents >= 0
        starts = torch.zeros_like(real)  # the first token of a row is never predicted
        starts[:, 1:] = (self.documents[:, 1:] != self.documents[:, :-1]) & real[:, 1:] & real[:, :-1]
        learned = labels != IGNORED
        learned[:, 0] = False
        cases = {
            "padding has labels": (learned & ~real, "leak"),
            "the first token of a text is a label of the text before it": (learned & starts, "leak"),
            "labels differ from the token ids": (learned & real & (labels != ids), "blind"),
        }
        for why, (wrong, fault) in cases.items():
            if bool(wrong.any()):
                return self._broken(name, wrong, fault, why)  # type: ignore[arg-type]  # a kind
        return _held(name)

    def _broken(self, name: str, wrong: Tensor, fault: Kind, why: str) -> ClaimResult:
        """Return a broken claim for the first position where ``wrong`` is True, or a held claim if there is none."""
        if not bool(wrong.any()):
            return _held(name)
        item, position = wrong.nonzero()[0].tolist()
        nouns = ("output", "the label of token" if name.endswith("labels") else "token")
        row = (item, max(position - 1, 0)) if name.endswith("labels") else (item, position)
        found = CounterExample(fault, row, (item, position), float(wrong.float().mean()), "", "collator", 0, nouns)
        return ClaimResult(name, "broken", found.size, 0.0, found, why)


def _held(name: str) -> ClaimResult:
    return ClaimResult(name, "held")


def _mapping(batch: object) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise type_error("collator", "return a mapping of the model's arguments, or token ids", kind(batch))
    return dict(batch)


def ids_of(texts: Sequence[Any]) -> list[Tensor]:
    """Return the token ids of texts, which may be mappings with ``input_ids``, lists of ids, or tensors ``[length]``.

    Raises:
        TypeError: there are no texts, or a text is empty or not a list of token ids.
    """
    found = [
        torch.as_tensor(text["input_ids"] if isinstance(text, Mapping) else text) if not isinstance(text, str) else None
        for text in texts
    ]
    wrong = [one for one in found if one is None or one.dim() != 1 or one.is_floating_point() or not len(one)]
    if wrong or not found:
        hint = "tokenize the texts first: texts=[dict(input_ids=tokenizer(text).input_ids) for text in texts]"
        raise type_error(
            "texts",
            "be token ids, as mappings with input_ids or as lists",
            kind(texts[0]) if len(texts) else "none",
            hint=hint,
        )
    return [one for one in found if one is not None]


Collator = Callable[[list[Any]], Any]
"""A function that turns a list of texts into the batch that a model trains on."""


def _shape_of(name: str, tensor: Tensor) -> Message:
    return Message("the shape of {name} is {shape}", name=name, shape=list(tensor.shape))
