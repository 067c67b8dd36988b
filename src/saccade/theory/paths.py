"""Claims about paths between tokens: how influence depends on distance, and the number of sequential steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from saccade.masks import Causal, Mask
from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.complexity import dense, growth, recurrence
from saccade.theory.measurement import Measurements, at_least, at_most, equal, same

_WIDTH, _LENGTH = 16, 65
_CAUSAL = Causal()


def influence(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return how strongly the last output depends on each input, as gradient norms ``[batch, len]``, nearest first.

    The gradients are those of a fixed projection of the last output.
    """
    x = x.clone().requires_grad_()
    out = layer(x)[:, -1]
    (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum(), x)
    return gradient.norm(dim=-1).flip(-1)


def lstm(draw: Draw, forget_bias: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Build an LSTM with torch's initial weights, and add a bias to the forget gate."""
    network = draw.module(lambda: nn.LSTM(_WIDTH, _WIDTH, batch_first=True))
    with torch.no_grad():
        dict(network.named_parameters())["bias_ih_l0"][_WIDTH : 2 * _WIDTH] += forget_bias

    def run(x: Tensor) -> Tensor:
        states: Tensor = network(x)[0]
        return states

    return run


def recurrent(
    draw: Draw, gain: float, activation: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Tensor], Tensor]:
    """Build a recurrent layer h_t = f(W h_{t-1} + x_t), where W is a rotation times ``gain``."""
    weight = gain * torch.linalg.qr(draw.normal(_WIDTH, _WIDTH)).Q

    def run(x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0])]
        for token in x.unbind(1):
            states.append(activation(states[-1] @ weight + token))
        return torch.stack(states[1:], 1)

    return run


def scanned(x: Tensor) -> Tensor:
    """Compute the linear recurrence h_t = h_{t-1} / 2 + x_t by a parallel scan.

    Each round doubles the path length. The rounds run in sequence, and the operations of a round run in parallel.
    """
    reach, weight = 1, torch.eye(x.shape[-1], dtype=x.dtype) / 2
    while reach < x.shape[-2]:
        x = x + nn.functional.pad(x[..., :-reach, :] @ weight, (0, 0, reach, 0))
        reach, weight = 2 * reach, weight @ weight
    return x


def rounds_of_lstm(draw: Draw, length: int, forget_bias: float = 0.0) -> int:
    """Return the number of rounds in which a fixed-point iteration over all positions computes an LSTM's states.

    Each round updates all states in parallel, from the previous round's state at the previous position. The iteration
    ends when no state changes by more than 1e-14, after ``length`` rounds at the latest.
    """
    cell = draw.module(lambda: nn.LSTMCell(_WIDTH, _WIDTH))
    x = draw.normal(length, _WIDTH)
    states, memories = x.new_zeros(length + 1, _WIDTH), x.new_zeros(length + 1, _WIDTH)
    with torch.no_grad():
        cell.bias_ih[_WIDTH : 2 * _WIDTH] += forget_bias
        for number in range(1, length + 1):
            state, memory = cell(x, (states[:-1], memories[:-1]))
            change = max(float((state - states[1:]).abs().max()), float((memory - memories[1:]).abs().max()))
            states[1:], memories[1:] = state, memory
            if change < 1e-14:
                return number
    return length


def critical_path(output: Tensor) -> int:
    """Return the length of the longest path of dependent operations in the autograd graph of ``output``."""
    assert output.grad_fn is not None
    depth: dict[Node, int] = {}
    stack = [output.grad_fn]
    while stack:
        before = [node for node, _ in stack[-1].next_functions if node is not None]
        waiting = [node for node in before if node not in depth]
        if waiting:
            stack += waiting
        else:
            depth[stack.pop()] = 1 + max((depth[node] for node in before), default=0)
    return depth[output.grad_fn]


def convolutions(draw: Draw, layers: int, kernel_size: int = 3) -> Callable[[Tensor], Tensor]:
    """Build a stack of causal convolutions with tanh."""
    stack = [draw.module(lambda: nn.Conv1d(_WIDTH, _WIDTH, kernel_size)) for _ in range(layers)]

    def run(x: Tensor) -> Tensor:
        x = x.mT
        for convolution in stack:
            x = torch.tanh(convolution(nn.functional.pad(x, (kernel_size - 1, 0))))
        return x.mT

    return run


