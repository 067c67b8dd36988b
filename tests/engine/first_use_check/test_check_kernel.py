"""The check of first use: it catches what is wrong, and accuses nobody who is right."""

import pytest
import torch
from tests.engine.first_use_check import wrong_kernels

import saccade as sc
from saccade import masks, positions, testing

DOCUMENTS = masks.Documents([[100, 200], [290, 10]], rule=masks.Causal())
EMPTY = masks.Causal() & masks.Window(None, 5) & ~masks.Global([0])
MUTANTS = {
    "one key too few": (wrong_kernels.OneKeyTooFew(), masks.Causal() & masks.Window(8, 0), {}),
    "the last block of keys": (wrong_kernels.LastBlockOfKeys(), None, {}),
    "the mask of the first item": (wrong_kernels.MaskOfTheFirstItem(), DOCUMENTS, {}),
    "other groups": (wrong_kernels.OtherGroups(), masks.Causal(), {}),
    "the scale twice": (wrong_kernels.ScaleTwice(), masks.Causal(), {}),
    "half precision": (wrong_kernels.HalfPrecision(), masks.Causal(), {}),
    "no softcap": (wrong_kernels.NoSoftcap(), masks.Causal(), {"softcap": 3.0}),
    "the bias of other heads": (wrong_kernels.BiasOfOtherHeads(), None, {"bias": "trained"}),
    "a frozen bias": (wrong_kernels.FrozenBias(), None, {"bias": "trained"}),
    "keys without gradient": (wrong_kernels.Unmoved(), masks.Causal(), {}),
    "lse of base two": (wrong_kernels.LseOfBaseTwo(), masks.Causal(), {}),
    "lse without gradient": (wrong_kernels.LseWithoutGradient(), masks.Causal(), {}),
    "the rest of the rows": (wrong_kernels.RestOfRows(), masks.Causal(), {}),
    "the mean for empty rows": (wrong_kernels.EmptyRowsGetTheMean(), EMPTY, {}),
    "an error": (wrong_kernels.Raises(), masks.Causal(), {}),
    "an error backwards": (wrong_kernels.RaisesBackwards(), masks.Causal(), {}),
    "no delta": (wrong_kernels.NoDelta(), masks.Causal(), {}),
    "one head of a group": (wrong_kernels.OneHeadOfAGroup(), masks.Causal(), {}),
}
# In half precision the first two are rounding; and what softmax takes off is computed anew there, so that it is right.
IN_BFLOAT16 = [name for name in MUTANTS if name not in ("the scale twice", "half precision", "no delta")]


def looked_at(kernel, mask, dtype=torch.float32, *, n=300, heads=4, width=32, options=None):
    """Two items, two groups of keys, a rest behind the last block."""
    options = dict(options or {})
    if options.get("bias") == "trained":
        options["bias"] = (torch.randn(1, heads, n, n) * torch.arange(1, heads + 1)[:, None, None]).requires_grad_()
    query = torch.randn(2, heads, n, width, dtype=dtype)
    key, value = torch.randn(2, 2, 2, n, width, dtype=dtype)
    return testing.first_use(kernel, query, key, value, mask, **options)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name):
    kernel, mask, options = MUTANTS[name]
    found = looked_at(kernel, mask, options=options)
    assert not found.ok
    with pytest.raises(AssertionError, match="product for float32 with"):
        found.raise_if_wrong()


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_mistake_is_caught_in_bfloat16(name):
    kernel, mask, options = MUTANTS[name]
    assert not looked_at(kernel, mask, torch.bfloat16, options=options).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_mistake_nothing_is_said(name, dtype):
    kernel, mask, options = MUTANTS[name]
    right = wrong_kernels.ByHand() if isinstance(kernel, wrong_kernels.ByHand) else wrong_kernels.Right()
    assert looked_at(right, mask, dtype, options=options).raise_if_wrong().ok


