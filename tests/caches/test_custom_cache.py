"""A cache of one's own: settings, leaves and one method; everything else follows from the base class."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from saccade import caches, masks
from saccade.caches import Call, KVCache, LayerCache, Leaf
from saccade.mechanisms import Softmax

CAUSAL = masks.Causal()


class LastCalls(LayerCache):
    """Remembers the keys and values of the last call alone."""

    settings = ("scale",)
    leaves: ClassVar = (
        Leaf("key", "batch kv_heads last head_dim"),
        Leaf("value", "batch kv_heads last value_dim"),
        Leaf("table", "batch|1 last", "positions"),
    )
    equivalent_run = "the dense run in which all but the last two calls are hidden"

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def advance(self, call: Call) -> Tensor:
        new = {"key": call.key, "value": call.value * self.scale, "table": call.table}
        rows = {name: max(len(x), len(self._state.get(name, x))) for name, x in new.items()}
        axes = {"key": 2, "value": 2, "table": 1}
        joined = {
            name: torch.cat([part.expand(rows[name], *part.shape[1:]) for part in (self._state[name], x)], axes[name])
            if self._state
            else x
            for name, x in new.items()
        }
        matrix = call.mechanism(
            call.query, joined["key"], mask=call.mask, q_positions=call.positions, kv_positions=joined["table"]
        )
        self._state = {name: x.detach() for name, x in new.items()}
        return matrix.matmul(joined["value"])


def _qkv(length: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, heads, length, 8) for heads in (4, 2, 2)]


def test_everything_else_follows_from_settings_and_leaves() -> None:
    cache, (q, k, v) = LastCalls(2.0), _qkv(9)
    for start, stop in ((0, 4), (4, 6), (6, 9)):
        out = cache.attend(Softmax(), *(x[:, :, start:stop] for x in (q, k, v)), mask=CAUSAL)
    dense = Softmax()(q[:, :, 6:], k[:, :, 4:], mask=CAUSAL, q_positions=range(6, 9), kv_positions=range(4, 9))
    torch.testing.assert_close(out, dense @ (2 * v[:, :, 4:]))
    assert (cache.length, cache.positions(2), cache.nbytes) == (9, range(9, 11), 2 * 2 * 2 * 3 * 8 * 4 + 3 * 8)
    assert repr(cache) == f"LastCalls(scale=2.0, length=9, nbytes={cache.nbytes})"
    fork, new = cache.fork(), _qkv(1)
    fork.reorder([1, 1])
    expected = cache.attend(Softmax(), *new, mask=CAUSAL)[[1, 1]]
    torch.testing.assert_close(fork.attend(Softmax(), *(x[[1, 1]] for x in new), mask=CAUSAL), expected)
    with pytest.raises(NotImplementedError, match="the effect of later tokens on it cannot be undone"):
        cache.crop(3)
    with pytest.raises(ValueError, match="batch of key must be 2, as in the cache; got 3"):
        cache.attend(Softmax(), *_qkv(1, 3), mask=CAUSAL)
    numbers, tensors = cache.state()
    assert (numbers, sorted(tensors)) == ({"length": 10, "next": 10}, ["key", "table", "value"])
    cache.crop(0)
    assert (cache.length, cache.nbytes, cache.positions(1)) == (0, 0, range(1))


def test_a_cache_without_a_rule_says_what_it_lacks() -> None:
    with pytest.raises(NotImplementedError, match=r"LayerCache must define advance\(call\), or attend"):
        LayerCache().attend(Softmax(), *_qkv(2))


def test_every_cache_says_which_run_it_equals() -> None:
    kinds = [getattr(caches, name) for name in caches.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, LayerCache)]
    assert KVCache in kinds
    for kind in kinds:
        assert "run" in kind.equivalent_run
