"""Tests of every law on every case, in every dtype, for every kernel of this library."""

import dataclasses

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native
from tests.sampled import MANY

import saccade
from benchmarks.gpu_check import laws as gpu_laws
from saccade import testing
from saccade.engine import dispatch
from saccade.engine.kernels.block_mask import blocks_of
from saccade.engine.kernels.flex import Flex, _score_mod
from saccade.engine.kernels.kernel import Request, Verdict
from saccade.testing.cases import INGREDIENTS, LARGE_INGREDIENTS
from saccade.testing.kernel_under_test import OPTIONS
from saccade.testing.pattern_cases import PATTERNS

HALF = (torch.bfloat16, torch.float16)
EVERY = (*testing.CASES, *testing.LARGE_CASES)
BASIC = [case for case in testing.CASES if case not in PATTERNS]
EVEN, ODD = BASIC[::2], BASIC[1::2]  # what one kernel is not asked in a quick run, another one is
QUARTERS = [BASIC[first::4] for first in range(4)]
# Laws that bring neither cases nor dtypes of their own: what can be tried on other cases and in other dtypes.
GENERAL = [law for law in testing.LAWS if law.cases is None and law.dtypes is None]
ANY_DTYPE = [law for law in testing.LAWS if law.dtypes is None]
# Reasons given before a call hardly depend on masks, and each case is asked some thirty questions.
TOLD = [law for law in testing.LAWS if law.name in ("declined", "offered")]
UNTOLD = [law for law in testing.LAWS if law not in TOLD]
SIZED = [law for law in testing.SIZE_LAWS if law.name not in ("sizes", "gradients_at_sizes")]  # the others take seconds
FEW = [*BASIC[::8], *INGREDIENTS[::3], INGREDIENTS[-1]]
NUMBERS = [law for law in GENERAL if law.name in ("oracle", "lse", "gradients_of_inputs", "gradients_of_parameters")]
CI = pytest.mark.ci


class Executed:
    """Attention by one kernel, which gives its reasons not to run before a call and stores them during a trial."""

    def __init__(self, impl):
        self.impl, self.said = impl, set()

    @property
    def lacks_lse(self):
        query = torch.zeros(1, 1, 2, 16)
        return any("lse" in reason for reason in self.reasons(query, query, query, None, sink_logit=torch.zeros(1)))

    def __call__(self, *tensors, **options):
        self.said |= set(self.reasons(*tensors, **options))
        return saccade.attention(*tensors, impl=self.impl, **options)

    def with_lse(self, *tensors, **options):
        self.said |= set(self.reasons(*tensors, **options))
        return saccade.attention_with_lse(*tensors, impl=self.impl, **options)

    def reasons(self, query, key, value, mask, *, dropout_p=0.0, **options):
        """Return the reasons of the kernel that is asked for by name, whether or not it would be asked first."""
        named = [kernel for kernel in dispatch.KERNELS if kernel.name == self.impl]
        given = saccade.AttentionMatrix(query, key, mask, **options).inputs
        if not named:
            return ()
        return named[0].verdict(given, Request(dropout_p, self.impl, needs_lse="sink_logit" in options)).cannot

    def declared(self, device="cpu"):
        """Return the declared abilities of the kernel, as arguments of the kit."""
        is_thrifty = self.impl not in ("reference", "flex", "matmul") and device == "cpu"  # flex is uncompiled
        return {
            "with_lse": None if self.lacks_lse else self.with_lse,
            "offers": (*OPTIONS, "q_positions", "kv_positions"),
            "reasons": self.reasons,
            "masks": "objects",
            "claims": testing.Claims(memory_exponent=1.0 if is_thrifty else None),
            "device": device,
        }

    def check(self, laws, dtypes):
        return testing.check(self, laws=laws, cases=FEW, dtypes=dtypes, **self.declared(), seed=0)

    def faults(self, laws, cases, dtypes, device="cpu"):
        """Yield the trials that neither keep their law nor are refused for a reason given before."""
        subject = testing.Subject(self, **self.declared(device))
        for law, case, dtype in testing.trials(laws, cases, dtypes):
            self.said.clear()
            result = testing.try_law(subject, law, case, dtype)
            if law.name in ("declined", "offered"):  # they ask for what is refused, and judge it themselves
                self.said.clear()
            expected = ("not offered",) if self.said else ("kept", "not applicable")
            if result.verdict not in expected:
                yield str(result)


def trials(impl, laws, cases, *dtypes, marks=()):
    """Yield pytest parameters: each law on all cases, in each dtype or in those of its own."""
    for law in laws:
        for dtype in dtypes if law.dtypes is None else ["own"]:
            which = "-every" if cases is EVERY else "-large" if cases[0].q_len > 100 else ""
            name = f"{impl}{which}-{law}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(impl, law, cases, dtype, id=name, marks=marks)


