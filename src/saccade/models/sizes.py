"""The sizes that config.json tells of, held against the files of weights before anything of such a size is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import value_error

__all__ = ["check_sizes", "shapes_of"]

_ANY = 1 << 20


def check_sizes(where: str, stated: Mapping[str, Tensor], *, num_layers: int, **sizes: int) -> None:
    """Raise where config.json tells of more than there is in the weights' files.

    Args:
        where: the function, for the error message.
        stated: the tensors of the files, by their shapes only.
        num_layers: each has at least one tensor.
        sizes: each is the length of some tensor's side; which one does not fit is told later, unless it is so large
            that no tensor of it can be spoken of.

    Raises:
        ValueError: a size that no file bears out.
    """
    rule = "tell of sizes that the weights have"
    if num_layers > len(stated):
        raise value_error(where, "config.json", rule, f"{num_layers} layers, and {len(stated)} tensors")
    longest = max((max(x.shape) for x in stated.values() if x.numel() and x.dim()), default=0)
    for name, size in sizes.items():
        if size > max(longest, _ANY):
            raise value_error(where, "config.json", rule, f"{name} {size}, and tensors of at most {longest}")


def shapes_of(make: Callable[[Any], nn.Module], config: Any, layers: str) -> dict[str, Tensor]:
    """The weights of a model by their shapes, without the model: of layers that are alike one is made.

    Args:
        make: makes a model of a config.
        config: has ``num_layers``.
        layers: what their names begin with, as in ``layers.0.weight``.

    Cost: one layer, however many there are, and a name for each weight.
    """
    with torch.device("meta"):
        state = make(dataclasses.replace(config, num_layers=1)).state_dict()
    first, found = f"{layers}.0.", dict[str, Tensor]()
    for name, x in state.items():
        if name.startswith(first):
            own = name.removeprefix(first)
            found |= {f"{layers}.{number}.{own}": x for number in range(config.num_layers)}
        else:
            found[name] = x
    return found
