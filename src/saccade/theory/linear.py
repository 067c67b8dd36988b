"""Claims about linear attention: in-context learning by gradient descent, and equality with state-space models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal
from saccade.matrix import AttentionMatrix, attention
from saccade.mechanisms import SSD
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, equal, same

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An attention function of query ``[m, d]``, key ``[n, d]`` and value ``[n, v]``."""


def without_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return linear attention without features or division, (QKᵀ)V."""
    return (query @ key.T) @ value


def with_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax attention with scale 1, for tensors without batch and head dimensions."""
    return attention(query[None, None], key[None, None], value[None, None], scale=1.0)[0, 0]


def predictions_of_layers(x: Tensor, y: Tensor, asked: Tensor, layers: int, rate: float, attend: Attend) -> Tensor:
    """Predict the answers ``[m, v]`` to the inputs ``asked`` with self-attention layers, from examples in the context.

    Each token consists of an input and a slot, which starts with the answer for an example and with 0 for a question.
    Queries and keys are the inputs, values are the slots times ``-rate / n``, and the output is added to the slots.
    Only examples are keys. After the layers, the slot of a question contains its negated prediction.
    """
    slots, questions = y, torch.zeros(len(asked), y.shape[1], dtype=y.dtype)
    for _ in range(layers):
        value = -rate / len(x) * slots
        slots, questions = slots + attend(x, x, value), questions + attend(asked, x, value)
    return -questions


def predictions_of_descent(x: Tensor, y: Tensor, asked: Tensor, steps: int, rate: float) -> Tensor:
    """Predict answers with a linear map, trained from 0 by gradient descent on the mean squared error."""
    weight = torch.zeros(x.shape[1], y.shape[1], dtype=x.dtype, requires_grad=True)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad((x @ weight - y).square().sum() / (2 * len(x)), weight)
        weight = (weight - rate * gradient).detach().requires_grad_()
    return (asked @ weight).detach()


def _relative_error(seen: Tensor, expected: Tensor) -> float:
    """Return the error of ``seen`` after scaling by the best factor, relative to the norm of ``expected``."""
    factor = (seen * expected).sum() / seen.square().sum()
    return float((factor * seen - expected).norm() / expected.norm())


@claim(
    "related-methods",
    latex=r"\tfrac{\eta}{n}\sum_i y_i\,x_i\cdot x_q=\hat y_q\ \text{after one step on}\ "
    r"\tfrac{1}{2n}\sum_i\lVert Wx_i-y_i\rVert^2",
    source="von Oswald et al. 2023, arXiv:2212.07677, proposition 1",
    verdict="holds if",
    conditions="there is no softmax, each token holds an input with its answer, and the weights are those of the "
    "construction: as many layers then take as many steps. Softmax attention takes a different step, even up to a "
    "factor; with small scores and centred answers, it comes close. Whether trained models do this is not measured",
)
def attention_descends_gradients_in_context(
    draw: Draw,
    *,
    layers: Callable[..., Tensor] = predictions_of_layers,
    attend: Attend = without_softmax,
    soft: Attend = with_softmax,
) -> Measurements:
    """Attention learns in context by gradient descent: one layer takes one step."""
    n, width, rate = 24, 6, 0.4
    x, asked, truth = draw.normal(n, width), draw.normal(10, width), draw.normal(width, 2)
    y = x @ truth
    for steps in (1, 5):
        yield same(
            Message("predictions of {steps} linear layers, against {steps} steps of gradient descent", steps=steps),
            layers(x, y, asked, steps, rate, attend),
            predictions_of_descent(x, y, asked, steps, rate),
        )
    once = predictions_of_descent(x, y, asked, 1, rate)
    yield apart(
        "softmax: error of the best multiple of its predictions",
        _relative_error(layers(x, y, asked, 1, rate, soft), once),
        0.0,
        0.1,
    )
    centred = y - y.mean(0)
    small = layers(x, centred, 1e-4 * asked, 1, rate, soft)
    once = predictions_of_descent(x, centred, asked, 1, rate)
    yield equal(
        "the same with scores times 0.0001 and centred answers",
        _relative_error(small, once),
        0.0,
        5e-4,
        "scores squared",
    )


