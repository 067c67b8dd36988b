"""Lines that make a small model, and what lines print that show a broken claim of it."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.auditing.equivalence_script import run_lines
from saccade.auditing.survey.architectures import Architecture
from saccade.auditing.survey.small_configs import VOCABULARY

LENGTHS = (9, 8, 7)
"""Of the texts that are packed: the first is longer than the small models' windows of 8."""


def ids() -> Tensor:
    """Two texts of 24 random tokens, none of them special."""
    return torch.randint(4, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def model_lines(architecture: Architecture, implementation: str, model: nn.Module) -> list[str]:
    """Lines that make the model and two texts, and two functions: one runs the model, one compares."""
    return [
        "import torch, transformers as T",
        "torch.manual_seed(0); torch.set_grad_enabled(False)",
        f"model = {architecture.expression()}.eval()",
        "drawn = (p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad and 'embed' not in n)",
        "[torch.nn.init.xavier_normal_(p) for p in drawn]",
        *([f'model.set_attn_implementation("{implementation}")'] if implementation != "eager" else []),
        f"ids = torch.randint(4, {VOCABULARY}, (2, {sum(LENGTHS)}))",
        *run_lines(model, ".logits"),
    ]


def reach_lines(row: tuple[int, int], key: tuple[int, int]) -> list[str]:
    """Lines that put another token in one place and look at an output that must not depend on it."""
    return [
        f"other = ids.clone(); other[{key[0]}, {key[1]}] = 3",
        f"off(run(other)[{row[0]}, {row[1]}], run(ids)[{row[0]}, {row[1]}])",
    ]


def printed(lines: Sequence[str]) -> float:
    """The number that a script prints; NaN where it raises."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), torch.no_grad():
            exec("\n".join(lines), {})  # text of this module's own
        return float(out.getvalue())
    except Exception:  # whatever so many models may raise: then nothing is reproduced
        return math.nan
