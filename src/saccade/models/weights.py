"""The weights of a published file under our names, and ours under those of the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import value_error

__all__ = ["Entry", "our_weights", "their_weights"]


@dataclass(frozen=True)
class Entry:
    """One tensor of a published file.

    Args:
        name: its name there.
        own: our names; several where their tensor holds ours one below the other.
        transposed: whether it is the transpose of ours.
    """

    name: str
    own: tuple[str, ...]
    transposed: bool = False

    def shape(self, state: Mapping[str, Tensor]) -> torch.Size:
        """The shape that it must have for the tensors of ours."""
        rows = sum(state[own].shape[0] for own in self.own)
        shape = (rows, *state[self.own[0]].shape[1:])
        return torch.Size(reversed(shape) if self.transposed else shape)


def our_weights(
    where: str, entries: Iterable[Entry], published: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A state dict of ours in float32, with memory of its own, from the tensors of a file.

    Args:
        where: the function, for the error message.
        entries: what the file must hold, no more and no less.
        published: the tensors of the file.
        state: a state dict of the model, for its shapes.

    Raises:
        ValueError: tensors are missing, are too many, have other shapes or hold no floats; each is named.
    """
    entries = list(entries)
    _check_fit(where, published, {entry.name: entry.shape(state) for entry in entries})
    found = {}
    for entry in entries:
        # Copies: the tensors of the file are views of it, and the file may be changed while the model lives.
        theirs = published[entry.name].to(torch.float32)
        theirs = theirs.T if entry.transposed else theirs
        parts = theirs.split([state[own].shape[0] for own in entry.own])
        for own, part in zip(entry.own, parts, strict=True):
            found[own] = part.clone(memory_format=torch.contiguous_format)
    return found


def their_weights(entries: Iterable[Entry], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file from a state dict of ours."""
    found = {}
    for entry in entries:
        whole = torch.cat([state[own] for own in entry.own]) if len(entry.own) > 1 else state[entry.own[0]]
        found[entry.name] = (whole.T if entry.transposed else whole).contiguous()
    return found


def _check_fit(where: str, weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not exactly those of the model, and say which ones are not."""
    facts = [f"missing     {name}" for name in shapes if name not in weights]
    facts += [f"unexpected  {name}" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        if name in weights and weights[name].shape != shape:
            facts.append(f"misfit      {name} {list(weights[name].shape)}, not {list(shape)}")
    facts += [f"no floats   {name} {w.dtype}" for name, w in weights.items() if not w.is_floating_point()]
    if facts:
        shown = facts if len(facts) <= 12 else [*facts[:12], f"and {len(facts) - 12} more"]
        got = f"{len(facts)} that do not"
        raise value_error(where, "model.safetensors", "have the weights that config.json tells of", got, facts=shown)
