"""NaN in the key, value or gate of a hidden token changes no gradient, and that of a visible one is seen after it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import masks, mechanisms

LENGTH, WIDTH = 40, 4
RULES = {
    "gated linear": (mechanisms.GatedLinear(), ("beta", "decay")),
    "delta": (mechanisms.Delta(), ("beta", "decay")),
    "kda": (mechanisms.Delta(), ("beta", "decay of channels")),
    "delta product": (mechanisms.DeltaProduct(2), ("beta of steps", "decay")),
    "gated delta 2": (mechanisms.GatedDelta2(), ("erase", "decay of channels")),
    "mesa": (mechanisms.Mesa(), ("beta", "decay")),
    "ssd": (mechanisms.SSD(2), ("step",)),
    "mamba-3": (mechanisms.Mamba3(), ("step", "blend", "decay", "angle")),
    "rwkv-7": (mechanisms.RWKV7(), ("removal", "rate", "decay of channels")),
}
CASES = [(name, bad) for name, (_, gates) in RULES.items() for bad in ("key", "value", *gates)]


def draw(name: str) -> dict[str, Tensor]:
    """Query, key and value, and the gates of a rule."""
    torch.manual_seed(0)
    steps = getattr(RULES[name][0], "num_steps", 1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, 2, LENGTH, *sizes, dtype=torch.float64)

    drawn = {
        "beta": normal().sigmoid(),
        "beta of steps": normal(steps).sigmoid(),
        "decay": -0.6 * normal().sigmoid(),
        "decay of channels": -0.6 * normal(WIDTH).sigmoid(),
        "erase": normal(WIDTH).sigmoid(),
        "step": normal().sigmoid(),
        "blend": normal().sigmoid(),
        "angle": normal(WIDTH // 2),
        "removal": F.normalize(normal(WIDTH), dim=-1),
        "rate": normal(WIDTH).sigmoid(),
    }
    key = F.normalize(normal(steps, WIDTH), dim=-1).flatten(3)
    tensors = {"query": normal(WIDTH), "key": key, "value": normal(steps * WIDTH)}
    return tensors | {gate: drawn[gate] for gate in RULES[name][1]}


def run(name: str, given: dict[str, Tensor], mask: masks.Mask) -> Tensor:
    gates = {gate.split(" of ")[0]: x for gate, x in given.items() if gate not in ("query", "key", "value")}
    matrix = RULES[name][0].double()(given["query"], given["key"], mask=mask, **gates)
    return matrix.total(given["value"]) if hasattr(matrix, "total") else matrix @ given["value"]


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_nan_of_a_hidden_token_changes_no_gradient(name: str, bad: str) -> None:
    mask, given = masks.Causal() & masks.Padding([LENGTH - 1]), draw(name)
    grad = torch.randn(1, 2, LENGTH, WIDTH, dtype=torch.float64)
    found = []
    for number in (0.5, torch.nan):
        tensors = {one: x.clone() for one, x in given.items()}
        tensors[bad][:, :, -1] = -number if "decay" in bad else number
        leaves = [x.requires_grad_() for x in tensors.values()]
        out = run(name, tensors, mask)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(x.isfinite().all() for x in found[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_nan_of_a_visible_token_is_seen_from_there_on(name: str, bad: str) -> None:
    given = draw(name)
    clean = run(name, given, masks.Causal())
    given[bad][:, :, 30] = torch.nan
    out = run(name, given, masks.Causal())
    torch.testing.assert_close(out[:, :, :30], clean[:, :, :30])
    assert out[:, :, 30:].isnan().all()
