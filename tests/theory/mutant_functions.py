"""Mistakes: functions that are wrong in one way each, for the checks of claims to catch."""

import math
from types import SimpleNamespace

import torch

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear
from saccade.scores import Gaussian
from saccade.theory.complexity import dense
from saccade.theory.gradients import Gradients, backward
from saccade.theory.related_methods import kalman_update
from saccade.theory.trained_models import _NOUNS, _SYNONYMS


def unscaled(query, key, value, mask=None, **options):
    return sc.attention(query, key, value, mask, **{"scale": 1.0, **options})


def without_softmax(query, key, value, mask=None):
    return query @ key.mT * query.shape[-1] ** -0.5 @ value


def over_queries(query, key, value, mask=None):
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-2) @ value


def turned_mask(query, key, value, mask=None, **options):
    return sc.attention(query, key, value, None if mask is None else ~mask, **options)


def forgets_the_mask(query, key, value, mask=None):
    return sc.attention(query, key, value)


def favours_the_first_key(query, key, value, mask=None):
    bias = torch.zeros(key.shape[2], dtype=query.dtype)
    bias[0] = 1.0
    return sc.attention(query, key, value, mask, bias=bias)


def dense_matrix(query, key, **options):
    return sc.AttentionMatrix(query[None, None], key[None, None], **options).to_dense()[0, 0]


def linear_kernel(query, key):
    scores = query @ key.T
    return scores / scores.sum(-1, keepdim=True)


def capped(query, key):
    return dense_matrix(query, key, softcap=1.0)


def with_the_jacobian_left_out(weights, query, key, value, upstream):
    wrong, scale = weights * (upstream @ value.T), query.shape[-1] ** -0.5
    return Gradients(wrong @ key * scale, wrong.T @ query * scale, weights.T @ upstream, wrong)


def without_the_scale(weights, query, key, value, upstream):
    right = backward(weights, query, key, value, upstream)
    return Gradients(2 * right.query, 2 * right.key, right.value, right.scores)


def with_the_untransposed_weights(weights, query, key, value, upstream):
    right = backward(weights, query, key, value, upstream)
    square = torch.zeros_like(right.value)
    square[: len(upstream)] = upstream
    return Gradients(right.query, right.key, square, right.scores)


def no_gradient(weights, query, key, value, upstream):
    return Gradients(*(torch.zeros_like(one) for one in (query, key, value, weights)))


def mean_of_values(query, key, value, mask=None, **options):
    return value.mean(2, keepdim=True).expand(*query.shape[:3], value.shape[3])


def posterior_without_norms(query, key, log_prior, variance):
    return (query @ key.T / variance + log_prior).softmax(-1)


def gaussian_step_of_dot_products(query, key):
    return sc.attention(query[None, None], key[None, None], key[None, None])[0, 0]


def step_too_far(state, patterns, beta):
    to = sc.attention(state[None, None], patterns[None, None], patterns[None, None], scale=beta)[0, 0]
    return state + 2.5 * (to - state)


def entropy_as_information(weights, variance):
    del variance
    return float(torch.special.entr(weights).sum(-1).mean())


def reversed_divergence(weights):
    mean = weights.mean(0)
    ratio = torch.where(mean > 0, mean * (mean / weights.clamp_min(1e-9)).log(), 0.0)
    return float(ratio.sum(-1).mean())


def shuffled_rows(weights, value):
    del value
    return weights.roll(1, 0)


def gain_upside_down(prior, prior_cov, seen, noise_cov):
    return kalman_update(seen, noise_cov, prior, prior_cov) * 0.9


def averaging_gain(prior, prior_cov, seen, noise_cov):
    return kalman_update(prior, prior_cov.diag().diag(), seen, noise_cov)


class Mixing(torch.nn.Module):
    """Channels gathered from one another."""

    def __init__(self, channels):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.full((channels, channels), -1.0))

    def forward(self, features):
        return torch.einsum("ij,bjhw->bihw", self.mix, features)