def without_lse(laws):
    """Return the laws that can be tried on a function without lse."""
    return [law for law in laws if "lse" not in (law.needs or ())]


@pytest.mark.parametrize(
    ("impl", "law", "cases", "dtype"),
    [
        *trials("reference", UNTOLD, QUARTERS[1], torch.float64),
        *trials("reference", UNTOLD, [*EVEN, *QUARTERS[3]], torch.float64, marks=MANY),
        *trials("reference", TOLD, FEW, torch.float64, marks=MANY),
        *trials("fused", UNTOLD, QUARTERS[0], torch.float32),
        *trials("fused", UNTOLD, [*ODD, *QUARTERS[2]], torch.float32, marks=MANY),
        *trials("fused", TOLD, FEW, torch.float32, marks=CI),
        *trials("fused", TOLD, EVEN, torch.float32, marks=MANY),
        *trials("fused", GENERAL, testing.LARGE_CASES[::6], torch.float32, marks=CI),
        *trials("fused", GENERAL, testing.LARGE_CASES[3::6], torch.float32, marks=MANY),
        *trials("matmul", UNTOLD, QUARTERS[3], torch.float32),
        *trials("matmul", UNTOLD, QUARTERS[1], torch.float32, marks=MANY),
        *trials("matmul", UNTOLD, QUARTERS[2], torch.bfloat16, marks=CI),
        *trials("matmul", UNTOLD, QUARTERS[0], torch.bfloat16, marks=MANY),
        *trials("matmul", TOLD, FEW, torch.float32),
        *trials("tiled", UNTOLD, QUARTERS[1], torch.float32),
        *trials("tiled", UNTOLD, [*EVEN, *QUARTERS[3]], torch.float32, marks=MANY),
        *trials("tiled", TOLD, FEW, torch.float32, marks=MANY),
        *trials("tiled", NUMBERS, LARGE_INGREDIENTS, torch.float32),
        *trials("sdpa", without_lse(UNTOLD), EVEN, torch.float32),
        *trials("sdpa", TOLD, FEW, torch.float32, marks=CI),
        *trials("sdpa", without_lse(GENERAL), testing.LARGE_CASES[::2], torch.float32, marks=CI),
        *trials("native", UNTOLD, QUARTERS[2], torch.float32, marks=needs_native),
        *trials("native", UNTOLD, [*ODD, *QUARTERS[0]], torch.float32, marks=[needs_native, *MANY]),
        *trials("native", TOLD, FEW, torch.float32, marks=[needs_native, CI]),
        *trials("native", TOLD, EVEN, torch.float32, marks=[needs_native, *MANY]),
        *trials("native", GENERAL, testing.LARGE_CASES[1::4], torch.float32, marks=[needs_native, CI]),
        *trials("native", GENERAL, testing.LARGE_CASES[3::4], torch.float32, marks=[needs_native, *MANY]),
        *trials("native", NUMBERS, ODD, torch.bfloat16, marks=needs_native),
        *trials("native", NUMBERS, EVEN[::4], torch.float16, marks=needs_native),
        *trials("fused", SIZED, BASIC, marks=CI),
        *trials("fused", [law for law in testing.SIZE_LAWS if law not in SIZED], BASIC, marks=MANY),
        *trials("tiled", testing.SIZE_LAWS, BASIC, marks=pytest.mark.slow),
        *trials("sdpa", testing.SIZE_LAWS, BASIC, marks=pytest.mark.slow),
        *trials("native", testing.SIZE_LAWS, BASIC, marks=[needs_native, CI]),
    ],
)
def test_law(impl, law, cases, dtype):
    assert list(Executed(impl).faults([law], cases, [dtype])) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "law", "cases", "dtype"),
    [
        *trials("reference", UNTOLD, PATTERNS, torch.float64),
        *trials("reference", GENERAL, testing.LARGE_CASES, torch.float64),
        *trials("fused", UNTOLD, PATTERNS, torch.float32),
        *trials("fused", TOLD, ODD, torch.float32),
        *trials("fused", GENERAL, testing.LARGE_CASES, torch.float32),
        *trials("fused", GENERAL, EVERY, torch.float64, *HALF),
        *trials("matmul", UNTOLD, PATTERNS, torch.float32),
        *trials("matmul", GENERAL, EVERY, torch.float64, *HALF),
        *trials("tiled", UNTOLD, PATTERNS, torch.float32),
        *trials("tiled", GENERAL, testing.LARGE_CASES, torch.float32),
        *trials("tiled", GENERAL, EVERY, torch.float64, *HALF),
        *trials("sdpa", without_lse(UNTOLD), [*ODD, *PATTERNS], torch.float32),
        *trials("sdpa", without_lse(GENERAL), testing.LARGE_CASES, torch.float32),
        *trials("sdpa", without_lse(GENERAL), EVERY, torch.float64, *HALF),
        *trials("native", UNTOLD, PATTERNS, torch.float32, marks=needs_native),
        *trials("native", TOLD, ODD, torch.float32, marks=needs_native),
        *trials("native", GENERAL, testing.LARGE_CASES, torch.float32, marks=needs_native),
        *trials("native", ANY_DTYPE, EVERY, *HALF, marks=needs_native),
        *trials("auto", testing.LAWS, EVERY, torch.float64, torch.float32, *HALF),
    ],
)
def test_law_on_every_case(impl, law, cases, dtype):
    assert list(Executed(impl).faults([law], cases, [dtype])) == []


