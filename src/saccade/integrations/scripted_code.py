"""Find attention in programs and scripted functions, whose operations call no function of torch in Python."""

from __future__ import annotations

import inspect
import itertools

import torch
from torch import nn

_ATTENTION_OPERATIONS = ("scaled_dot_product", "multi_head_attention", "transformer_encoder_layer")


def is_program_with_attention(module: nn.Module) -> bool:
    """Return whether a module is a program of ``torch.export``, ``torch.fx`` or TorchScript that contains attention."""
    if isinstance(module, torch.jit.ScriptModule):
        graph = str(module.inlined_graph) if hasattr(module, "forward") else ""
    elif isinstance(module, torch.fx.GraphModule):
        graph = str(module.graph)
    else:
        return False
    is_written = "softmax" in graph and graph.count("matmul") + graph.count("bmm") + graph.count("einsum") > 1
    return is_written or any(name in graph for name in _ATTENTION_OPERATIONS)


def scripted_softmax_in(module: nn.Module) -> str:
    """Return the name of a scripted function with a softmax or attention that a module's methods call; "" if none.

    Only functions that the methods name themselves are found.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    bases = itertools.takewhile(lambda base: base is not nn.Module, type(module).__mro__)
    methods = (inspect.unwrap(x) for base in bases for x in vars(base).values() if inspect.isfunction(x))
    named = (x.__globals__.get(name) for x in methods if inspect.isfunction(x) for name in x.__code__.co_names)
    scripted = (x for x in named if isinstance(x, torch.jit.ScriptFunction))
    return next((str(x.name) for x in scripted if _has_softmax(str(x.inlined_graph))), "")


def _has_softmax(graph: str) -> bool:
    return "softmax" in graph or any(name in graph for name in _ATTENTION_OPERATIONS)
