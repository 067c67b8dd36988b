"""Four threads at once: first use in a fresh process, and plans, matrices, layers, caches and recordings they share."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.caches.cache_kinds import KINDS
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.masks import plan_cache

THREADS, TURNS = 4, 5
MASK = masks.Causal() & (masks.Window(6, 0) | masks.Global([0]))


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``work(0)`` to ``work(3)``, each computed in its own thread; all of them start together."""
    together, results, errors = threading.Barrier(THREADS), [None] * THREADS, []

    def run(number: int) -> None:
        try:
            together.wait()
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def check(work: Callable[[int], Any]) -> None:
    """Compare the results of four threads at once with those of one thread after another."""
    torch.testing.assert_close(at_once(work), [work(number) for number in range(THREADS)])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FIRST_USE = """
import sys, threading
import torch
sys.setswitchinterval(1e-6)
together, errors, found = threading.Barrier(4), [], []

def run(number):
    try:
        generator = torch.Generator().manual_seed(number)
        query, key, value = (torch.randn(1, 2, 40, 16, generator=generator, requires_grad=True) for _ in range(3))
        together.wait()
        import saccade as sc
        layer, x = sc.nn.MultiHeadAttention(32, 2), query.detach().transpose(1, 2).flatten(-2)
        with sc.record(layer, keep="qk") as recording:
            layer(x)
        torch.testing.assert_close(recording.runs(0)[0].matrix.to_dense(), layer.matrix(x).to_dense())
        out = sc.attention(query, key, value, sc.masks.sliding_window(number + 3))
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
        entropy = sc.AttentionMatrix(query, key, sc.masks.Causal()).entropy()
        rows, columns = torch.arange(40)[:, None], torch.arange(40)
        scores = query @ key.mT / 4
        weights = scores.masked_fill((columns > rows) | (columns < rows - number - 2), float("-inf")).softmax(-1)
        torch.testing.assert_close(out, weights @ value)
        torch.testing.assert_close(gradients, torch.autograd.grad((weights @ value).sum(), (query, key, value)))
        weights = scores.masked_fill(columns > rows, float("-inf")).softmax(-1)
        torch.testing.assert_close(entropy, -torch.special.xlogy(weights, weights).sum(-1))
        found.append(number)
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if errors:
    raise errors[0]
print(sorted(found))
"""


@pytest.mark.ci
def test_first_use() -> None:
    """The import, the choice of kernels, their probes and the first plans."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[0, 1, 2, 3]", 0), done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("impl", ["auto", "tiled"])
def test_plans(impl: str) -> None:
    for kept in (plan_cache._cached_plan, plan_cache._cached_rows, plan_cache._cached_row_plan):
        kept.cache_clear()

    def work(number: int) -> list[Tensor]:
        outputs = []
        for turn in range(TURNS):
            length = 30 + (7 * number + turn) % 11
            x = normal(length, 1, 2, length, 8)
            outputs += [sc.attention(x, x, x, MASK, impl=impl), sc.attention(x[:, :, -1:], x, x, MASK, impl=impl)]
        return outputs

    check(work)


def test_one_matrix() -> None:
    query, key, value = (normal(seed, 1, 2, 60, 8) for seed in range(3))
    shared = []

    def work(number: int) -> list[Tensor]:
        matrix = shared[0]
        answers = [matrix @ value, matrix.lse, matrix.entropy(), matrix.received(), matrix.mT @ value, matrix[0, 1, 7]]
        return [*answers, matrix.topk(3).weights]

    for _ in range(TURNS):
        shared[:] = [sc.AttentionMatrix(query, key, MASK)]
        answers = at_once(work)
        shared[:] = [sc.AttentionMatrix(query, key, MASK)]
        torch.testing.assert_close(answers, [work(0)] * THREADS)


@pytest.mark.ci
def test_one_layer() -> None:
    torch.manual_seed(0)
    layer = sc.nn.MultiHeadAttention(16, 4, mask=MASK)

    def work(number: int) -> list[Tensor]:
        gradients = []
        for turn in range(TURNS):
            out = layer(normal(number * TURNS + turn, 2, 20 + turn, 16))
            gradients += torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        return gradients

    check(work)


@pytest.mark.parametrize("kind", KINDS)
def test_forks_of_one_cache(kind: str) -> None:
    """Forks share memory until one of them writes; each thread continues its own."""
    softmax = sc.mechanisms.Softmax()

    def step(cache: sc.caches.LayerCache, seed: int) -> Tensor:
        query, key, value = (normal(100 * seed + part, 1, 2, 1, 4) for part in range(3))
        return cache.attend(softmax, query, key, value, mask=masks.Causal())

    def forks() -> list[sc.caches.LayerCache]:
        cache = KINDS[kind]()
        for seed in range(4):
            step(cache, seed)
        return [cache.fork() for _ in range(THREADS)]

    caches = forks()
    found = at_once(lambda number: [step(caches[number], 10 * number + turn) for turn in range(8)])
    for number, cache in enumerate(forks()):
        torch.testing.assert_close(found[number], [step(cache, 10 * number + turn) for turn in range(8)])


@pytest.mark.ci
def test_recordings_of_one_model() -> None:
    """Each recording holds the calls of its own thread among those of all threads, and the model is left as it was."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()

    def work(number: int) -> list[Tensor]:
        """Return the matrices of both layers for an input whose length identifies the thread."""
        found = []
        for _ in range(TURNS):
            with sc.record(model, keep="qk") as recording:
                model(normal(number, 1, 10 + number, 16))
            for layer in range(2):
                runs = [run for run in recording.runs(f"layers.{layer}.self_attn") if run.shape[2] == 10 + number]
                found.append(runs[-1].matrix.to_dense())
        return found

    check(work)
    assert not any("forward" in vars(part) or part._forward_hooks for part in model.modules())
