"""A leak as a few lines that run without this library, for a report of a bug."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.auditing.finding import Finding

__all__ = ["script_of"]


def script_of(model: object, inputs: Tensor | Mapping[str, Any], found: Finding, seed: int) -> str:
    """Lines that change the vector of one token and print by how much the output that must not see it moves.

    Of models of transformers, made from their configuration with random weights; empty for other models, and where the
    model is given what these lines cannot write down.
    """
    config: Any = getattr(model, "config", None)
    if (
        found.key is None
        or not type(model).__module__.startswith("transformers.")
        or not hasattr(config, "to_diff_dict")
    ):
        return ""
    told = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if not isinstance(ids := told.pop("input_ids", None), Tensor):
        return ""
    written = {name: _written(value) for name, value in told.items()}
    if None in written.values():
        return ""
    sizes = {name: value for name, value in config.to_diff_dict().items() if name not in ("architectures", "dtype")}
    sizes = {name: value for name, value in sizes.items() if name not in ("transformers_version", "model_type")}
    more = "".join(f", {name}={value}" for name, value in written.items())
    (item, row), (other, key) = found.row, found.key
    lines = [
        "import torch, transformers",
        f"torch.manual_seed({seed})",
        f"config = transformers.{type(config).__name__}(**{sizes!r})",
        f"model = transformers.{type(model).__name__}(config).eval()",
        f"ids = torch.tensor({ids.tolist()})",
        "x = model.get_input_embeddings()(ids).detach()",
        f"y = x.clone(); y[{other}, {key}] = torch.randn_like(y[{other}, {key}]) * x.std()",
        f"run = lambda x: model(inputs_embeds=x{more})[0]",
        f"moved = (run(y) - run(x))[{item}, {row}].abs().max() / run(x).square().mean().sqrt()",
        f'print("output {row} moves by", moved.item(), "with token {key}, which it must not see")',
    ]
    return "\n".join(lines) + "\n"


def _written(value: object) -> str | None:
    """Python that makes this value; None where it cannot be written in a line."""
    if isinstance(value, Tensor):
        if value.numel() and bool((value == 1).all()) and value.dtype == torch.int64:
            return f"torch.ones({list(value.shape)}, dtype=torch.int64)"
        return (
            f"torch.tensor({value.tolist()})"
            if value.numel() <= 4096 and value.dtype in (torch.int64, torch.bool)
            else None
        )
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else None
