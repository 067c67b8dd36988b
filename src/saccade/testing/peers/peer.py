"""Which functions of torch are held to the laws, and how each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from torch import Tensor

from saccade.testing.peers import torch_attention
from saccade.testing.subject import Subject

__all__ = ["PEERS", "Peer"]


@dataclasses.dataclass(frozen=True)
class Peer:
    """Somebody else's attention.

    Attributes:
        call: how it is called, as one writes it.
        function: the same in the kit's calling convention.
        gqa: it takes fewer key heads than query heads.
    """

    call: str
    function: Callable[..., Tensor]
    gqa: bool

    def __str__(self) -> str:
        return self.call

    def subject(self) -> Subject:
        """The peer as a function under test."""
        return Subject(self.function, gqa=self.gqa)


def _module(call: str, adapter: Callable[..., Tensor], *, need_weights: bool, training: bool) -> Peer:
    return Peer(call, partial(adapter, need_weights=need_weights, training=training), gqa=False)


PEERS = (
    Peer("F.scaled_dot_product_attention(q, k, v, mask)", torch_attention.with_mask, gqa=True),
    Peer("F.scaled_dot_product_attention(q, k, v, is_causal=True)", torch_attention.with_flag, gqa=True),
    _module("mha(q, k, v, need_weights=True)", torch_attention.across, need_weights=True, training=True),
    _module("mha(q, k, v, need_weights=False)", torch_attention.across, need_weights=False, training=True),
    _module("mha.train()(x, x, x, need_weights=False)", torch_attention.within, need_weights=False, training=True),
    _module("mha.eval()(x, x, x, need_weights=False)", torch_attention.within, need_weights=False, training=False),
    _module("mha.eval()(x, x, x, need_weights=True)", torch_attention.within, need_weights=True, training=False),
)
