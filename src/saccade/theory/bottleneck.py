"""The claim that an output layer can give any distribution of the next token, although its logits have limited rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.models import small_decoder
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal, same
from saccade.theory.rank import centred_logs
from saccade.theory.trained_models import TEXTS


def output_layer(hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the distributions of the next token, ``[contexts, tokens]``, from hidden states and embeddings."""
    return (hidden @ embedding.T).softmax(-1)


def mixture_of_two(hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the mean distributions of two output layers; the second reads each hidden state's entries in reverse."""
    return (output_layer(hidden, embedding) + output_layer(hidden.flip(1), embedding)) / 2


def factors(wanted: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and embeddings of size ``width`` whose products best approximate the centred ln(wanted)."""
    left, values, right = torch.linalg.svd(centred_logs(wanted), full_matrices=False)
    return left[:, :width] * values[:width], right[:width].T


def next_tokens_of_the_decoder() -> Tensor:
    """Return the distributions that the small decoder predicts for 250 contexts, ``[250, 2048]``."""
    model = small_decoder().double()
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.encode("".join(TEXTS)).ids])[:, :250]
    with torch.no_grad():
        return torch.as_tensor(model(tokens)[0]).softmax(-1)


def _rank(distributions: Tensor) -> int:
    return int(torch.linalg.matrix_rank(centred_logs(distributions), rtol=1e-9))


@claim(
    "rank",
    latex=r"\mathrm{rank}\bigl(\log P\,(I-\tfrac1n\mathbf{1}\mathbf{1}^\top)\bigr)\le d",
    source="Yang et al. 2018, arXiv:1711.03953, section 2; for the most likely token Grivas et al. 2022, "
    "arXiv:2203.06462",
    verdict="holds if",
    conditions="the width is at least the rank of the logarithms of the target probabilities, centred row by row, "
    "which may be the number of tokens less one: a smaller width misses some (the softmax bottleneck). Mixtures of "
    "softmaxes escape it. The bottleneck limits distributions, not the most likely token, which can be any of 64 with "
    "a width of 2",
)
def an_output_layer_gives_any_distribution(
    draw: Draw,
    *,
    layer: Callable[[Tensor, Tensor], Tensor] = output_layer,
    factors: Callable[[Tensor, int], tuple[Tensor, Tensor]] = factors,
    mixture: Callable[[Tensor, Tensor], Tensor] = mixture_of_two,
    decoder: Callable[[], Tensor] = next_tokens_of_the_decoder,
) -> Measurements:
    """Softmax over products of a hidden vector with all token vectors can give any distribution of the next token."""
    contexts, tokens, width = 60, 40, 8
    wanted = draw.normal(contexts, tokens).softmax(-1)
    yield same(
        "width 39, 40 tokens: distributions, against 60 random ones", layer(*factors(wanted, tokens - 1)), wanted
    )
    left = centred_logs(layer(*factors(wanted, width))) - centred_logs(wanted)
    yield at_least(
        "width 8: share of the squared logarithms that is missed",
        float(left.norm() / centred_logs(wanted).norm()) ** 2,
        0.4,
    )
    hidden, embedding = draw.normal(contexts, width), draw.normal(tokens, width)
    yield equal("width 8: rank of the centred logarithms", _rank(layer(hidden, embedding)), width)
    yield at_least("a mixture of two, width 8: the same", _rank(mixture(hidden, embedding)), 30)
    angles = torch.arange(64, dtype=torch.float64) * (2 * math.pi / 64)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    most_likely = layer(circle, circle).argmax(-1)
    yield equal("width 2: of 64 tokens, how many are the most likely somewhere", len(most_likely.unique()), 64)
    yield at_most("small decoder, width 160, 250 contexts: rank of the centred logarithms", _rank(decoder()), 160)
