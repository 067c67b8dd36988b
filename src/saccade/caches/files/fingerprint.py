"""fingerprint: a name for everything about a model that keys and values depend on."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from saccade.support.errors import type_error

__all__ = ["fingerprint"]


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over a model's weights, their types, its configuration and its build.

    Two models with the same fingerprint make the same keys and values of the same tokens at the same positions; a
    changed weight, dtype, base of the rotation, mask or adapter changes it. What is no part of the module (autocast, a
    mask given with the call, an image before the text) does not: that is for the ``salt`` of a `PrefixStore`.

    Args:
        model: a module; its ``config``, if it has one, counts as well.

    Returns:
        64 hexadecimal digits, the same in every process.

    Raises:
        TypeError: not a module.

    Cost: reads every weight once.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = fingerprint(layer)
        >>> with torch.no_grad():
        ...     _ = layer.bias.add_(1)
        >>> fingerprint(layer) == before
        False
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "be a torch module", type(model).__name__)
    digest = hashlib.sha256()
    digest.update(f"{type(model).__qualname__}\n{model!r}\n{getattr(model, 'config', None)!r}\n".encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        x = tensors[name].detach()
        digest.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        if x.numel():
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
