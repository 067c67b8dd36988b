"""Compose the declared rules of a model's layers with the measured reach of modules that mix tokens without attention.

Declared rules describe attention. A convolution, token shift or norm over time has no rule of its own: it may connect
any pair that the model's rules allow as a whole, and the pairs that it is measured to connect are added to the composed
reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.auditing.by_layer import ByLayer
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.reachability import Reach
from saccade.masks import Mask


class Composition:
    """The composition of a model's declared rules with its measured modules.

    Args:
        subject: the model and its input.
        rules: the rule of each layer, first to last.
        ruled: names of the modules to which the rules apply, in execution order.
        by_layer: the measured modules.

    Attributes:
        declared: the composition of the declared rules alone.
        reach: the composition of the declared rules with the measured modules that stay within `declared`.
    """

    def __init__(self, subject: ModelUnderTest, rules: Sequence[Mask], ruled: Sequence[str], by_layer: ByLayer):
        self.subject, self.ruled, self._by_layer = subject, list(ruled), by_layer
        batch, length = subject.shape
        self.declared = Reach(rules, batch=batch, length=length)
        self._whole = dict[int, Tensor]()
        by_layer.measure_rows(self._document_borders(), self.others)
        self._layers = self._layer_indices(len(rules))
        beside: dict[int, list[Tensor]] = {}
        for name in self.others:
            pairs = self._measured_pairs(name)
            if pairs is not None:
                beside.setdefault(self._layers[name], []).append(pairs)
        self._beside = beside
        self.reach = Reach(rules, batch=batch, length=length, beside=beside) if beside else self.declared

    @property
    def others(self) -> list[str]:
        """Names of the modules that mix tokens but have no rule, because they do not compute attention."""
        return [name for name in self._by_layer.mixed if name not in self.ruled]

    def required(self, name: str, position: int) -> Tensor:
        """Return the tokens that a row of a module must see, bool ``[batch, length]``.

        A module without a rule must see a token only if no other row sees it; see `ByLayer`.
        """
        return (
            self.declared.own(self._layers[name])[:, position]
            if name in self.ruled
            else self._allowed_by_model(position)
        )

    def allowed(self, name: str, position: int) -> Tensor:
        """Return the tokens that a row of a module may see, bool ``[batch, length]``.

        A module with a rule may see the tokens that its layer's rule allows in composition with the pairs that the
        measured modules inside it connect.
        """
        own = self.required(name, position)
        if name not in self.ruled:
            return own
        inner = [self._measured_pairs(other) for other in self.others if other.startswith(f"{name}.")]
        for pairs in inner:
            if pairs is not None:
                own = own | _reached(own, pairs)
                near = torch.zeros_like(own)
                near[:, position] = True
                for item, row in enumerate(_reached(near, pairs)):
                    own[item] |= self.declared.own(self._layers[name])[item, row].any(0)
                own = own | _reached(own, pairs)
        return own

    def _allowed_by_model(self, position: int) -> Tensor:
        if position not in self._whole:
            batch = self.subject.shape[0]
            rows = [self.declared.sources(self.declared.one(item, position))[item] for item in range(batch)]
            self._whole[position] = torch.stack(rows)
        return self._whole[position]

    def _measured_pairs(self, name: str) -> Tensor | None:
        """Return the pairs that a module without a rule connects, bool ``[batch, length, length]``; None if it leaks.

        Measured rows are extrapolated to all rows by distance. Pairs across documents are left out, and so are later
        tokens if the whole model is causal.
        """
        for one in self._by_layer.measured_rows(name):
            item, position = one.row
            if bool((one.seen & ~self._allowed_by_model(position)[item]).any()):
                return None
        label, _ = self.declared.components()
        pairs = self._by_layer.distances(name) & (label[:, :, None] == label[:, None])
        is_causal = all(not bool(self.declared.own(layer).triu(1).any()) for layer in range(len(self.declared.rules)))
        return pairs.tril() if is_causal else pairs

    def _document_borders(self) -> set[int]:
        """Return the rows on both sides of each boundary between documents, for at most eight boundaries."""
        label, _ = self.declared.components()
        borders = (label[:, 1:] != label[:, :-1]).any(0).nonzero().flatten().tolist()[:8]
        return {row for border in borders for row in (border, border + 1)}

    def _layer_indices(self, layers: int) -> dict[str, int]:
        """Return the layer index of each module.

        If each layer has exactly one module with a rule, the execution order determines the layers. If not, the names
        of the modules do.
        """
        names = list(self._by_layer.mixed)
        if len(self.ruled) != layers or len(self.subject.parts) > 1:
            return {name: self.subject.layer_of(name, layers) for name in names}
        found, position = dict[str, int](), 0
        for name in names:
            found[name] = min(position, layers - 1)
            position += name in self.ruled
        return found


def _reached(tokens: Tensor, pairs: Tensor) -> Tensor:
    """Return the tokens that ``pairs`` connect to any of the rows ``tokens``, bool ``[batch, length]``."""
    return torch.stack([own[rows].any(0) for own, rows in zip(pairs, tokens, strict=True)])
