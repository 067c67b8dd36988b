"""What is broken as a few lines that run without this library, for a report of a bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.equivalence_script import claim_lines, run_lines
from saccade.auditing.finding import Finding, Judged


def script_of(
    model: object,
    inputs: Tensor | Mapping[str, Any],
    ids: Tensor,
    claims: Sequence[Judged],
    lengths: Sequence[int],
    seed: int,
) -> str:
    """Lines that show the first broken claim that can be written so; empty where there is none.

    Args:
        model: whatever was audited.
        inputs: what it was called with.
        ids: its tokens.
        claims: what came of each.
        lengths: of packed texts.
        seed: of random weights.
    """
    leaks = [claim.finding for claim in claims if claim.finding is not None and claim.finding.kind == "leak"]
    ways = [claim.name for claim in claims if claim.finding is not None and claim.finding.kind == "differs"]
    written = chain(
        (script_of_leak(model, inputs, found, seed) for found in leaks),
        (script_of_way(model, ids, name, lengths, seed) for name in ways),
    )
    return next(filter(None, written), "")


def script_of_leak(model: object, inputs: Tensor | Mapping[str, Any], found: Finding, seed: int) -> str:
    """Lines that change the vector of one token and print by how much the output that must not see it moves.

    Of models of transformers, made from their configuration with random weights; empty for other models, and where the
    model is given what these lines cannot write down.
    """
    told = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if found.key is None or not isinstance(ids := told.pop("input_ids", None), Tensor):
        return ""
    written = {name: _written(value) for name, value in told.items()}
    if None in written.values() or not (made := _made(model, ids, seed)):
        return ""
    more = "".join(f", {name}={value}" for name, value in written.items())
    (item, row), (other, key) = found.row, found.key
    lines = [
        *made,
        "x = model.get_input_embeddings()(ids).detach()",
        f"y = x.clone(); y[{other}, {key}] = torch.randn_like(y[{other}, {key}]) * x.std()",
        f"run = lambda x: model(inputs_embeds=x{more})[0]",
        f"moved = (run(y) - run(x))[{item}, {row}].abs().max() / run(x).square().mean().sqrt()",
        f'print("output {row} moves by", moved.item(), "with token {key}, which it must not see")',
    ]
    return "\n".join(lines) + "\n"


def script_of_way(model: object, ids: Tensor, claim: str, lengths: Sequence[int], seed: int) -> str:
    """Lines that run the model in two ways that ought to say the same, and print how far apart they are.

    Of models of transformers, as `script_of`; empty for claims that are not written so.
    """
    if not isinstance(model, nn.Module) or not (made := _made(model, ids, seed)):
        return ""
    with torch.no_grad():
        read = ".logits" if hasattr(model(input_ids=ids), "logits") else ".last_hidden_state"
    lines = claim_lines(claim, model, ids, lengths, read)
    return "\n".join([*made, "torch.set_grad_enabled(False)", *run_lines(model, read), *lines]) + "\n" if lines else ""


def _made(model: object, ids: Tensor, seed: int) -> list[str]:
    """Lines that make a model of transformers from its configuration, and the tokens; none for other models."""
    config: Any = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or not hasattr(config, "to_diff_dict"):
        return []
    left_out = ("architectures", "dtype", "transformers_version", "model_type")
    sizes = {name: value for name, value in config.to_diff_dict().items() if name not in left_out}
    return [
        "import torch, transformers",
        f"torch.manual_seed({seed})",
        f"config = transformers.{type(config).__name__}(**{sizes!r})",
        f"model = transformers.{type(model).__name__}(config).eval()",
        f"ids = torch.tensor({ids.tolist()})",
    ]


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
