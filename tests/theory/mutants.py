"""Mistakes, each of which must make its claim's check disagree: (claim, what is wrong, the wrong ingredients)."""

import math
from functools import partial

import torch

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear
from saccade.scores import Gaussian
from saccade.theory.complexity import dense
from saccade.theory.gradients import Gradients, backward
from saccade.theory.heads import least_error_of_one_head
from saccade.theory.mixture import posterior
from saccade.theory.paths import convolutions, lstm, recurrent, scanned
from saccade.theory.products import factors_of_logits
from saccade.theory.relatives import kalman_update, precision_weighted
from saccade.theory.softmax import jacobian, jacobian_as_printed, jacobian_of_rows
from saccade.theory.spectrum import moduli
from saccade.theory.universality import built


def unscaled(query, key, value, mask=None, **options):
    return sc.attention(query, key, value, mask, **{"scale": 1.0, **options})


def scaled_by_width_of_model(query, key, value, mask=None, **options):
    return sc.attention(query, key, value, mask, scale=(4 * query.shape[-1]) ** -0.5, **options)


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
    bias = -0.1 * (torch.arange(65)[:, None] - torch.arange(65)).double()
    return lambda x: sc.attention(x[:, None], x[:, None], x[:, None], masks.Causal(), bias=bias)[:, 0]


def windowed(query, key, value):
    return sc.attention(query, key, value, masks.Window(8, 8), impl="tiled")


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
    return dict.fromkeys(["encoder", "decoder"], [torch.eye(64).roll(-1, 1).expand(4, 64, 64)] * 2)


def sinks():
    """Every head looks at the first token."""
    return dict.fromkeys(["encoder", "decoder"], [torch.eye(64)[:1].expand(4, 64, 64)] * 2)


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


