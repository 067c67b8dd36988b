"""Run saccade's own models in every supported way (padded, packed, cached), to compare the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.auditing.runner import Beside, Runner, Side, Unanswered
from saccade.caches import padded_positions
from saccade.masks import Documents, Padding
from saccade.masks.convert.patterns import window_size
from saccade.models import Decoder, Encoder


class SaccadeRunner(Runner):
    """A runner for a `saccade.models.Decoder` or `Encoder`, with mask, positions and cache if the model takes them."""

    model: Decoder | Encoder

    @property
    def window(self) -> int | None:
        return window_size(self.model.config.causal_mask) if isinstance(self.model, Decoder) else None

    @property
    def vocab_size(self) -> int | None:
        return self.model.config.vocab_size

    def shifted(self, ids: Tensor, by: int) -> Tensor:
        model = self._decoder("its positions are absolute")
        if model.config.position_encoding == "learned":
            raise Unanswered("its positions are absolute")
        return self._rows(model(ids, positions=range(by, by + ids.shape[1])), ids)

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        batch, n = ids.shape
        extra = ids.new_zeros(batch, pad)
        wide = torch.cat([extra, ids] if side == "left" else [ids, extra], 1)
        if isinstance(self.model, Encoder):
            if side == "left":
                raise Unanswered("an Encoder takes no positions, so it can be padded only at the right")
            out = self.model(wide, mask=Padding([n] * batch, padded_len=n + pad))
        else:
            positions = padded_positions([n] * batch, side=side, padded_len=n + pad)
            out = self.model(wide, positions=positions.to(ids.device))
        rows = self._rows(out, wide)
        return rows[:, pad:] if side == "left" else rows[:, :n]

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        if beside != "positions":
            raise Unanswered("the mask itself separates the texts")
        return self._rows(self.model(ids, mask=Documents(lengths)), ids)

    def start(self) -> Any:
        return self._decoder("an Encoder has no cache").new_cache()

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._rows(self._decoder("an Encoder has no cache")(ids, cache=state), ids), state

    def forked(self, state: Any) -> Any:
        return state.fork()

    def cropped(self, state: Any, tokens: int) -> Any:
        state.crop(state.length - tokens)
        return state

    def reordered(self, state: Any, rows: Tensor) -> Any:
        state.reorder(rows)
        return state

    def _decoder(self, otherwise: str) -> Decoder:
        if isinstance(self.model, Decoder):
            return self.model
        raise Unanswered(otherwise)