def attending(draw: Draw, mask: Mask | Tensor | None = _CAUSAL) -> Callable[[Tensor], Tensor]:
    """Build a self-attention layer, causal by default, with random projections and without an output projection."""
    maps = [draw.normal(_WIDTH, _WIDTH) / _WIDTH**0.5 for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        query, key, value = ((x @ weight)[:, None] for weight in maps)
        return attention(query, key, value, mask)[:, 0]

    return run


@claim(
    latex=r"\Bigl\lVert\frac{\partial o_n}{\partial x_{n-t}}\Bigr\rVert\ \text{does not depend on}\ t",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1",
    verdict="holds if",
    conditions="nothing in the scores depends on distance, as a relative bias or a window does; each of n tokens has a "
    "share of about 1/n of the influence, and scores far below the largest have weights of exactly 0 in floating point",
)
def distance_does_not_matter(
    draw: Draw,
    *,
    layer: Callable[[Draw], Callable[[Tensor], Tensor]] = attending,
    unmasked: Callable[[Draw], Callable[[Tensor], Tensor]] = lambda draw: attending(draw, None),
) -> Measurements:
    """Attention reaches every token in one step, and distant tokens as strongly as near ones."""
    strength = influence(layer(draw), draw.normal(256, _LENGTH, _WIDTH))
    near, far = strength[:, 1:17].mean(), strength[:, -16:].mean()
    yield equal("influence of tokens 49 to 64 away, against 1 to 16", float(far / near), 1.0, 0.2, "256 sequences")
    yield at_least("smallest influence in 256 sequences", float(strength.min()), 2.5e-7)
    share = float((strength[:, -1] / strength.sum(-1)).mean())
    yield at_most("share of one far token in all influence", share, 2 / _LENGTH)
    x = draw.normal(1, 12, _WIDTH)

    def influences(build: Callable[[Draw], Callable[[Tensor], Tensor]]) -> Tensor:
        """Return how strongly each position depends on every position, ``[12, 12]``."""
        every = torch.autograd.functional.jacobian(build(draw), x)
        return every.square().sum((0, 2, 3, 5)).sqrt()

    yield at_least("no mask: smallest influence of a position on another", float(influences(unmasked).min()), 2.5e-4)
    hidden = float((influences(layer) == 0).double().mean())
    yield equal("causal mask: share of pairs without influence, 12 tokens", hidden, 66 / 144)


@claim(
    latex=r"\Bigl\lVert\frac{\partial h_n}{\partial x_{n-t}}\Bigr\rVert\to 0",
    source="tutorials; Hochreiter 1991, Bengio et al. 1994; the forget gate: Gers et al. 2000",
    verdict="holds if",
    conditions="the weights are the initial ones: with a forget gate that stays open (a bias of 6) little is lost "
    "over 64 steps",
)
def recurrent_influence_fades(draw: Draw, *, network: Callable[..., Callable[[Tensor], Tensor]] = lstm) -> Measurements:
    """In a recurrent network, the influence of a token fades with its distance."""
    x = draw.normal(64, _LENGTH, _WIDTH)
    strength = influence(network(draw), x).mean(0)
    yield at_most("LSTM: influence 64 steps away, against 1 step", float(strength[64] / strength[1]), 7e-11)
    half = (strength[1:33].log().diff().mean(), strength[32:65].log().diff().mean())
    yield equal("decay per step, second half against first", float(half[1] / half[0]), 1.0, 0.4, "exponential")
    open_gate = influence(network(draw, 6.0), x).mean(0)
    yield at_least("the same with a forget bias of 6", float(open_gate[64] / open_gate[1]), 0.15)


@claim(
    latex=r"\frac{\partial o_n}{\partial x_{n-t}}=0\ \text{for}\ t>L(k-1)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1",
    verdict="holds",
    conditions="without strides and dilations, which reach further",
)
def convolutions_are_local(
    draw: Draw, *, network: Callable[..., Callable[[Tensor], Tensor]] = convolutions
) -> Measurements:
    """A stack of L convolutions of width k sees L (k - 1) steps back, and nothing beyond."""
    x = draw.normal(4, _LENGTH, _WIDTH)
    for layers in (1, 4):
        strength = influence(network(draw, layers), x)
        reach = int((strength.amax(0) > 0).nonzero().max())
        yield equal(
            Message("farthest token with an influence, {layers} layers of width 3", layers=layers), reach, 2 * layers
        )


@claim(
    latex=r"\Bigl\lVert\frac{\partial h_n}{\partial x_{n-t}}\Bigr\rVert\to\infty",
    source="tutorials; Bengio et al. 1994; Pascanu et al. 2013, arXiv:1211.5063, section 2.1",
    verdict="holds if",
    conditions="the recurrent matrix lengthens the state (its largest singular value must be above 1, and it is "
    "enough if all are) and nothing saturates; with tanh and inputs of variance 1 its gradients fade",
)
def recurrent_gradients_explode(
    draw: Draw, *, network: Callable[..., Callable[[Tensor], Tensor]] = recurrent
) -> Measurements:
    """Gradients of recurrent networks explode over many steps."""
    x = draw.normal(64, _LENGTH, _WIDTH)
    for gain in (1.1, 1.0, 0.9):
        strength = influence(network(draw, gain), x).mean(0)
        expected = gain**64
        seen = float(strength[64] / strength[0]) / expected
        yield equal(
            Message("linear, gain {gain}: influence 64 steps away, over {expected:.3g}", gain=gain, expected=expected),
            seen,
            1.0,
            1e-9,
        )
    small = influence(network(draw, 1.1, torch.tanh), x / 1e6).mean(0)
    grown = float(small[64] / small[0]) / 1.1**64
    yield equal("tanh, gain 1.1, inputs of size 10⁻⁶: 64 steps away, over 446", grown, 1.0, 2e-5, "nothing saturates")
    large = influence(network(draw, 1.1, torch.tanh), x).mean(0)
    yield at_most("the same, inputs of size 1: 64 steps away, against the last", float(large[64] / large[0]), 1e-10)


@claim(
    latex=r"O(n)\ \text{steps against}\ O(1)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1; for linear recurrences Blelloch 1990; "
    "for others Lim et al. 2024, arXiv:2309.12252",
    verdict="holds if",
    conditions="the step is not linear and influence does not fade: a linear recurrence takes log₂ n rounds, and an "
    "LSTM with torch's initial weights is solved by iteration over all positions at once in 70 rounds, whatever n is. "
    "Generating n tokens takes n steps with every model. A sum of n terms counts as one step; added in pairs, it "
    "takes log₂ n",
)
def recurrences_are_sequential(
    draw: Draw,
    *,
    recurrence: Callable[[Tensor], Tensor] = recurrence,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = dense,
    convolve: Callable[[Tensor], Tensor] | None = None,
    scan: Callable[[Tensor], Tensor] = scanned,
    forget_bias: float = 0.0,
    open_bias: float = 6.0,
) -> Measurements:
    """Recurrent networks must run step by step; attention and convolutions compute all positions at once."""
    stack = convolutions(draw, 4) if convolve is None else convolve

    def path(compute: Callable[[Tensor], Tensor]) -> Callable[[int], int]:
        return lambda length: critical_path(compute(torch.ones(1, length, _WIDTH).double().requires_grad_()))

    steps = path(lambda x: recurrence(x[:, None]))
    yield equal(
        "recurrence: growth of the longest chain for twice the length", growth(steps, 128), 2.0, 0.02, "its ends"
    )
    yield at_least("operations in it, n = 128, over n", steps(128) / 128, 1.0)
    yield equal(
        "attention: growth of the longest chain for twice the length", growth(path(lambda x: attend(x, x, x)), 128), 1.0
    )
    yield equal("four convolutions: growth of the longest chain for twice the length", growth(path(stack), 128), 1.0)
    rounds = [path(scan)(length) for length in (64, 128, 256)]
    yield equal("linear recurrence: operations more for each doubling", rounds[2] - rounds[1], rounds[1] - rounds[0])
    yield at_most("the same, n = 256, over that of the recurrence", rounds[2] / steps(256), 0.1)
    x = draw.normal(2, 100, _WIDTH)
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state / 2 + token
        states.append(state)
    yield same("linear recurrence in rounds, against step by step", scan(x), torch.stack(states, 1))
    short, long = (rounds_of_lstm(draw, length, forget_bias) for length in (128, 512))
    yield at_most(
        "LSTM, iteration over all positions: rounds until nothing changes, n = 512, against n = 128", long / short, 1.5
    )
    yield at_most("the same, n = 512: rounds", long, 150)
    held = rounds_of_lstm(draw, 512, open_bias)
    yield at_least("the same with a forget bias of 6: rounds", held, 500)


@claim(
    latex=r"A_{ij}=0\ \Rightarrow\ \frac{\partial o_i}{\partial x_j}=0",
    source="tutorials; on what several layers pass on Abnar and Zuidema 2020, arXiv:2005.00928",
    verdict="holds if",
    conditions="there is one layer. In two layers, a third token can read the needed token and pass it on: its "
    "influence ends only if the mask hides it from all other tokens as well",
)
def what_is_needed_must_be_attended_to(
    draw: Draw, *, layer: Callable[[Draw, Tensor], Callable[[Tensor], Tensor]] = attending
) -> Measurements:
    """To depend on a token, as a verb on its subject, a query must attend to it."""
    n, subject = 10, 1
    x = draw.normal(64, n, _WIDTH)
    pair, column = torch.ones(n, n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool)
    pair[-1, subject] = False
    column[torch.arange(n) != subject, subject] = False

    def reached(allowed: Tensor, layers: int) -> Tensor:
        stack = [layer(draw, allowed) for _ in range(layers)]
        return influence(lambda x: functools.reduce(lambda x, one: one(x), stack, x), x)[:, n - 1 - subject]

    yield equal("one layer, the pair hidden: largest influence of the token", float(reached(pair, 1).max()), 0.0)
    yield at_least("two layers, the pair hidden: smallest influence", float(reached(pair, 2).min()), 0.006)
    alone = float(reached(column, 2).max())
    yield equal("two layers, the token hidden from all others: largest influence", alone, 0.0)