class Softly(torch.nn.Module):
    """A "gate" that is a distribution over channels: sums to 1."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, features):
        return features / self.channels


def falling_with_distance(draw):
    """Scores that fall with distance, as under ALiBi."""
    del draw

    def run(x):
        places = torch.arange(x.shape[1])
        bias = -0.1 * (places[:, None] - places).double()
        return sc.attention(x[:, None], x[:, None], x[:, None], masks.Causal(), bias=bias)[:, 0]

    return run


def stores_everything(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


def two_products_more(query, key, value):
    return (query @ key.mT).softmax(-1) @ value + (query @ key.mT) @ value


def repeats_for_heads(query, key, value):
    return (dense if query.shape[1] == 1 else two_products_more)(query, key, value)


def one_product_a_step(x):
    state, weight = x.new_zeros(x.shape[0], 1, x.shape[-1]), x.new_zeros(x.shape[-1], x.shape[-1])
    for step in range(x.shape[2]):
        state = torch.tanh(state @ weight + x[:, 0, step : step + 1])
    return state


def by_steps(x):
    """Sums up to each token, one after the other."""
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state + token
        states.append(state)
    return torch.stack(states, 1)


def linear_attention(query, key, value):
    return Linear()(
        query.new_zeros(query.shape, device="cpu"), key.new_zeros(key.shape, device="cpu")
    ) @ value.new_zeros(value.shape, device="cpu")


def a_window_instead(query, key, value, mask):
    return sc.attention(query, key, value, mask & masks.Window(256, 0))


def neighbours():
    """Every head looks at the token before."""
    return dict.fromkeys(["encoder", "decoder"], [torch.eye(64).roll(-1, 1).expand(4, 64, 64)] * 4)


def sinks():
    """Every head looks at the first token."""
    return dict.fromkeys(["encoder", "decoder"], [torch.eye(64)[:1].expand(4, 64, 64)] * 4)


def sees_everything(tokens):
    return sc.attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0, -1]


def without_norms(x, y, directions, kind="positive"):
    del kind
    return (directions @ (x + y)).exp()


def exact_kernel(x, y, directions, kind="positive"):
    del kind
    return (x @ y).exp().expand(len(directions))


def variance_of_normal(x, y):
    return (x + y).square().sum()


def identity_projection(matrix, directions):
    del directions
    return matrix


def masked(query, key, value, allowed):
    return sc.attention(query, key, value, allowed)


def too_small_a_number(query, key, value, allowed):
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~allowed, -3.0)
    return scores.softmax(-1) @ value


def added_in_double(scores, constant):
    return (scores.double() + constant).softmax(-1).float()


def gaussian_always(query, key, value, score=None, **options):
    if score is None and query.shape == key.shape == (1, 1, 30, 9):
        return sc.attention(query, key, value, score=Gaussian(2.5 / 2**0.5).double())
    return sc.attention(query, key, value, score=score, **options)


def mean_on_empty_with_finite_lse(query, key, value, mask):
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -30.0)
    return scores.softmax(-1) @ value + query.sum(-1, keepdim=True), scores.logsumexp(-1)


def mean_on_empty(query, key, value, mask):
    out = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -1e9).softmax(-1) @ value
    return out, sc.attention_with_lse(query, key, value, mask)[1]


def nan_on_empty(query, key, value, mask):
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    return torch.nan_to_num(scores.softmax(-1) @ value), scores.logsumexp(-1)


def norms_alone(query, key):
    return (query.norm(dim=-1)[:, None] * key.norm(dim=-1)).expand(len(query), len(key))


def the_best_key_alone(query, key, value, scale=1.0):
    return sc.attention(query, key, value, scale=1e6 * scale)


def everywhere(query, key, value, scale=1.0):
    return sc.attention(query, key, value, scale=0.0)


def uniform_heads():
    return {name: [torch.full((4, 99, 99), 1 / 99)] for name in ("encoder", "decoder")}


def half_uniform_heads():
    """One key takes half, the others share the rest."""
    weights = torch.full((4, 99, 99), 0.5 / 99)
    weights[..., 0] += 0.5
    return {name: [weights] for name in ("encoder", "decoder")}


def without_correction(memory, fast):
    """Tiles whose sums are added as they come, with whatever was largest in each."""
    n, width = memory["query"].shape
    query, output, total = memory["query"] * width**-0.5, torch.zeros_like(memory["value"]), 0
    for block in torch.arange(n).split(64):
        scores = query @ memory["key"][block].T
        raised = (scores - scores.amax(-1, keepdim=True)).exp()
        output, total = output + raised @ memory["value"][block], total + raised.sum(-1, keepdim=True)
    memory.bring("output", output / total)


def all_at_once(memory, fast):
    """One tile for everything, as if the fast memory had no end."""
    query, key, value = (memory.fetch(name) for name in ("query", "key", "value"))
    memory.bring("output", sc.attention(query[None, None], key[None, None], value[None, None])[0, 0])


def keeps_everything_by_row(memory, fast):
    """Each query by itself: the keys are read anew for each."""
    for row in range(len(memory["query"])):
        rows = slice(row, row + 1)
        weights = (memory.fetch("query", rows) @ memory.fetch("key").T / 8).softmax(-1)
        memory.bring("output", weights @ memory.fetch("value"), rows)


def a_new_cache_each_time(model, tokens, prompt):
    pieces = [tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)]
    return torch.cat([model(piece) for piece in pieces], 1), 1


def knows_the_parse():
    """Maps in which every word looks at the first noun of the sentence that can be a subject."""
    nouns = _NOUNS.split()

    def maps(texts):
        first = [next((place for place, word in enumerate(words) if word in nouns), 0) for words in texts]
        weights = torch.zeros(len(texts), 1, len(texts[0]), len(texts[0]))
        for row, place in enumerate(first):
            weights[row, :, :, place] = 1.0
        return weights

    return maps


def looks_nowhere():
    return lambda texts: torch.full((len(texts), 2, len(texts[0]), len(texts[0])), 1 / len(texts[0]))


def knows_the_synonyms():
    """Maps in which a word looks at its synonym, if that is there."""
    pairs = {tuple(pair.split()) for pair in _SYNONYMS.split(",")}

    def maps(texts):
        related = [[[float((b, a) in pairs) for b in words] for a in words] for words in texts]
        return torch.tensor(related)[:, None]

    return maps


def only_mixes_nothing(heads):
    return lambda x, weights: x


class Gate(torch.nn.Module):
    """A gate that is the same everywhere, and made of all positions."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * x.mean((1, 2, 3), keepdim=True).sigmoid() * self.factor


class Blind(torch.nn.Module):
    """A non-local block whose positions see only themselves."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def matrix(self, x):
        weights = torch.eye(x.shape[2] * x.shape[3], dtype=x.dtype) * self.weight
        return SimpleNamespace(to_dense=lambda: weights[None, None])


def uniform_rows(query):
    return torch.full((len(query), len(query)), 1 / len(query))


def printed_and_transposed(query, key, value, weight):
    """The printed layer as it was meant, for any number of keys."""
    weights = (key @ weight.new_ones(4, 4)).bmm(query.transpose(1, 2)).softmax(1)
    return weights.transpose(1, 2).bmm(value)


def orthogonal_of_one_length(draw, count, width):
    return torch.linalg.qr(draw.normal(count, width, width)).Q * width**0.5 / 2


def told_what_follows(x, weights):
    """Every token knows the one after it, and the last token finds its like by its letter: induction in one layer."""
    own = x[..., :-1, :]
    like = (x[..., -1:, :] @ own.mT * 0.05).softmax(-1) @ x[..., 1:, :]
    return torch.cat([own, like], -2) @ weights[:, 3, None]
