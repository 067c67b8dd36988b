"""Mistakes in claims that the literature on transformers proves or reports, as in `mutants`."""

import torch

from saccade.theory.bottleneck import factors, mixture_of_two, output_layer
from saccade.theory.cause_of_sinks import sigmoid, softmax, with_sink_logit
from saccade.theory.clustering import flow
from saccade.theory.linear import by_recurrence, softmax_weights, with_softmax, without_softmax
from saccade.theory.lipschitz import by_distances, self_attention
from saccade.theory.polynomials import by_features
from saccade.theory.positions import rotary_products, share_of_the_first, stack
from saccade.theory.sharpness import logarithmic


def with_positions(tokens, maps, mask):
    return stack(tokens + 0.1 * torch.arange(len(tokens))[:, None], maps, mask)


def without_rotation(query, key, distances):
    return (query * key).sum(-1, keepdim=True).expand(-1, len(distances))


def falling(query, key, distances):
    return rotary_products(query, key, distances) * 0.98**distances


def exactly(query, key, value, degree):
    return (query @ key.T).softmax(-1) @ value


def one_channel(hidden, embedding):
    return output_layer(hidden[:, :1], embedding[:, :1])


MUTANTS_OF_RESULTS = [
    ("softmax-stays-sharp", "the bound of equal scores", {"bound": lambda n, c: 1 / n}),
    ("softmax-stays-sharp", "equal weights", {"softmax": lambda s: torch.full_like(s, 1 / s.shape[-1])}),
    ("softmax-stays-sharp", "scores of 0 when tested", {"unchanged": lambda n: 0.0}),
    ("softmax-stays-sharp", "scores that grow", {"unchanged": logarithmic}),
    ("softmax-stays-sharp", "scores that do not grow", {"factor": lambda n: 1.0}),
    ("self-attention-is-lipschitz", "scores by distances", {"layer": by_distances}),
    ("self-attention-is-lipschitz", "a hundred times the output", {"layer": lambda x: 100 * self_attention(x)}),
    ("self-attention-is-lipschitz", "dot products after all", {"bounded": self_attention}),
    ("a-causal-mask-tells-positions", "no mask", {"share": lambda n, mask: share_of_the_first(n, None)}),
    ("a-causal-mask-tells-positions", "no mask in the layers", {"stack": lambda x, maps, mask: stack(x, maps, None)}),
    ("a-causal-mask-tells-positions", "positions", {"stack": with_positions}),
    ("rotary-scores-fall-with-distance", "no rotation", {"scores": without_rotation}),
    ("rotary-scores-fall-with-distance", "a factor that falls", {"scores": falling}),
    ("rotary-scores-fall-with-distance", "twice", {"scores": lambda q, k, d: 2 * rotary_products(q, k, d)}),
    ("rotary-scores-fall-with-distance", "a bound that stays", {"bound": lambda width, n: torch.ones(n)}),
    ("tokens-cluster", "values that repel", {"flow": lambda x, n, beta, sign=1.0: flow(x, n, beta, -1.0)}),
    ("tokens-cluster", "nothing moves", {"flow": lambda x, *options: x}),
    ("tokens-cluster", "one cluster", {"clusters": lambda x: torch.ones(len(x), len(x), dtype=torch.bool)}),
    ("tokens-cluster", "a cluster for each", {"clusters": lambda x: torch.eye(len(x), dtype=torch.bool)}),
    ("tokens-cluster", "values that attract after all", {"sign": 1.0}),
    ("an-output-layer-gives-any-distribution", "half the logits", {"layer": lambda h, e: output_layer(h / 2, e)}),
    ("an-output-layer-gives-any-distribution", "a wide layer", {"factors": lambda wanted, width: factors(wanted, 39)}),
    ("an-output-layer-gives-any-distribution", "a mixture", {"layer": mixture_of_two}),
    ("an-output-layer-gives-any-distribution", "no mixture", {"mixture": output_layer}),
    ("an-output-layer-gives-any-distribution", "one channel", {"layer": one_channel}),
    (
        "an-output-layer-gives-any-distribution",
        "random distributions",
        {"decoder": lambda: torch.randn(250, 300, generator=torch.Generator().manual_seed(0)).double().softmax(-1)},
    ),
    ("bounded-entries-make-attention-cheap", "exact attention", {"features": exactly}),
    ("bounded-entries-make-attention-cheap", "degree 1", {"features": lambda q, k, v, g: by_features(q, k, v, 1)}),
    ("bounded-entries-make-attention-cheap", "full rank", {"rank": len}),
    ("bounded-entries-make-attention-cheap", "rank 5", {"rank": lambda matrix: 5}),
    ("attention-descends-gradients-in-context", "softmax", {"attend": with_softmax}),
    ("attention-descends-gradients-in-context", "no softmax after all", {"soft": without_softmax}),
    (
        "attention-descends-gradients-in-context",
        "large scores",
        {"soft": lambda q, k, v: with_softmax(1e4 * q, k, v)},
    ),
    ("state-spaces-are-attention", "no decay", {"matrix": lambda read, written, decay: (read @ written.T).tril()}),
    (
        "state-spaces-are-attention",
        "softmax",
        {"recurrence": lambda read, written, decay, value: softmax_weights(read, written) @ value},
    ),
    (
        "state-spaces-are-attention",
        "the mean of the decays",
        {"recurrence": lambda read, written, decay, value: by_recurrence(read, written, decay.mean(1, True), value)},
    ),
    ("state-spaces-are-attention", "linear attention", {"weights": lambda q, k: (q @ k.T).tril()}),
    ("sinks-come-of-having-to-sum-to-one", "sigmoid", {"weigh": sigmoid}),
    ("sinks-come-of-having-to-sum-to-one", "idle after all", {"busy": False}),
    ("sinks-come-of-having-to-sum-to-one", "softmax in its place", {"free": softmax}),
    ("sinks-come-of-having-to-sum-to-one", "no sink logit", {"logit": lambda s, number, start: softmax(s, number)}),
    (
        "sinks-come-of-having-to-sum-to-one",
        "always from 5",
        {"logit": lambda s, number, start: with_sink_logit(s, number, 5.0)},
    ),
]
