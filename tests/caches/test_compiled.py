"""Caches in compiled functions: they run between two graphs, with equal results; a single graph is refused."""

import pytest
import torch
from tests.caches.cache_kinds import KINDS
from tests.sampled import sampled
from torch import Tensor

from saccade import masks
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = "a cache changes with each call, so a compiled graph cannot contain it"


def _run(kind: str, x: Tensor) -> Tensor:
    cache, outs = KINDS[kind](), []
    for q in x.split([5, 1, 3], 2):
        outs.append(cache.attend(Softmax(), q, q, q, mask=masks.Causal()) * 2)
    return torch.cat(outs, 2)


@pytest.mark.ci
@pytest.mark.parametrize("kind", sampled(KINDS, 4))
def test_a_compiled_function_may_use_a_cache(kind: str) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 2, 9, 4)
    torch.testing.assert_close(torch.compile(_run, backend="eager")(kind, x), _run(kind, x))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED):
        torch.compile(_run, backend="eager", fullgraph=True)(kind, x)


@pytest.mark.ci
@pytest.mark.parametrize("kind", sampled(KINDS, 5))
def test_a_compiled_layer_goes_on_with_a_cache(kind: str) -> None:
    torch.compiler.reset()
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, mask=masks.Causal()).eval()
    compiled, own, other = torch.compile(layer, backend="eager"), KINDS[kind](), KINDS[kind]()
    for n in (5, 1, 1, 3):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(compiled(x, cache=own), layer(x, cache=other))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED):
        torch.compile(layer, backend="eager", fullgraph=True)(x, cache=own)