def by_recurrence(read: Tensor, written: Tensor, decay: Tensor, value: Tensor) -> Tensor:
    """Compute the outputs of a state-space model token by token.

    Args:
        read: the vectors C with which tokens read the state, ``[n, states]``.
        written: the vectors B with which tokens write their values, ``[n, states]``.
        decay: the factor for the state at each token, ``[n, states]`` or ``[n, 1]``.
        value: the values, ``[n, v]``.
    """
    state, outputs = torch.zeros(read.shape[1], value.shape[1], dtype=value.dtype), []
    for reads, writes, factor, row in zip(read, written, decay, value, strict=True):
        state = factor[:, None] * state + torch.outer(writes, row)
        outputs.append(reads @ state)
    return torch.stack(outputs)


def masked_products(read: Tensor, written: Tensor, decay: Tensor) -> Tensor:
    """Return the matrix of `SSD`, ``[n, n]``, for one decay per token; values are not multiplied by the step size."""
    step = -decay[:, 0].log()  # for the rate -1; SSD multiplies what it writes by the step, so B is divided by it
    mechanism = SSD(1).to(read)
    matrix = mechanism(read[None, None], (written / step[:, None])[None, None], step=step[None, None], mask=Causal())
    return matrix.to_dense()[0, 0].detach()


def softmax_weights(query: Tensor, key: Tensor) -> Tensor:
    """Return the weights of causal softmax attention, ``[n, n]``."""
    return AttentionMatrix(query[None, None], key[None, None], Causal()).to_dense()[0, 0]


def rank_below_the_diagonal(matrix: Tensor) -> int:
    """Return the rank of the matrix block that maps the first half of the tokens to the second half."""
    half = len(matrix) // 2
    return int(torch.linalg.matrix_rank(matrix[half:, :half], rtol=1e-10))


@claim(
    "related-methods",
    latex=r"S_t=a_tS_{t-1}+B_tx_t^\top,\ y_t=S_t^\top C_t\iff Y=(L\circ CB^\top)X,\ L_{ij}=a_i\cdots a_{j+1}",
    source="Dao and Gu 2024, arXiv:2405.21060, sections 3 to 5",
    verdict="holds if",
    conditions="the state decays by one number per token: it is then linear attention with a mask of decays. With one "
    "number for each channel of the state, the matrix is not a product with one such mask. Either way, a block below "
    "the diagonal has rank at most the size of the state; those of softmax attention have full rank, so no state of "
    "fixed size computes it",
)
def state_spaces_are_attention(
    draw: Draw,
    *,
    recurrence: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = by_recurrence,
    matrix: Callable[[Tensor, Tensor, Tensor], Tensor] = masked_products,
    weights: Callable[[Tensor, Tensor], Tensor] = softmax_weights,
) -> Measurements:
    """State-space models are attention: the recurrence and a masked matrix of products are the same map."""
    n, states = 32, 4
    read, written, value = draw.normal(n, states), draw.normal(n, states), draw.normal(n, 3)
    decay = 0.8 + 0.15 * draw.uniform(n, 1)
    masked = matrix(read, written, decay)
    yield same("matrix times values, against the recurrence", masked @ value, recurrence(read, written, decay, value))
    for size, name in ((1, "one decay"), (states, "a decay for each channel")):
        decays = 0.8 + 0.15 * draw.uniform(n, size)
        whole = recurrence(read, written, decays, torch.eye(n, dtype=torch.float64))
        yield equal(
            Message("{name}: rank from the first half to the second, 4 channels", name=Message(name)),
            rank_below_the_diagonal(whole),
            states,
        )
        mask = rank_below_the_diagonal(whole / (read @ written.T))
        if size == 1:
            yield equal(Message("{name}: rank of that block of the mask", name=Message(name)), mask, 1)
        else:
            yield apart(Message("{name}: rank of that block of the mask", name=Message(name)), mask, 1, 14.5)
    softmax = rank_below_the_diagonal(weights(read, written))
    yield equal("softmax attention, 4 channels: rank from the first half to the second", softmax, n // 2)