@pytest.mark.ci
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own look at it
@pytest.mark.parametrize(
    ("impl", "law", "cases", "dtype"),
    [
        *trials("flex", NUMBERS[:1], FEW[::6], torch.float32),
        *trials("flex", testing.LAWS, FEW, torch.float32, marks=pytest.mark.slow),
        *trials("flex", NUMBERS, EVERY, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_law_of_flex_attention(impl, law, cases, dtype):
    """The uncompiled FlexAttention, which runs without its compiler and is traced in each call (0.5 s), keeps a law."""
    assert list(Executed(impl).faults([law], cases, [dtype])) == []


# torch compiles heads from 16 on: cases whose parameters are of another width are left to the uncompiled run.
OF_ANY_WIDTH = [case for case in FEW if not str(case).startswith(("shaw", "additive", "everything"))]


class CompiledForward(Flex):
    """FlexAttention as torch compiles it for a CPU: without gradients and lse."""

    devices = ("cpu",)
    is_checked = False

    def verdict(self, given, request):
        cannot, should_skip = super().verdict(given, request)
        return Verdict((*cannot, "torch compiles no lse for a CPU") if request.needs_lse else cannot, should_skip)

    def forward(self, given, value, dropped):
        scale = None if given.scale == given.query.shape[3] ** -0.5 else 1.0
        options = {"scale": scale, "enable_gqa": given.query.shape[1] != given.key.shape[1]}
        blocks = blocks_of(given.rule, given.shape, given.origin, given.device)
        made = self.function()(given.query, given.key, value, score_mod=_score_mod(given), block_mask=blocks, **options)
        return made, None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OF_ANY_WIDTH[::2], ids=str)
def test_forward_laws_of_compiled_flex_attention(case, monkeypatch):
    """The compiled FlexAttention keeps all laws on masks, biases and softcaps that need neither gradients nor lse."""
    torch.compiler.reset()
    kernel, wide = CompiledForward(), dataclasses.replace(case, head_dim=16, value_dim=16, key_dim=None)
    monkeypatch.setattr(dispatch, "KERNELS", (kernel,))
    laws = [law for law in testing.LAWS if law.name in ("oracle", "softcap", "relative", "empty_rows", "heads")]
    with torch.no_grad():
        assert list(Executed("flex").faults(laws, [wide], [torch.float32])) == []


@pytest.mark.gpu
@pytest.mark.parametrize("impl", gpu_laws.KERNELS)
@pytest.mark.parametrize("law", gpu_laws.LAWS, ids=str)
def test_law_on_a_gpu(law, impl):
    """Kernels keep each law on a GPU, on the few cases of the GPU check: FlexAttention compiles for each."""
    _, faults = gpu_laws.broken(impl, [law], gpu_laws.CASES, gpu_laws.DTYPES[impl], "cuda")
    assert faults == []


@pytest.mark.ci
def test_another_kernel_runs_inputs_that_the_fastest_refuses():
    laws = [law for law in GENERAL if law.name in {"softcap", "order", "gradient_of_bias", "offered"}]
    report = Executed("auto").check(laws, [torch.float32])
    assert report.raise_if_broken().ok
    assert not report.not_offered


def test_the_fused_kernel_refuses_what_it_lacks_and_says_so_beforehand():
    executed = Executed("fused")
    report = executed.check([law for law in GENERAL if law.name == "declined"], [torch.float32])
    assert len(report.raise_if_broken().kept) == len(FEW)
    assert executed.said == {
        "it has no softcap",
        "it has no dropout",
        "it has no gradient for bias",
        "it supports only dot products, and maps that end in one",
    }


@pytest.mark.ci
def test_a_bool_tensor_says_the_same_as_a_mask():
    laws = [law for law in GENERAL if law.name in {"oracle", "gradients_of_inputs", "decode", "pure"}]
    report = testing.check(
        saccade.attention, with_lse=saccade.attention_with_lse, laws=laws, dtypes=[torch.float64], seed=0
    )
    assert report.raise_if_broken().ok
    # A relative bias reads positions, and who gives positions gives a rule on them, too.
    assert {result.message for result in report.not_offered} <= {"takes no relative bias"}
