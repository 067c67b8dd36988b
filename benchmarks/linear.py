"""Speed of causal linear attention beside performer-pytorch's causal loop, and its growth with the length."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare, in_turn, slope
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration, ratio_row
from saccade.masks import Causal
from saccade.mechanisms import Linear, Performer

N, HEADS, DIM, FEATURES = 8192, 8, 64, 256
TARGETS = {"linear": 40.0, "performer": 15.0}
SIZES = tuple(1 << power for power in range(12, 19, 2))
LONGEST, MOST_SLOPE, MOST_MEMORY = 1_000_000, 1.05, 1.25
TITLE = f"causal linear attention, n={N}, {HEADS} heads of {DIM}, {FEATURES} features, float32"
TITLE_ZH = f"因果线性注意力，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，{FEATURES} 个特征，float32"


def published_loop(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run the loop of performer-pytorch 1.1.4 without CUDA: 128 pieces, each with a state for every token."""
    keys, state = a.new_zeros(*a.shape[:2], 1, a.shape[3]), a.new_zeros(*a.shape[:2], 1, a.shape[3], c.shape[3])
    out = []
    for q, k, v in zip(*(x.chunk(128, 2) for x in (a, b, c)), strict=True):
        seen = keys + k.cumsum(2)
        states = state + torch.einsum("...nd,...ne->...nde", k, v).cumsum(2)
        total = torch.einsum("...nd,...nd->...n", q, seen + 1e-6)
        out.append(torch.einsum("...nde,...nd,...n->...ne", states, q, 1 / total))
        keys, state = seen[:, :, -1:], states[:, :, -1:]
    return torch.cat(out, 2)


def package() -> Any:
    """Return performer-pytorch's module, or None if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its imports use what later versions of torch deprecate
            return importlib.import_module("performer_pytorch.performer_pytorch")
    except ImportError:
        return None


def their_loop() -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the function of the installed package, or the same loop written here."""
    found = package()
    if found is None:
        return "its loop, written here", published_loop
    return "performer-pytorch", found.causal_linear_attention_noncuda


class Case:
    """The inputs, and the random directions that both Performers use."""

    def __init__(self, n: int = N):
        torch.manual_seed(0)
        self.query, self.key, self.value = (torch.randn(1, HEADS, n, DIM) / 2 for _ in range(3))
        self.performer = Performer(FEATURES)
        self.projection = self.performer.projection(DIM).float()
        # Scaled, so that the 1e-6 which their loop adds to each sum does not show.
        self.features = tuple(1e6 * self._features(x) for x in (self.query, self.key))

    def linear(self) -> Tensor:
        """Run our linear attention with precomputed features."""
        made = iter(self.features)
        return Linear(lambda _: next(made))(self.query, self.key, mask=Causal()) @ self.value

    def performed(self, mask: Causal | None = None) -> Tensor:
        """Run our Performer, features included."""
        return self.performer(self.query, self.key, mask=mask) @ self.value

    def their_performed(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], factor: float = 1.0) -> Tensor:
        """Run their Performer, with the package's features if installed, without the 1e-4 that it adds to each."""
        found = package()
        if found is None:
            return product(*(factor * self._features(x) for x in (self.query, self.key)), self.value)
        made = functools.partial(found.softmax_kernel, projection_matrix=self.projection, eps=0.0)
        query, key = made(self.query, is_query=True), made(self.key, is_query=False)
        return product(factor * query, factor * key, self.value)

    def _features(self, x: Tensor) -> Tensor:
        x = x * DIM**-0.25
        seen = x @ self.projection.mT
        half = (x**2).sum(-1, keepdim=True) / 2
        return torch.exp(seen - half - seen.amax((-1, -2), keepdim=True)) * FEATURES**-0.5


def check(its: Case) -> None:
    """Check that all sums agree."""
    loop = their_loop()[1]
    assert_agree(its.linear(), published_loop(*its.features, its.value))
    assert_agree(its.linear(), loop(*its.features, its.value))
    assert_agree(its.performed(Causal()), published_loop(*its.features, its.value))
    assert_agree(its.performed(Causal()), its.their_performed(loop, 1e6))
    if package() is not None:
        assert_agree(its.performed(), its.their_performed(package().linear_attention))


def million(n: int = LONGEST) -> Call:
    """Return a run of one head over a million tokens for `extra_bytes`, after a first run."""
    run_one(1024)()
    return run_one(n)


def run_one(n: int) -> Call:
    """Run one head with elu features."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, DIM) for _ in range(3))
    return functools.partial(_product, query, key, value)


def _product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return Linear()(query, key, mask=Causal()) @ value


def declared(n: int) -> int:
    """Return the bytes of two features and the output."""
    return 4 * n * 3 * DIM


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check(Case(256))
    its, (peer, loop) = Case(), their_loop()
    pair = compare(its.linear, lambda: loop(*its.features, its.value), rounds=3, referee=referee)
    yield ratio_row("causal sums", pair, peer=peer, target=TARGETS["linear"])
    pair = compare(lambda: its.performed(Causal()), lambda: its.their_performed(loop), rounds=3, referee=referee)
    yield ratio_row("causal Performer, features included", pair, peer=peer, target=TARGETS["performer"])
    if package() is not None:
        product = package().linear_attention
        pair = compare(its.performed, lambda: its.their_performed(product), rounds=5, referee=referee)
        yield ratio_row("Performer without a mask, features included", pair, peer=peer)
    rounds = in_turn([run_one(n) for n in SIZES], rounds=3, referee=referee)
    times = [rounds.median(i) for i in range(len(SIZES))]
    grown = slope(SIZES, times)
    yield Row(
        f"slope of time, {SIZES[0]} to {SIZES[-1]} tokens, one head",
        f"{grown:.2f}: {duration(times[0])} to {duration(times[-1])}",
        f"at most {MOST_SLOPE}",
        grown <= MOST_SLOPE,
        {"slope": grown},
        rounds.rate,
        rounds.quiet,
    )
    (extra,) = extra_bytes([Job("benchmarks.linear:million")])
    share = extra / declared(LONGEST)
    yield Row(
        f"memory at n={LONGEST:,}, one head",
        f"{extra / 2**20:.0f} MiB, {share:.2f} of what is declared",
        f"at most {MOST_MEMORY}",
        share <= MOST_MEMORY,
        {"bytes": extra},
    )
