"""Find the tokens among the inputs of a model and in the calls of its embedding table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.support.errors import shown, type_error, value_error
from saccade.support.validation import check_bool, check_type

_KNOWN = ("inputs_embeds", "input_ids", "tokens")


class InputFormat(NamedTuple):
    """The parts of a model's input format that cannot be inferred from the inputs.

    Args:
        tokens: name of the argument that holds the tokens or embeddings; None to search for it.
        batch_first: whether the tokens or embeddings are ``[batch, length, ...]`` rather than ``[length, batch, ...]``.
        module: the module that the model calls, if the model is a function.
    """

    tokens: str | None = None
    batch_first: bool = True
    module: nn.Module | None = None

    @classmethod
    def of(cls, model: object, tokens: object, batch_first: object, module: object) -> InputFormat:
        """Check a user's arguments and build the input format from them."""
        check_type("tokens", tokens, (str, type(None)), "be the name of an argument of the model, or None")
        hint = "audit(lambda x: model(x, x), rule, inputs=ids, module=model)"
        check_type("module", module, (nn.Module, type(None)), "be the module that a function calls", hint=hint)
        if module is not None and isinstance(model, nn.Module):
            raise value_error("module", "be left out if the model is a module", type(module).__name__)
        return cls(tokens, check_bool("batch_first", batch_first), module)  # type: ignore[arg-type]  # checked


def find_tokens(model: Callable[..., Any], inputs: object, name: str | None) -> Tensor:
    """Find the token ids or embeddings among the inputs of the model under audit.

    The tokens are in the argument called ``name``. If ``name`` is None, they are in an argument with a
    common name such as ``input_ids``, in the only tensor that can hold tokens, or in the model's first parameter.

    Raises:
        TypeError, ValueError: no argument holds tokens or embeddings, or several could.
    """
    if isinstance(inputs, Tensor):
        if name is not None:
            raise value_error("tokens", "be left out if inputs= is a single tensor", shown(name))
        return inputs
    if not isinstance(inputs, Mapping):
        raise type_error("inputs", "be a tensor, or a mapping of arguments", type(inputs).__name__)
    could = {key: one for key, one in inputs.items() if isinstance(one, Tensor) and _can_hold_tokens(one)}
    names = [key for key in ((name,) if name is not None else _KNOWN) if isinstance(inputs.get(key), Tensor)]
    if name is None and not names:
        names = list(could) if len(could) == 1 else [key for key in _parameters(model)[:1] if key in could]
    if names:
        found: Tensor = inputs[names[0]]
        return found
    if name is not None:
        raise value_error("tokens", "name a tensor among the inputs", shown(name), hint=str(sorted(inputs)))
    if not could:
        rule = "contain token ids [batch, length] or embeddings [batch, length, width]"
        hint = "a function may build other arguments: audit(lambda ids: model({...}), rule, inputs=ids, module=model)"
        raise value_error("inputs", rule, sorted(inputs), hint=hint)
    rule = "be named, since several inputs could be tokens"
    raise value_error("tokens", rule, None, hint=" or ".join(f'tokens="{key}"' for key in could))


def is_transposed(ids: object, tokens: Tensor) -> bool | None:
    """Return whether an embedding table receives the tokens as ``[length, batch]`` instead of ``[batch, length]``.

    Args:
        ids: the input of the table, of any shape.
        tokens: the tokens, ``[batch, length]``.

    Returns:
        Whether the tokens are transposed; None if ``ids`` are not ``tokens``.
    """
    if not isinstance(ids, Tensor) or ids.numel() != tokens.numel() or ids.device != tokens.device:
        return None
    if torch.equal(ids.reshape(tokens.shape), tokens):
        return False
    return True if torch.equal(ids.reshape(tokens.mT.shape), tokens.mT) else None


def rows_to_check(padding: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Return the rows that the audit checks, bool ``[batch, length]``: all except padding."""
    if padding is None:
        return torch.ones(shape, dtype=torch.bool)
    check_type("padding", padding, Tensor, "be a bool tensor [batch, length]")
    if padding.shape != shape:
        raise value_error("padding", f"have shape {list(shape)}", list(padding.shape))
    return padding.bool().cpu()


def _can_hold_tokens(x: Tensor) -> bool:
    return x.dim() == 3 if x.is_floating_point() else x.dim() == 2 and x.dtype is not torch.bool


def _parameters(model: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters)
