"""Mistakes in what tests details of tutorials: heads, layers, patterns, printed code and scales, as in `mutants`."""

import torch
from tests.theory.mutant_functions import (
    favours_the_first_key,
    mean_of_values,
    too_small_a_number,
    uniform_rows,
    unscaled,
    without_softmax,
)

from saccade import masks
from saccade.theory.capacity import recalled_by_one_number
from saccade.theory.complexity import operations_of_a_mask
from saccade.theory.features import kernel_by_features
from saccade.theory.information import without_token
from saccade.theory.layer_definitions import heads_by_definition, layer_of
from saccade.theory.masking import filled
from saccade.theory.memory_traffic import stored
from saccade.theory.paths import attending
from saccade.theory.rank import weights_of
from saccade.theory.similarity import weights_as_printed
from saccade.theory.trained_layers import attentive


class Halved:
    """A layer that forgets the second half of its tokens."""

    def __init__(self, weights):
        self.layer = layer_of(weights)

    def __call__(self, x):
        return self.layer(x)

    def with_weights(self, x):
        output, weights = self.layer.with_weights(x)
        return output[:, ::2], weights[:, :, ::2]


class Alone(torch.nn.Module):
    """A decoder layer that does not look at the output of an encoder."""

    def __init__(self, width):
        super().__init__()
        self.map = torch.nn.Linear(width, width)

    def forward(self, x, memory, tgt_mask):
        return self.map(x)


def norm_first(layer, x, causal):
    normed = layer.norm1(x)
    x = x + layer.self_attn(normed, normed, normed, attn_mask=causal, need_weights=False)[0]
    return x + layer.linear2(torch.relu(layer.linear1(layer.norm2(x))))


def everything_in_the_first(x, weights):
    return heads_by_definition(x, weights).flip(0).cumsum(0).flip(0)


def the_first_head_alone(x, weights):
    first = heads_by_definition(x, weights)[:1]
    return first.expand(len(weights[0]), *first.shape[1:])


def first_head_repeated(query, key, value, output, x, wanted):
    return [one[:1].expand(one.shape) for one in (query, key, value, output)]


def a_new_start(query, key, value, output, x, wanted):
    return [one + torch.arange(2.0)[:, None, None] for one in (query, key, value, output)]


def the_first_half_twice(tokens):
    return tokens[:, None, :, :4].expand(-1, 2, -1, -1)


MUTANTS_OF_TUTORIALS = [
    ("weights-explain-the-output", "the weights as effects", {"removed": lambda attend, q, k, v: weights_of(q, k)}),
    ("weights-explain-the-output", "effects turned", {"removed": lambda *given: -without_token(*given)}),
    ("weights-explain-the-output", "equal weights", {"found": lambda o, v: torch.full((len(o), len(v)), 1 / len(v))}),
    ("random-features-approximate-attention", "the exact kernel", {"kernel": lambda q, k, w: (q @ k.T).exp()}),
    ("random-features-approximate-attention", "keys turned", {"kernel": lambda q, k, w: kernel_by_features(q, -k, w)}),
    ("largest-eigenvalue-is-one", "one text", {"packed": None}),
    ("attention-has-low-rank", "softmax of the scores", {"scores": weights_of}),
    ("transformers-are-universal", "the count itself", {"parity": lambda bits: bits.sum(1)}),
    (
        "a-fixed-state-limits-what-is-remembered",
        "a base that is too small",
        {"exact": lambda keys, values, base: recalled_by_one_number(keys, values, base // 2)},
    ),
    ("dot-products-show-similarity", "keys doubled", {"printed": lambda q, k, w: weights_as_printed(q, 2 * k, w)}),
    ("cross-attention-aligns-codes", "codes as they are", {"maps": lambda a, b: (torch.eye(16).double(),) * 2}),
    ("cross-attention-aligns-codes", "no softmax", {"weights": lambda q, k: torch.ones(len(q), len(k)).double()}),
    (
        "two-heads-do-what-one-cannot",
        "features mixed",
        {"split": lambda tokens: (tokens + tokens.flip(-1)).unflatten(-1, (2, -1)).transpose(1, 2)},
    ),
    ("two-heads-do-what-one-cannot", "the same half", {"split": the_first_half_twice}),
    ("a-head-has-one-pattern", "equal weights", {"weights": lambda q, k: uniform_rows(q)}),
    ("a-head-has-one-pattern", "sigmoid", {"weights": lambda q, k: (q @ k.T).sigmoid()}),
    ("each-head-learns-another-subspace", "the first head for both", {"train": first_head_repeated}),
    ("each-head-learns-another-subspace", "another start", {"train": a_new_start}),
    ("one-projection-makes-all-heads", "queries of other heads", {"layer": lambda w: layer_of((w[0].flip(0), *w[1:]))}),
    ("one-projection-makes-all-heads", "half of the tokens", {"layer": Halved}),
    ("one-projection-makes-all-heads", "one head reads all", {"heads": everything_in_the_first}),
    ("one-projection-makes-all-heads", "one head for all", {"heads": the_first_head_alone}),
    ("one-projection-makes-all-heads", "nothing follows", {"after": lambda output, x: output}),
    ("a-decoder-layer-has-two-parts", "the norm first", {"parts": norm_first}),
    ("a-decoder-layer-has-two-parts", "no encoder", {"whole": Alone}),
    ("sparse-attention-is-cheaper", "all pairs", {"masked": lambda mask, n: operations_of_a_mask(masks.Full(), n)}),
    ("sparse-attention-is-cheaper", "one pair a query", {"masked": lambda mask, n: n}),
    ("sparse-attention-is-cheaper", "the best keys for nothing", {"best": lambda keys, n: keys * n}),
    ("a-hundred-thousand-tokens-are-infeasible", "queries alone", {"scores": lambda q, k: q}),
    ("a-large-negative-number-masks", "a number for -inf", {"infinite": filled}),
    ("a-large-negative-number-masks", "a small number for -inf", {"infinite": too_small_a_number}),
    ("masks-hide-the-future-and-padding", "the right axis", {"wrong_axis": filled}),
    (
        "permutation-equivariance",
        "no softmax",
        {"attention": lambda q, k, v, mask=None, **options: without_softmax(q, k, v)},
    ),
    ("attention-improves-on-mean-pooling", "the mean", {"attention": mean_of_values}),
    ("attention-improves-on-mean-pooling", "the sum", {"pooled": lambda value: value.sum(2, keepdim=True)}),
    ("tiling-moves-fewer-numbers", "stored after all", {"tiles": stored}),
    ("attention-gradients", "softmax after all", {"hard": lambda q, k, v: (q @ k.T).softmax(-1) @ v}),
    ("attention-gradients", "values for nothing", {"hard": lambda q, k, v: 0 * v[: len(q)]}),
    (
        "any-weighted-average",
        "the first key is favoured",
        {
            "of": lambda q, k: favours_the_first_key(
                q[None, None], k[None, None], torch.eye(len(k)).double()[None, None]
            )[0, 0]
        },
    ),
    ("what-is-needed-must-be-attended-to", "nothing is hidden", {"layer": lambda draw, mask: attending(draw, None)}),
    ("what-is-needed-must-be-attended-to", "tokens alone", {"layer": lambda draw, mask: lambda x: 2 * x}),
    ("scaling-is-necessary", "a scale of 1", {"attend": unscaled}),
    ("scaling-is-necessary", "never scaled", {"layer": lambda scale: attentive(1, 1.0)}),
    ("scaling-is-necessary", "always scaled", {"layer": lambda scale: attentive(1)}),
    ("scaling-is-necessary", "the same start", {"start": 1.0}),
]
