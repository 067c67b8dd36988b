"""The laws of the kit that hold for every attention, softmax or not, on the cases that a mechanism takes."""

import sys
from collections.abc import Callable

import pytest
import torch
from tests.mechanisms.recurrence_definitions import RULES, STEPS
from torch import Tensor

from saccade import mechanisms, testing
from saccade.masks import Causal, Full, Global, Mask, Padding, Prefix, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms.recurrences.substeps import SubstepMatrix
from saccade.scorers import BlockMeans, DotProducts
from saccade.testing.laws import invariance, locality, program_behaviour

# Laws of the softmax output, and of scores that only softmax has, are not among them.
GENERAL = [
    law for group in (locality, invariance, program_behaviour) for law in group.LAWS if law.name != "half_precision"
]
GENERAL += [law for law in testing.LAWS if law.name in ("gradcheck", "dtypes")]
BASIC = [case for case in testing.CASES if case.q_len <= 20]
LONG = ("top keys", "top blocks", "differential")
"""Mechanisms with which a case takes long: few cases are tried each time, all of them in the slow tests."""


class Difference(mechanisms.Mechanism):
    """Differential attention of queries and keys of any width: their own map, less that of their mirror images."""

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        torch.manual_seed(0)
        both = mechanisms.Differential(query.shape[3], layer=2).to(query.device, query.dtype)
        return both(*(torch.cat([x, x.flip(-1) / 2], -1) for x in (query, key)), **given)


class Fading(mechanisms.Mechanism):
    """Attention with forget gates of keys of any width: each is the sum of its key."""

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        gates = key.sum(-1, keepdim=True) + 1.0
        return mechanisms.Forgetting(query.shape[3])(query, torch.cat([key, gates], 3), **given)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return mechanisms.Forgetting(1).reasons(mask)


class Reflecting(mechanisms.Mechanism):
    """PaTH attention of keys of any width: each is also its own vector, of length 1, backwards."""

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        w = torch.nn.functional.normalize(key.flip(-1), dim=-1)
        keys = torch.cat([key, w, 2.0 * torch.sigmoid(key[..., :1])], 3)
        return mechanisms.PaTH(query.shape[3])(query, keys, **given)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return mechanisms.PaTH(1).reasons(mask)


