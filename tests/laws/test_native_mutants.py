"""The laws notice when the compiled kernel is told something wrong: each mistake is in one of its arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native
from tests.laws.test_laws import Executed
from tests.sampled import MANY
from torch import Tensor

from saccade import testing
from saccade.testing.pattern_cases import PATTERNS

NAMES = (
    *("q", "k", "v", "starts", "runs", "spans", "bits", "visible", "bias", "by_distance", "scale", "softcap"),
    *("row_words", "column_words", "threshold", "kept", "grad_out", "lse", "delta", "chunks", "table"),
)
BASIC = [case for case in testing.CASES if case not in PATTERNS]
LAW = {law.name: law for law in testing.LAWS}


def _moved(x: Tensor | None, axis: int) -> Tensor | None:
    return None if x is None else x.roll(1, axis).contiguous()


def _widened(spans: Tensor, start: int, end: int) -> Tensor:
    return (spans + torch.tensor([start, end], dtype=torch.int32)).clamp(min=0)


# Mistakes by name: the changed argument, the change, and the laws that must notice it.
MISTAKES: dict[str, tuple[str, Callable[[Any], Any], tuple[str, ...]]] = {
    "a row sees one key too many": ("spans", lambda x: _widened(x, 0, 1), ("oracle", "polarity", "sensitivity")),
    "a row misses its first key": ("spans", lambda x: _widened(x, 1, 0), ("oracle", "lse", "sensitivity")),
    "bits of another row": ("bits", lambda x: _moved(x, 2), ("oracle", "isolation")),
    "bits of another head": ("bits", lambda x: _moved(x, 1), ("oracle", "gradients_of_inputs")),
    "every row sees every key": ("runs", lambda x: x * torch.tensor([1, 1, 0], dtype=x.dtype), ("causality", "merge")),
    "a bias moved by one": ("bias", lambda x: _moved(x, 3), ("bias", "order")),
    "a larger scale": ("scale", lambda x: 1.2 * x, ("scale", "oracle")),
    "no softcap": ("softcap", lambda x: 0.0, ("softcap", "order")),
    "what flows back is not weighed": ("delta", torch.zeros_like, ("gradients_of_inputs", "gradients_through_lse")),
    "a larger denominator on the way back": (
        "lse",
        lambda x: x + 0.2,
        ("gradients_of_inputs", "gradients_through_lse"),
    ),
    "no gradient of a bias": ("table", lambda x: -1, ("gradient_of_bias", "gradients_of_parameters")),
}


def _told_wrong(operation: Callable[..., Any], name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        told = dict(zip(NAMES, arguments, strict=False))
        return operation(*(told | ({name: change(told[name])} if name in told else {})).values())

    return run


@pytest.mark.ci
@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        pytest.param(mistake, law, marks=MANY if number else ())
        for mistake, (_, _, laws) in MISTAKES.items()
        for number, law in enumerate(laws)
    ],
)
def test_a_mistake_is_caught(mistake: str, law: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, _ = MISTAKES[mistake]
    for operation in ("forward", "backward"):
        right = getattr(torch.ops.saccade_cpu, operation)
        monkeypatch.setattr(torch.ops.saccade_cpu, operation, _told_wrong(right, name, change))
    assert next(Executed("native").faults([LAW[law]], BASIC, [dtype]), None) is not None
