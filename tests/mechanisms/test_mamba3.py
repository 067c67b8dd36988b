"""Mamba-3: the published steps, several inputs and outputs as a sum, calls without a visible token, wrong arguments."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import masks
from saccade.caches import RecurrentCache, load_cache, save_cache
from saccade.mechanisms import SSD, Mamba3

CAUSAL = masks.Causal()
HEADS, WIDTH, OUT = 4, 6, 3
GATES = ("step", "blend", "decay", "angle")


def draw(length: int, key_heads: int = HEADS, pairs: int = 2) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Query, key and value, and the gates, all float64; the last channels of the state do not rotate."""
    torch.manual_seed(0)

    def normal(heads: int, *sizes: int) -> Tensor:
        return torch.randn(2, heads, length, *sizes, dtype=torch.float64)

    gates = {
        "step": F.softplus(normal(HEADS)),
        "blend": normal(HEADS).sigmoid(),
        "decay": -F.softplus(normal(HEADS)),
        "angle": 3.0 * normal(1, pairs),
    }
    return [normal(key_heads, WIDTH), normal(key_heads, WIDTH), normal(HEADS, OUT)], gates


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3) and so on of ``[batch, heads, width]``."""
    out = x.clone()
    for pair in range(angle.shape[2]):
        (one, two), (cos, sin) = (
            (x[..., 2 * pair], x[..., 2 * pair + 1]),
            (angle[..., pair].cos(), angle[..., pair].sin()),
        )
        out[..., 2 * pair], out[..., 2 * pair + 1] = one * cos - two * sin, one * sin + two * cos
    return out


def defined(query: Tensor, key: Tensor, value: Tensor, gates: dict[str, Tensor]) -> Tensor:
    """The steps as published: keys and queries rotated by the angles so far, two writes for each token."""
    query, key = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (query, key))
    step, blend, decay, angle = (gates[name] for name in GATES)
    state, out = query.new_zeros(2, HEADS, WIDTH, OUT), []
    last_key, last_value, total = torch.zeros_like(key[:, :, 0]), torch.zeros_like(value[:, :, 0]), 0.0
    for t in range(query.shape[2]):
        total = total + angle[:, :, t]
        q, k, v = turned(query[:, :, t], total), turned(key[:, :, t], total), value[:, :, t]
        alpha = decay[:, :, t, None, None].exp()
        beta = (1 - blend[:, :, t, None, None]) * step[:, :, t, None, None] * alpha
        gamma = blend[:, :, t, None, None] * step[:, :, t, None, None]
        state = alpha * state + beta * last_key[..., None] * last_value[..., None, :]
        state = state + gamma * k[..., None] * v[..., None, :]
        out.append((q[..., None, :] @ state)[..., 0, :])
        last_key, last_value = k, v
    return torch.stack(out, 2)


@pytest.mark.parametrize(("length", "key_heads"), [(1, 4), (33, 2), (300, 1)])
def test_products_and_gradients_are_those_of_the_definition(length: int, key_heads: int) -> None:
    tensors, gates = draw(length, key_heads)
    leaves = [x.requires_grad_() for x in (*tensors, *gates.values())]
    query, key, value = tensors
    out, expected = Mamba3()(query, key, mask=CAUSAL, **gates) @ value, defined(*tensors, gates)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    torch.testing.assert_close(own, theirs, atol=1e-9, rtol=1e-9)


def test_steps_that_write_only_their_own_token_are_ssd() -> None:
    (query, key, value), gates = draw(70)
    rule = SSD(HEADS).double()
    decay = -gates["step"] * rule.log_rate.exp()[:, None]
    own = Mamba3()(query, key, step=gates["step"], decay=decay, mask=CAUSAL) @ value
    torch.testing.assert_close(own, rule(query, key, step=gates["step"], mask=CAUSAL) @ value)


def test_several_inputs_and_outputs_are_a_sum_of_matrices() -> None:
    (_, _, value), gates = draw(50)
    ranks = 3
    query, key = torch.randn(2, ranks, 2, HEADS, 50, WIDTH, dtype=torch.float64)
    given = torch.randn(ranks, 1, HEADS, 1, OUT, dtype=torch.float64) * value
    for asked in query:
        parts = [Mamba3()(asked, k, mask=CAUSAL, **gates) @ v for k, v in zip(key, given, strict=True)]
        expected = sum(defined(asked, k, v, gates) for k, v in zip(key, given, strict=True))
        torch.testing.assert_close(sum(parts), expected)
    # The outputs of all ranks read one state, so their queries may share its keys, as heads of a group do.
    together = query.permute(1, 2, 0, 3, 4).flatten(1, 2)
    out = sum(Mamba3()(together, k, mask=CAUSAL, **gates) @ v for k, v in zip(key, given, strict=True))
    torch.testing.assert_close(out.unflatten(1, (HEADS, ranks))[:, :, -1], expected)


@pytest.mark.parametrize("sizes", [(20, 1, 1, 1, 7), (1,) * 30, (5, 3, 22)], ids=str)
def test_calls_without_a_visible_token_pass_on_the_last_one(sizes: tuple[int, ...], tmp_path: Path) -> None:
    tensors, gates = draw(30)
    hidden = torch.tensor([3, 19, 20, 21, 29])
    places = torch.arange(30).index_fill(0, hidden, -1)
    rest = torch.ones(30, dtype=torch.bool).index_fill(0, hidden, False)
    expected = defined(*(x[:, :, rest] for x in tensors), {name: x[:, :, rest] for name, x in gates.items()})
    cache, out, start = RecurrentCache(), [], 0
    for size in sizes:
        span = slice(start, start + size)
        given = {name: x[:, :, span] for name, x in gates.items()}

        def make(query: Tensor, key: Tensor, given: dict[str, Tensor] = given, **where: object) -> object:
            return Mamba3()(query, key, **given, **where)

        forked, part = cache.fork(), [x[:, :, span] for x in tensors]
        out.append(cache.attend(make, *part, mask=CAUSAL, positions=places[span]))
        torch.testing.assert_close(forked.attend(make, *part, mask=CAUSAL, positions=places[span]), out[-1])
        save_cache(cache, tmp_path / "state.safetensors")
        cache, start = load_cache(tmp_path / "state.safetensors"), start + size
    torch.testing.assert_close(torch.cat(out, 2)[:, :, rest], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("sizes", [(12,), (1,) * 12, (5, 2, 5), (6, 6), (7, 5)], ids=str)
def test_no_token_of_another_document_is_carried_on(sizes: tuple[int, ...]) -> None:
    """Documents of 5, 3 and 4 tokens; of the second, nothing is visible, and of the third, not the first."""
    tensors, gates = draw(12)
    places = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1, 8, 9, 10, 11])
    mask = masks.Documents([5, 3, 4], CAUSAL) & masks.Padding([12, 9])
    memory, out, start = None, [], 0
    for size in sizes:
        span = slice(start, start + size)
        query, key, value = (x[:, :, span] for x in tensors)
        given = {name: x[:, :, span] for name, x in gates.items()}
        where = {"q_positions": places[span], "kv_positions": places[span]}
        part, memory = Mamba3()(query, key, mask=mask, **where, **given).advance(value, memory)
        out.append(part)
        start += size
    whole = torch.cat(out, 2)
    for item, document in ((0, slice(0, 5)), (0, slice(8, 12)), (1, slice(0, 5)), (1, slice(8, 9))):
        query, key, value = (x[:, :, document] for x in tensors)
        alone = defined(query, key, value, {name: x[:, :, document] for name, x in gates.items()})
        torch.testing.assert_close(whole[item, :, document], alone[item])


def test_later_tokens_change_no_bit_of_earlier_rows() -> None:
    tensors, gates = (x for x in draw(70))
    tensors, gates = [x.float() for x in tensors], {name: x.float() for name, x in gates.items()}
    query, key, value = tensors
    before = Mamba3()(query, key, mask=CAUSAL, **gates) @ value
    for x in (*tensors, *gates.values()):
        x[:, :, 40:] = -0.3 * x[:, :, 40:] if bool((x < 0).any()) and x.dim() == 4 else 0.7 * x[:, :, 40:]
    after = Mamba3()(query, key, mask=CAUSAL, **gates) @ value
    assert torch.equal(after[:, :, :40], before[:, :, :40])
    assert not torch.equal(after[:, :, 40], before[:, :, 40])


def test_second_derivatives() -> None:
    tensors, gates = draw(4, pairs=1)
    leaves = [x[:1, :, :4].clone().requires_grad_() for x in (*tensors, *gates.values())]

    def run(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Tensor:
        return Mamba3()(query, key, mask=CAUSAL, **dict(zip(GATES, given, strict=True))) @ value

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


REFUSED = {
    "step": ({"step": torch.full((2, 4, 5), -0.5)}, "step must be at least 0; got -0.5"),
    "negative blend": ({"blend": torch.full((2, 4, 5), -0.1)}, "blend must be at least 0; got -0.1"),
    "blend": ({"blend": torch.full((2, 4, 5), 1.5)}, "blend must be at most 1; got 1.5"),
    "decay of channels": ({"decay": -torch.ones(2, 4, 5, 6)}, "decay must have one value for each token"),
    "decay": ({"decay": torch.ones(2, 4, 5)}, "decay must be at most 0"),
    "heads": ({"step": torch.ones(2, 3, 5)}, "be multiples of one another"),
    "pairs": ({"angle": torch.ones(2, 4, 5, 4)}, "angle must be a float tensor .* with at most 3 pairs"),
    "kind": ({"angle": 1.0}, "angle must be a tensor"),
    "integers": ({"angle": torch.ones(2, 4, 5, 2, dtype=torch.int64)}, "angle must be a float tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_gates_are_refused(name: str) -> None:
    (query, key, _), _ = draw(5)
    gates, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        Mamba3()(query, key, mask=CAUSAL, **gates)