class Filter(mechanisms.Mechanism):
    """The same state space in every head; what keys hold is not read."""

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        torch.manual_seed(0)
        one, all_alike = mechanisms.S4D(1, 4), mechanisms.S4D(query.shape[1], 4)
        all_alike.load_state_dict(
            {name: x.expand(query.shape[1], *x.shape[1:]) for name, x in one.state_dict().items()}
        )
        heads = key.repeat_interleave(query.shape[1] // max(1, key.shape[1]), 1)
        return all_alike.to(query.dtype)(query, heads, **given)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return mechanisms.S4D(1, 4).reasons(mask)


class Remembering(mechanisms.Mechanism):
    """A memory of segments of 3 tokens, for any number of heads, all of which weigh it alike."""

    def __init__(self, update: mechanisms.compressive.Update):
        super().__init__()
        self.update = update

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        own = mechanisms.CompressiveMemory(max(1, query.shape[1]), 3, update=self.update)
        torch.nn.init.constant_(own.gate, 0.3)
        return own.to(query.dtype)(query, key, **given)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return mechanisms.CompressiveMemory(1, 3).reasons(mask)


class Convolution(mechanisms.Mechanism):
    """The same weights of the last three positions in every head; what keys hold is not read."""

    def forward(self, query: Tensor, key: Tensor, **given: object) -> Matrix:
        one = mechanisms.ShortConvolution(max(1, query.shape[1]), 3)
        torch.nn.init.constant_(one.weight, 0.4)
        heads = key.repeat_interleave(query.shape[1] // max(1, key.shape[1]), 1)
        return one.to(query.dtype)(query, heads, **given)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return mechanisms.ShortConvolution(1, 3).reasons(mask)


PERFORMER = mechanisms.Performer(16, seed=3)
MAKERS: dict[str, Callable[[int], mechanisms.Mechanism]] = {
    "linear": lambda kv_len: mechanisms.Linear(),
    "squared relu": lambda kv_len: mechanisms.Linear("squared_relu", eps=1e-6),
    "performer": lambda kv_len: PERFORMER,
    "linformer": lambda kv_len: mechanisms.Linformer(max(1, kv_len), max(1, min(4, kv_len))),
    "nystrom": lambda kv_len: mechanisms.Nystrom(4),
    **{name: (lambda kv_len, rule=rule: rule) for name, rule in {**RULES, **STEPS}.items()},
    "differential": lambda kv_len: Difference(),
    "forgetting": lambda kv_len: Fading(),
    "path": lambda kv_len: Reflecting(),
    "s4d": lambda kv_len: Filter(),
    "convolution": lambda kv_len: Convolution(),
    "memory": lambda kv_len: Remembering("linear"),
    "memory, delta": lambda kv_len: Remembering("delta"),
    "top keys": lambda kv_len: mechanisms.TopK(DotProducts(), 3),
    "top blocks": lambda kv_len: mechanisms.TopK(BlockMeans(), 2, 3),
    "native sparse": lambda kv_len: mechanisms.NativeSparse(3, 2, 4),
}
OTHERWISE = {
    "squared relu": {"ones": "a share of each row goes to eps", "sensitivity": "features of 0 see nothing"},
    "linformer": {
        "key_order": "a slot holds neighbours",
        "ones": "slots are learned, and rows need not sum to 1",
    },
    "differential": {"ones": "rows sum to 1 - λ"},
    "forgetting": {"key_order": "a key fades by those behind it"},
    "path": {"key_order": "a key is reflected by those behind it"},
    "nystrom": {
        "key_order": "a landmark holds neighbours",
        "rows": "a landmark is a mean of queries",
        "blindness": "a landmark is a mean of queries",
        "ones": "six steps to the inverse leave some of the way",
    },
    **{name: {"ones": "rows have any sign, and no denominator"} for name in {**RULES, **STEPS}},
    "s4d": {
        "ones": "rows have any sign, and no denominator",
        "honesty": "what keys hold is not read",
        "sensitivity": "an FFT mixes all values of 4,096 tokens, by rounding",
        "key_order": "weights are those of distances",
    },
    "convolution": {
        "ones": "weights are learned, and rows need not sum to 1",
        "honesty": "what keys hold is not read, nor what is far away",
        "sensitivity": "what is far away is not read",
        "key_order": "weights are those of distances",
    },
    **{
        name: {"ones": "the memory has nothing for the first segment", "key_order": "a segment holds neighbours"}
        for name in ("memory", "memory, delta")
    },
    "top keys": dict.fromkeys(("sensitivity", "honesty"), "keys that were not chosen are not read"),
    "top blocks": {
        "sensitivity": "blocks that were not chosen are not read",
        "honesty": "blocks that were not chosen are not read",
        "key_order": "a block holds neighbours",
    },
    "native sparse": {
        "ones": "before the first block ends, its branch has nothing",
        "gqa": "heads that share a key head share their blocks",
        "key_order": "a block holds neighbours",
    },
}
for fading in {*RULES, *STEPS} - {"sums"}:
    OTHERWISE[fading]["key_order"] = "what was written later is corrected, or fades, less"
"""Laws that a mechanism does not keep, and why."""


def few(name: str) -> list[testing.Case]:
    if name == "native sparse":
        return [case for case in BASIC if case.mask is not None and not MAKERS[name](1).reasons(case.mask)][::2]
    return BASIC[::16] if name in LONG else BASIC[::8]


class Executed:
    """A mechanism in the kit's calling convention."""

    def __init__(self, name: str):
        self.make = MAKERS[name]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor:
        matrix = self.make(key.shape[2])(query, key, mask=mask)
        if isinstance(matrix, SubstepMatrix) and matrix.writers > 1:
            return matrix.total(value.repeat(1, 1, 1, matrix.writers))
        return matrix @ value.repeat_interleave(matrix.kv_heads // max(1, value.shape[1]), 1)

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: object) -> tuple[str, ...]:
        shape = (*query.shape[:3], key.shape[2])
        return self.make(key.shape[2]).reasons(as_mask(mask, shape))

    def check(self, laws: list[testing.Law], cases: list[testing.Case] = BASIC) -> testing.Report:
        options = {"reasons": self.reasons, "masks": "objects", "offers": ()}
        return testing.check(self, laws=laws, cases=cases, dtypes=[torch.float64], **options, seed=0)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size go block by block."""
    monkeypatch.setattr(sys.modules["saccade.matrix.block_sparse"], "_SMALLEST", 2)


LENGTHY = ("top blocks", "top keys", "differential")  # others of their kind are quicker


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "cases"),
    [pytest.param(name, few(name), id=name, marks=pytest.mark.slow if name in LENGTHY else ()) for name in MAKERS]
    + [pytest.param(name, BASIC, id=f"{name}, all cases", marks=pytest.mark.slow) for name in MAKERS],
)
def test_laws_of_every_attention_hold(name: str, cases: list[testing.Case]) -> None:
    report = Executed(name).check([law for law in GENERAL if law.name not in OTHERWISE.get(name, {})], cases)
    assert report.raise_if_broken().ok
    tried = {result.law for result in report.kept} | set(OTHERWISE.get(name, {}))
    assert {"isolation", "honesty", "linear", "gqa", "batch", "heads", "pure", "gradcheck", "zero_lengths"} <= tried


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "law"), [pytest.param(name, law, id=f"{name}-{law}") for name in OTHERWISE for law in OTHERWISE[name]]
)
def test_broken_laws_are_the_known_ones(name: str, law: str) -> None:
    cases = BASIC[::8] if name in LONG else BASIC
    assert Executed(name).check([one for one in GENERAL if one.name == law], cases).broken


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "native sparse"])  # takes Padding alone
@pytest.mark.parametrize("mask", [Prefix(7), Global(range(7), sees=False), ~Padding([0]) & Prefix(7)], ids=str)
def test_masks_that_hide_keys_only_are_padding(name: str, mask: Mask) -> None:
    q, k, v = torch.randn(3, 2, 2, 11, 4, dtype=torch.float64)
    mechanism = MAKERS[name](11).double()
    causal = Causal() if name in (*RULES, *STEPS, "forgetting", "path", "s4d", "memory", "memory, delta") else Full()
    mask, padding = mask & causal, Padding([7]) & causal
    v = v if name != "delta product" else v.repeat_interleave(2, 1)  # a head for each step
    torch.testing.assert_close(mechanism(q, k, mask=mask) @ v, mechanism(q, k, mask=padding) @ v)
    dense = mechanism(q, k, mask=mask).to_dense()
    assert not dense[..., 7:].any()
    torch.testing.assert_close(dense @ v, mechanism(q, k, mask=mask) @ v)
