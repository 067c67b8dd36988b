"""The attention weights of a model, from what it computes itself: the results of softmax and torch's functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax})
_MHA = inspect.signature(F.multi_head_attention_forward)
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Weights(NamedTuple):
    """The weights of one attention call.

    Attributes:
        rows: ``[..., q_len, kv_len]`` in the layout of the model, keys last.
        is_call: whether a torch function computed them, so that the model's code never had them.
        place: the name of the module that computed them.
        is_softmax: whether they are the result of a softmax.
    """

    rows: Tensor
    is_call: bool
    place: str
    is_softmax: bool = False


def true_weights(
    model: nn.Module, run: Any, leave: Sequence[str] = (), entering: Sequence[str] = (), equation: str = ""
) -> list[Weights]:
    """Run a model without gradients; return the weights of each attention call, in order.

    Args:
        model, run, leave, entering, equation: see `benchmarks.code_bases.case.Case`.
    """
    with torch.no_grad(), _places(model) as stack, _Listener(stack, equation) as listener:
        names = [name for name, _ in model.named_modules() if _matches(name, entering)]
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(partial(_keep, listener, name))
        run(model)
    within = tuple(name.rpartition(".")[0] for name in names)
    return [
        one
        for one in listener.found
        if not _matches(one.place, leave) and not (one.is_softmax and (one.place in within or equation))
    ]


def _keep(listener: _Listener, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    listener.found.append(Weights(args[0].detach().clone(), False, name))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Listener(TorchFunctionMode):
    def __init__(self, places: list[str], equation: str):
        super().__init__()
        self.found: list[Weights] = []
        self._places, self._equation = places, equation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        place = self._places[-1] if self._places else ""
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self.found.append(Weights(out.detach().movedim(dim, -1).clone(), False, place, is_softmax=True))
        elif func is torch.functional.einsum and args[0] == self._equation:
            self.found.append(Weights(args[1].detach().clone(), False, place))
        elif func is F.scaled_dot_product_attention:
            self.found.append(Weights(sdpa_weights(*args, **kwargs), True, place))
        elif func is F.multi_head_attention_forward:
            arguments = _MHA.bind(*args, **kwargs).arguments | {"need_weights": True, "average_attn_weights": False}
            self.found.append(Weights(F.multi_head_attention_forward(**arguments)[1], True, place))
        return out


def sdpa_weights(*args: Any, **kwargs: Any) -> Tensor:
    """Return the weights of torch's SDPA by its definition, in float64."""
    its = dict(zip(_SDPA_NAMES, args, strict=False)) | kwargs
    query, key, mask = its["query"].double(), its["key"].double(), its.get("attn_mask")
    if its.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = query.shape[-1] ** -0.5 if its.get("scale") is None else its["scale"]
    scores = query @ key.mT * scale
    if its.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.nan_to_num(scores.softmax(-1), 0.0)  # rows without a visible key


@contextmanager
def _places(model: nn.Module) -> Iterator[list[str]]:
    """Give a list of the names of the modules that are running, innermost last."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    def before(module: nn.Module, args: Any) -> None:
        stack.append(names.get(module, stack[-1] if stack else ""))

    def after(module: nn.Module, args: Any, out: Any) -> None:
        stack.pop()

    handles = (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