MUTANTS = [
    ("variance-of-dot-products", "the means are forgotten", {"formula": lambda q, k, m, n: (q * k.T).sum()}),
    ("variance-of-dot-products", "covariances are added", {"formula": lambda q, k, m, n: q.trace() + k.trace()}),
    ("products-are-zero-on-average", "their sizes", {"products": lambda q, k: (q * k).sum(-1).abs()}),
    ("products-are-zero-on-average", "a mean instead of a sum", {"products": lambda q, k: (q * k).mean(-1)}),
    ("products-are-zero-on-average", "cosines", {"products": lambda q, k: torch.cosine_similarity(q, k, dim=-1)}),
    ("products-are-zero-on-average", "distances", {"products": lambda q, k: -(q - k).square().sum(-1)}),
    ("variance-is-d-k", "it is the root of d", {"variance": math.sqrt}),
    ("variance-is-d-k", "products divided by 8", {"product": lambda q, k: (q * k).sum(-1) / 8}),
    ("variance-is-d-k", "it is twice d", {"variance": lambda d: 2 * d}),
    ("root-scale-standardises", "no scale", {"scale": lambda d: 1.0}),
    ("root-scale-standardises", "divided by d", {"scale": lambda d: 1 / d}),
    ("root-scale-standardises", "divided by the root of d_model", {"scale": lambda d: (8 * d) ** -0.5}),
    ("unscaled-gradients-vanish", "no scale", {"scale": lambda d: 1.0}),
    ("unscaled-gradients-vanish", "scaled after all", {"unscaled": lambda d: d**-0.5}),
    ("unscaled-gradients-vanish", "multiplied by 1,000", {"unscaled": lambda d: 1e3}),
    ("unscaled-gradients-vanish-or-explode", "no scale", {"scale": lambda d: 1.0}),
    ("unscaled-gradients-vanish-or-explode", "scaled after all", {"unscaled": lambda d: d**-0.5}),
    ("entropy-of-normal-scores", "σ instead of its square", {"law": lambda n, sigma: math.log(n) - sigma / 2}),
    ("entropy-of-normal-scores", "scores doubled", {"softmax": lambda s: (2 * s).softmax(-1)}),
    ("entropy-of-normal-scores", "equal weights", {"softmax": lambda s: torch.full_like(s, 1 / s.shape[-1])}),
    ("entropy-of-normal-scores", "twice as steep", {"law": lambda n, sigma: math.log(n) - sigma**2}),
    ("softmax-gives-distributions", "softmax over the wrong axis", {"softmax": lambda s: s.softmax(0)}),
    ("softmax-gives-distributions", "sigmoid", {"softmax": torch.sigmoid}),
    ("softmax-gives-distributions", "exp without a sum", {"softmax": torch.exp}),
    ("softmax-gives-distributions", "all to the largest", {"softmax": lambda s: (s == s.amax(-1, True)).double()}),
    ("softmax-jacobian", "the printed formula", {"jacobian_of_rows": jacobian_as_printed}),
    ("softmax-jacobian", "the sign turned", {"jacobian": lambda p: -jacobian(p)}),
    ("softmax-jacobian", "the diagonal alone", {"jacobian": lambda p: (p * (1 - p)).diag()}),
    ("softmax-jacobian-as-printed", "the right formula", {"printed": jacobian_of_rows}),
    ("softmax-jacobian-as-printed", "β = 2", {"softmax": lambda s: (2 * s).softmax(-1)}),
    ("softmax-is-half-lipschitz", "a smaller bound", {"bound": 0.4}),
    ("softmax-is-half-lipschitz", "a larger bound", {"bound": 1.0}),
    ("softmax-is-half-lipschitz", "a far smaller bound", {"bound": 0.1}),
    ("softmax-is-half-lipschitz", "β = 3", {"softmax": lambda s: (3 * s).softmax(-1)}),
    ("cooling-lowers-entropy", "divided by β", {"cool": torch.div}),
    ("cooling-lowers-entropy", "β is forgotten", {"slope": lambda s, b: -(b * s).softmax(-1) @ s.square()}),
    ("attention-gradients", "dS without D", {"backward": with_the_jacobian_left_out}),
    ("attention-gradients", "a lost scale", {"backward": without_the_scale}),
    ("attention-gradients", "A instead of its transpose", {"backward": with_the_untransposed_weights}),
    ("attention-gradients", "attention without the scale", {"attention": unscaled}),
    ("attention-gradients", "attention without the mask", {"attention": forgets_the_mask}),
    ("score-gradients-sum-to-zero", "dS without D", {"backward": with_the_jacobian_left_out}),
    ("score-gradients-sum-to-zero", "no gradient", {"backward": no_gradient}),
    ("value-jacobian-is-transposed-weights", "factors exchanged", {"kron": lambda a, b: torch.kron(b, a)}),
    ("value-jacobian-is-transposed-weights", "half of it", {"product": lambda a, g: a.T @ g / 2}),
    ("worked-example", "no scale", {"attention": unscaled}),
    ("worked-example", "no softmax", {"attention": without_softmax}),
    ("worked-example", "softmax over the queries", {"attention": over_queries}),
    ("sums-are-matrix-products", "no scale", {"scores": lambda query, x: x @ query}),
    ("sums-are-matrix-products", "a sum without weights", {"output": lambda weights, x: x.sum(0)}),
    ("sums-are-matrix-products", "attention without the scale", {"attention": unscaled}),
    ("linear-in-the-values", "values enter squared", {"attention": lambda q, k, v: sc.attention(q, k, v**2)}),
    ("linear-in-the-values", "no scale", {"attention": unscaled}),
    ("linear-in-the-values", "the mean of the values", {"attention": mean_of_values}),
    ("linear-in-the-values", "queries of 0", {"matrix": lambda q, k: sc.AttentionMatrix(0 * q, k)}),
    ("any-weighted-average", "uniform weights", {"average": lambda x: torch.full_like(x, 1 / len(x))}),
    ("any-weighted-average", "one direction too many", {"factors": lambda p, d: factors_of_logits(p, d + 1)}),
    ("any-weighted-average", "logits not centred in the root", {"factors": lambda p, d: (p[:, :d], p[:, :d])}),
    (
        "any-weighted-average",
        "the scale is forgotten",
        {"factors": lambda p, d: tuple(x / d**0.25 for x in factors_of_logits(p, d))},
    ),
    ("convex-combination", "no softmax", {"attention": without_softmax}),
    ("convex-combination", "softmax over the queries", {"attention": over_queries}),
    ("convex-combination", "the mask is turned", {"attention": turned_mask}),
    (
        "convex-combination",
        "always causal",
        {"attention": lambda q, k, v, m=None: sc.attention(q, k, v, masks.Causal())},
    ),
    ("convex-combination", "nothing", {"attention": lambda q, k, v, m=None: torch.zeros_like(v)}),
    ("uniform-weights-are-mean-pooling", "the mask is forgotten", {"mask": None}),
    ("uniform-weights-are-mean-pooling", "the first key is favoured", {"attention": favours_the_first_key}),
    ("dropout-keeps-distributions", "no dropout", {"dropout_p": 0.0}),
    ("dropout-keeps-distributions", "not scaled", {"drop": lambda a, v, **k: a.matmul(v, **k) / 2}),
    ("permutation-equivariance", "a causal mask", {"mask": masks.Causal()}),
    ("permutation-equivariance", "the mean of the values", {"attention": mean_of_values}),
    ("permutation-equivariance", "a window", {"mask": masks.Window(2, 2)}),
    ("key-order-does-not-matter", "the first key is favoured", {"attention": favours_the_first_key}),
    ("key-order-does-not-matter", "a causal mask", {"attention": partial(sc.attention, mask=masks.Causal())}),
    ("attention-has-low-rank", "no softmax", {"weights": linear_kernel}),
    ("attention-is-approximately-low-rank", "heads that look at a neighbour", {"heads": neighbours}),
    ("attention-is-approximately-low-rank", "every token itself", {"weights": lambda q, k: torch.eye(96)}),
    ("attention-is-approximately-low-rank", "heads that look at a sink", {"heads": sinks}),
    ("logits-have-low-rank", "a softcap", {"weights": capped}),
    (
        "causal-attention-is-invertible",
        "a strictly causal mask",
        {"weights": lambda q, k: sc.AttentionMatrix(q, k, masks.Causal() & ~masks.Window(0, 0)).to_dense()},
    ),
    ("causal-attention-is-invertible", "no mask", {"weights": lambda q, k: sc.AttentionMatrix(q, k).to_dense()}),
    ("stacks-collapse", "with skip connections", {"skip": 1.0}),
    ("stacks-collapse", "without skip connections", {"kept_by": 0.0}),
    ("largest-eigenvalue-is-one", "sigmoid weights", {"weights": lambda draw, n: draw.normal(n, n).sigmoid()}),
    (
        "largest-eigenvalue-is-one",
        "softmax over the queries",
        {"weights": lambda draw, n: draw.normal(n, n).softmax(0)},
    ),
    ("largest-eigenvalue-is-one", "a hundred times the values", {"spectrum": lambda a: 100 * moduli(a)}),
    ("eigenvalues-show-concentration", "no eigenvalues", {"spectrum": lambda a: torch.zeros(len(a)).double()}),
    ("eigenvalues-show-concentration", "singular values", {"spectrum": torch.linalg.svdvals}),
    ("causal-eigenvalues-are-the-diagonal", "no mask", {"mask": None}),
    ("singular-values-show-sinks", "half of it", {"largest": lambda a: torch.linalg.svdvals(a)[0] / 2}),
    ("singular-values-show-sinks", "n times it", {"largest": lambda a: len(a) * torch.linalg.svdvals(a)[0]}),
    ("singular-values-show-sinks", "eigenvalues", {"largest": lambda a: torch.linalg.eigvals(a).abs().max()}),
    ("weights-are-a-posterior", "key norms are forgotten", {"posterior": posterior_without_norms}),
    ("weights-are-a-posterior", "no prior", {"posterior": lambda q, k, p, v: posterior(q, k, 0 * p, 2 * v)}),
    ("weighted-sum-is-an-m-step", "attention itself", {"m_step": lambda weights, data: weights @ data}),
    ("weighted-sum-is-an-m-step", "columns that sum to 1", {"weights": lambda q, k: torch.eye(len(k)).double()}),
    ("weighted-sum-is-an-m-step", "dot products", {"move": gaussian_step_of_dot_products}),
    ("weighted-sum-is-an-m-step", "a step away", {"move": lambda q, k: 3 * q}),
    ("mean-shift-climbs", "no step", {"step": lambda q, k: q}),
    ("mean-shift-climbs", "dot products", {"step": gaussian_step_of_dot_products}),
    ("hopfield-energy-falls", "too long a step", {"step": step_too_far}),
    ("sparse-weights-bound-information", "entropy as information", {"information": entropy_as_information}),
    ("sparse-weights-bound-information", "every token is seen", {"fixed": sees_everything}),
    ("sparse-weights-bound-information", "always the last token", {"chosen": lambda tokens: tokens[:, -1]}),
    ("position-information", "a number for all", {"divergence": lambda weights: 5.0}),
    ("position-information", "the divergence turned round", {"divergence": reversed_divergence}),
    ("weights-explain-the-output", "other rows", {"other": shuffled_rows}),
    ("weights-explain-the-output", "the same weights", {"other": lambda weights, value: weights}),
    ("weights-explain-the-output", "a weight too much", {"other": lambda weights, value: weights + 0.01}),
    ("weights-explain-the-output", "weights below 0", {"other": lambda weights, value: 2 * weights - 1 / 40}),
    ("weights-explain-the-output", "the scale is forgotten", {"attend": unscaled}),
    ("squeeze-and-excitation-is-attention", "gates that sum to 1", {"gate": Softly}),
    ("squeeze-and-excitation-is-attention", "no gate", {"gate": lambda channels: torch.nn.Identity()}),
    ("squeeze-and-excitation-is-attention", "channels that mix", {"gate": Mixing}),
    ("non-local-means-is-attention", "norms wherever", {"attend": gaussian_always}),
    ("non-local-means-is-attention", "no norms", {"attend": lambda q, k, v, **o: sc.attention(q, k, v)}),
    (
        "non-local-means-is-attention",
        "another bandwidth",
        {"attend": lambda q, k, v, score=None, **o: sc.attention(q, k, v, score=score and Gaussian(2.5).double(), **o)},
    ),
    ("kalman-update-is-attention", "prediction and observation exchanged", {"update": gain_upside_down}),
    ("kalman-update-is-attention", "correlations are left out", {"update": averaging_gain}),
    ("kalman-update-is-attention", "weights by variance", {"attend": lambda p, s, v: precision_weighted(p, s, 1 / v)}),
    ("kalman-update-is-attention", "the update itself", {"alone": lambda q, k, v: q, "update": lambda p, a, s, b: p}),
    ("two-heads-do-what-one-cannot", "nothing is left", {"residual": lambda a, b: 0.0}),
    ("two-heads-do-what-one-cannot", "weights below 0", {"floor": lambda: least_error_of_one_head((-3.0, 3.0))}),
    ("two-heads-do-what-one-cannot", "heads that see themselves", {"several": forgets_the_mask}),
    ("heads-cost-what-one-costs", "products counted twice", {"attend": two_products_more}),
    ("heads-cost-what-one-costs", "products that several heads repeat", {"attend": repeats_for_heads}),
    ("distance-does-not-matter", "scores that fall with distance", {"layer": falling_with_distance}),
    ("distance-does-not-matter", "the first token", {"layer": lambda draw: lambda x: x[:, :1].expand_as(x)}),
    ("distance-does-not-matter", "convolutions", {"layer": lambda draw: convolutions(draw, 4)}),
    ("distance-does-not-matter", "an LSTM", {"layer": lstm}),
    (
        "recurrent-influence-fades",
        "open forget gates",
        {"network": lambda draw, forget_bias=0.0: lstm(draw, 6.0)},
    ),
    (
        "recurrent-influence-fades",
        "forget gates that stay closed",
        {"network": lambda draw, forget_bias=0.0: lstm(draw, -6.0)},
    ),
    (
        "convolutions-are-local",
        "wider kernels",
        {"network": lambda draw, layers: convolutions(draw, layers, kernel_size=5)},
    ),
    (
        "recurrent-gradients-explode",
        "a gain of 1 always",
        {"network": lambda draw, gain, activation=torch.relu: recurrent(draw, 1.0, activation)},
    ),
    (
        "recurrent-gradients-explode",
        "no saturation",
        {"network": lambda draw, gain, activation=None: recurrent(draw, gain)},
    ),
    ("recurrences-are-sequential", "in rounds", {"recurrence": lambda x: scanned(x)[..., -1:, :]}),
    ("recurrences-are-sequential", "attention by steps", {"attend": lambda q, k, v: by_steps(v)}),
    ("recurrences-are-sequential", "convolutions by steps", {"convolve": by_steps}),
    ("recurrences-are-sequential", "a scan by steps", {"scan": by_steps}),
    ("operations-are-quadratic", "a product too many", {"attend": two_products_more}),
    ("operations-are-quadratic", "linear attention", {"attend": linear_attention}),
    ("standard-attention-is-linear", "linear attention", {"attend": linear_attention}),
    ("standard-attention-is-linear", "no window", {"near": masks.Full()}),
    (
        "standard-attention-is-linear",
        "softmax attention",
        {"other": lambda: lambda query, key: (query @ key.mT).softmax(-1)},
    ),
    ("memory-is-quadratic", "weights are stored", {"attend": stores_everything}),
    ("memory-is-quadratic", "nothing is stored", {"stores": sc.attention}),
    ("a-hundred-thousand-tokens-are-infeasible", "all weights are made", {"largest": lambda run: run() or 4 * 10**10}),
    ("a-hundred-thousand-tokens-are-infeasible", "a window", {"attend": a_window_instead}),
    ("recurrence-is-cheaper-for-long-sequences", "one product a step", {"step": one_product_a_step}),
    ("recurrence-is-cheaper-for-long-sequences", "attention as a recurrence", {"step": lambda x: dense(x, x, x)}),
    ("recurrence-is-cheaper-for-long-sequences", "no projections", {"layer": lambda x: dense(x, x, x)}),
    ("bigbird-has-what-the-theorem-needs", "no global token", {"pattern": lambda seed: masks.Window(8, 8)}),
    (
        "bigbird-has-what-the-theorem-needs",
        "a global token that sees, and is not seen",
        {"pattern": lambda seed: masks.Window(4, 4) | masks.Global([0], seen=False)},
    ),
    ("bigbird-has-what-the-theorem-needs", "all pairs", {"pattern": lambda seed: masks.Full()}),
    ("windows-and-random-keys-suffice", "one layer joins all", {"layers": lambda allowed: 1}),
    (
        "windows-and-random-keys-suffice",
        "with a global token",
        {"pattern": lambda seed: masks.Window(4, 4) | masks.Global([0])},
    ),
    ("features-estimate-the-kernel", "norms are left out", {"samples": without_norms}),
    ("performer-attention-is-unbiased", "the exact kernel", {"samples": exact_kernel}),
    ("how-many-features", "the norm itself", {"variance": variance_of_normal}),
    ("positive-features-are-always-better", "no variance", {"positive": lambda x, y: torch.zeros(())}),
    ("positive-features-are-always-better", "the same for all", {"trigonometric": lambda x, y: torch.ones(())}),
    ("positive-features-are-always-better", "no variance at x = -y", {"trigonometric": lambda x, y: torch.zeros(())}),
    ("attention-is-low-rank-by-projection", "no projection", {"project": identity_projection}),
    (
        "linformer-is-exact-by-construction",
        "as many slots as keys, and no projection",
        {"projections": lambda directions, delta: (torch.eye(128).double(), torch.eye(128).double())},
    ),
    ("a-large-negative-number-masks", "a mask", {"masked": masked}),
    ("a-large-negative-number-masks", "a constant that float16 has", {"constant": -1.0}),
    ("a-large-negative-number-masks", "a far higher cap", {"cap": 1e3}),
    ("a-large-negative-number-masks", "a small number", {"masked": too_small_a_number}),
    ("an-added-number-masks", "a hundred thousandth of it", {"added": lambda s, c: (s + 1e-9 * c).softmax(-1)}),
    ("an-added-number-masks", "all alike", {"added": lambda s, c: torch.full_like(s, 1 / len(s))}),
    ("an-added-number-masks", "in float64", {"added": added_in_double}),
    ("empty-rows-give-nothing", "the mean of the values", {"attend": mean_on_empty_with_finite_lse}),
    ("empty-rows-give-nothing", "-1e9", {"attend": mean_on_empty}),
    ("empty-rows-give-nothing", "NaN made 0 afterwards", {"attend": nan_on_empty}),
    *(
        ("a-fixed-state-limits-what-is-remembered", f"{part}: {mistake}", {part: recall})
        for part in ("best", "delta", "linear", "attend")
        for mistake, recall in (
            ("every pair is kept", lambda key, value: value),
            ("the mean of the values", lambda key, value: value.mean(0).expand_as(value)),
        )
        if (part, mistake) != ("attend", "every pair is kept")  # which is no mistake there
    ),
    ("dot-products-show-similarity", "distances", {"score": lambda q, k: -torch.cdist(q, k)}),
    ("dot-products-show-similarity", "the sign is turned", {"score": lambda q, k: -q @ k.T}),
    ("dot-products-show-similarity", "the norms alone", {"score": norms_alone}),
    ("dot-products-show-similarity", "both ways at once", {"score": lambda q, k: q @ k.T + k @ q.T}),
    ("attention-is-an-information-bottleneck", "the largest score alone", {"attend": the_best_key_alone}),
    ("attention-is-an-information-bottleneck", "the last coin", {"attend": lambda q, k, v, **o: v[:, :, -1:]}),
    ("attention-is-an-information-bottleneck", "the mean", {"attend": lambda q, k, v, **o: v.mean(2, True)}),
    ("attention-is-an-information-bottleneck", "the target is counted twice", {"terms": lambda z, y: (0.0, 2.0)}),
    ("linformer-costs-n-k", "all pairs", {"count": lambda n, k, d: 4 * n * n * d}),
    ("linformer-costs-n-k", "without the projections", {"count": lambda n, k, d: 4 * n * k * d}),
    ("linformer-costs-n-k", "k and d squared", {"count": lambda n, k, d: n * k**2 * d**2}),
    ("performer-costs-n-d", "all pairs", {"count": lambda n, m, d: 4 * n * n * d}),
    ("performer-costs-n-d", "features for nothing", {"count": lambda n, m, d: n * d}),
    ("performer-costs-n-d", "features and width squared", {"count": lambda n, m, d: n * m**2 * d**2}),
    ("transformers-are-universal", "heads that look everywhere", {"layer": partial(built, attend=everywhere)}),
    ("transformers-are-universal", "a table of everything", {"left": lambda wanted, *seen: 0.0}),
    ("transformers-are-universal", "nothing is told apart", {"left": lambda wanted, *seen: 1.0}),
]