def asked(kernel, case, dtype):
    """A case by a kernel; None where the kernel, or the check, does not take it."""
    problem = case.problem(dtype)
    options = {"bias": problem.relative if problem.bias is None else problem.bias}
    for name in ("scale", "softcap", "score", "q_positions", "kv_positions"):
        options[name] = getattr(problem, name)
    try:
        return testing.first_use(kernel, problem.query, problem.key, problem.value, problem.mask, **options)
    except (sc.UnsupportedError, ValueError):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fused", "tiled"])
def test_hundreds_of_right_runs_pass(kernel):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    cases = (*testing.CASES, *testing.LARGE_CASES)
    every = [asked(kernel, case, dtypes[number % 4]) for number, case in enumerate(cases)]
    seen = [found for found in every if found is not None]
    assert [str(found) for found in seen if not found.ok] == []
    assert len(seen) > 100
    shares = [one.error / found.limit for found in seen for one in found.quantities]
    assert max(shares) < 1 / 8  # as docs/en/gpu.md says


WIDE = [
    (None, {}),
    (masks.Causal(), {}),
    (masks.longformer(20, [0, 200]), {}),
    (masks.bigbird(16, random_blocks=1), {}),
    (DOCUMENTS, {"softcap": 5.0}),
    (masks.Causal() & masks.Padding([300, 7]), {"bias": positions.ALiBi(4)}),
    (EMPTY, {"bias": torch.linspace(-2, 3, 1200).sin().view(1, 4, 1, 300)}),
    (masks.Causal(), {"q_positions": torch.arange(300) + 9, "kv_positions": torch.arange(300)}),
]


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [pytest.param("flex", marks=pytest.mark.slow), "sdpa"])
def test_nor_are_the_kernels_of_torch(kernel, dtype):
    for mask, options in WIDE if kernel == "flex" else WIDE[:2]:
        for spread in (0.1, 1.0, 4.0):
            query = spread * torch.randn(2, 4, 300, 32, dtype=dtype)
            key, value = torch.randn(2, 2, 2, 300, 32, dtype=dtype)
            found = testing.first_use(kernel, query, key, value, mask, **options)
            assert found.raise_if_wrong().rows >= 20


def test_functions_of_ones_own():
    query, key, value = torch.randn(3, 1, 2, 200, 16)

    def attention(q, k, v, mask, softcap=None):
        return sc.attention_with_lse(q, k, v, mask, softcap=softcap)

    def late(q, k, v, mask):
        return sc.attention(q, k, v, mask & masks.Window(None, 0))

    assert testing.first_use(attention, query, key, value, masks.Causal(), softcap=2.0).raise_if_wrong().ok
    assert testing.first_use(late, query, key, value, masks.Causal(), masks="objects").ok
    found = testing.first_use(late, query, key, value, masks="objects")
    assert found.fault.startswith("its first product for float32 with Full() on cpu differed from the definition: ")
    assert [one.name for one in found.quantities] == [
        "output",
        "gradient of query",
        "gradient of key",
        "gradient of value",
    ]


def test_its_message_reproduces_the_fault():
    told = looked_at(wrong_kernels.Unmoved(), masks.Causal() & masks.Window(8, 0)).warning
    assert "changed: its first product for float32 with Causal() & Window(left=8, right=0) on cpu differed" in told
    lines = [line.strip() for line in told.splitlines()[1:]]
    assert lines[-1] == "print(testing.first_use('changed', query, key, value, Causal() & Window(left=8, right=0)))"
    again = "\n".join(lines).replace("'changed'", "'fused'").replace("print(", "found = (")
    names: dict[str, object] = {}
    exec(again, names)
    assert names["found"].ok


def test_inputs_that_do_not_fit_are_refused():
    x = torch.randn(1, 2, 20, 16)
    with pytest.raises(ValueError, match="first_use: query, key and value must be finite and not empty"):
        testing.first_use("fused", x, x.clone().fill_(torch.inf), x)
    with pytest.raises(ValueError, match="first_use: kernel must be one of 'native'"):
        testing.first_use("fast", x, x, x)
    with pytest.raises(TypeError, match="first_use: kernel must be a name, a kernel or a function; got int"):
        testing.first_use(3, x, x, x)
    with pytest.raises(sc.UnsupportedError, match="it supports full masks"):
        testing.first_use("sdpa", x, x, x, masks.Window(1, 1))
