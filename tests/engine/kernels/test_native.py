"""Tests of the compiled kernel alone: plans, instruction sets, and the same bits for any number of threads."""

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native
from tests.masks.test_masks import ATOMS
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.kernels.kernel import Request
from saccade.engine.kernels.native import Native, abilities, read_dtype
from saccade.engine.kernels.native_arguments import PANEL, ROWS, NativePlan, cached_bits
from saccade.masks.convert.recognise_tensor import recognise_tensors

SIZES = [(5, 5), (70, 70), (130, 130), (7, 200), (200, 64), (1, 129)]
RULES = [
    None,
    masks.Causal(),
    masks.Window(20, 3),
    masks.longformer(16, [0, 5]),
    masks.bigbird(8, random_blocks=1),
    masks.sparse_transformer(8),
    masks.Causal() & masks.Padding([60, 130]),
    ~masks.Window(4, 4),
    *ATOMS,
    *(
        recognise_tensors(masks.Dense(mask.to_dense(size)), (1, 1 << 20, size, size), (0, 0))
        for size in (70, 130)
        for mask in (masks.streaming(20, 3), masks.prefix_lm(30), masks.Padding([size, 40]) & masks.prefix_lm(30))
    ),
]


def _read(plan: NativePlan, given: AttentionInputs) -> Tensor:
    """Return the mask that a plan describes, bool ``[batch, heads, q_len, kv_len]``, pair by pair."""
    batch, heads, q_len, kv_len = given.shape
    blocks, seen = -(-q_len // ROWS), torch.zeros(given.shape, dtype=torch.bool)
    bits = None if plan.is_exact else cached_bits(given)
    for b, h, q in product(range(batch), range(heads), range(q_len)):
        item = b if len(plan.spans) > 1 else 0
        at = item * blocks + q // ROWS
        for first, stop, kind in plan.runs[plan.starts[at] : plan.starts[at + 1]].tolist():
            for kv in range(first * PANEL, min(stop * PANEL, kv_len)):
                if kind == 0:
                    seen[b, h, q, kv] = True
                elif kind == 1:
                    seen[b, h, q, kv] = any(start <= kv < end for start, end in plan.spans[item, q].tolist())
                else:
                    assert bits is not None
                    words = bits[b if len(bits) > 1 else 0, h if bits.shape[1] > 1 else 0, q]
                    seen[b, h, q, kv] = bool(int(words[kv // PANEL]) >> kv % PANEL & 1)
    return seen


def _pairs_of_panels(seen: Tensor) -> int:
    """Return the pairs of one head in all panels of 24 rows and 64 keys with a visible pair, from the dense mask."""
    items, _, q_len, kv_len = seen.shape
    total = 0
    for item, row, key in product(range(items), range(0, q_len, 24), range(0, kv_len, 64)):
        rows, keys = seen[item, 0, row : row + 24].shape[0], seen[item, 0, 0, key : key + 64].shape[0]
        if seen[item, :, row : row + 24, key : key + 64].any():
            total += rows * keys
    return total


@pytest.mark.ci
@pytest.mark.parametrize("rule", sampled(RULES, 4), ids=str)
def test_a_plan_says_what_the_mask_says(rule: masks.Mask | None) -> None:
    for q_len, kv_len in SIZES:
        batch, heads = (1, 1) if rule is None else (max(1, rule.shape[0]), max(1, rule.shape[1]))
        try:
            given = AttentionInputs.of(torch.zeros(batch, heads, q_len, 8), torch.zeros(batch, heads, kv_len, 8), rule)
        except ValueError:  # a mask made for another length
            continue
        if given.rule.calls_functions:
            continue
        plan = NativePlan.of(given)
        assert plan is not None
        expected = given.rule.to_dense(q_len, kv_len, batch=batch, heads=heads)
        assert torch.equal(_read(plan, given), expected.expand(batch, heads, -1, -1))
        assert plan.pairs(given) >= _pairs_of_panels(expected) * (batch // len(expected)) * heads


@pytest.mark.parametrize("rule", RULES[:7], ids=str)
def test_no_panel_is_read_that_none_of_24_rows_sees(rule: masks.Mask | None) -> None:
    batch = 1 if rule is None else rule.shape[0]
    given = AttentionInputs.of(torch.zeros(batch, 2, 130, 8), torch.zeros(batch, 2, 130, 8), rule)
    plan = NativePlan.of(given)
    assert plan is not None
    assert plan.pairs(given) == 2 * _pairs_of_panels(given.rule.to_dense(130, batch=batch).expand(batch, -1, -1, -1))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    tensors = [torch.randn(1, 4, 300, 32).to(dtype).requires_grad_() for _ in range(3)]
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = sc.attention(*tensors, masks.Window(40, 10), impl="native")
            found.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_level_keeps_the_definition(level: int) -> None:
    """Every level gives the definition's results, in its own process, since the processor is checked only once."""
    code = """
import torch, saccade, saccade_cpu
from saccade import masks
torch.manual_seed(0)
tensors = [torch.randn(2, heads, 90, 33, requires_grad=True) for heads in (4, 2, 2)]
for mask in (None, masks.Causal(), masks.Window(9, 3), masks.longformer(8, [0])):
    found = []
    for impl in ("native", "tiled"):
        out, lse = saccade.attention_with_lse(*tensors, mask, softcap=20.0, impl=impl)
        found.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), tensors)])
    for own, other in zip(*found):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
print(saccade_cpu.abilities())
"""
    told = os.environ | {"SACCADE_CPU_LEVEL": str(level)}
    run = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == min(level, abilities() or 0)


@needs_native
@pytest.mark.parametrize("told", ["with_native", "without_native"])
def test_it_is_asked_first_and_can_be_left_out(told: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(told)
    x = torch.randn(1, 2, 200, 16)
    kernel = sc.AttentionMatrix(x, x, masks.Causal()).explain().kernel
    skipped = sc.AttentionMatrix(x.double(), x.double(), masks.Causal()).explain().skipped.get("native")
    is_on = told == "with_native"
    assert kernel == ("native" if is_on else "fused")
    assert skipped == ("it has no float64" if is_on else "SACCADE_CPU=off disables it",)


def test_a_missing_installation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native.abilities", lambda: None)
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(sc.UnsupportedError, match="saccade-cpu is not installed"):
        sc.attention(x, x, x, impl="native")


@pytest.mark.ci
def test_a_library_that_cannot_be_loaded_is_left_out_and_reported(tmp_path: Path) -> None:
    package = tmp_path / "saccade_cpu"
    shutil.copytree(
        Path(__file__).parents[3] / "native/saccade_cpu", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (package / "saccade_cpu.so").write_bytes(b"not a library")
    code = """
import torch, saccade
x = torch.randn(1, 2, 200, 16)
matrix = saccade.AttentionMatrix(x, x, saccade.masks.Causal())
print((matrix @ x).shape, *matrix.explain().skipped["native"])
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    shape, _, reason = run.stdout.strip().partition(") ")
    assert shape == "torch.Size([1, 2, 200, 16]"
    head, _, cause = reason.partition(": ")
    assert head == "saccade-cpu is installed, but its library cannot be loaded"
    assert cause  # the words of the system


def built(folder: Path, **told: str) -> str:
    """Compile the package and return its PYTHONPATH; tiles are emulated if the processor has bfloat16 without them."""
    if shutil.which((os.environ.get("CXX") or "g++").split()[0]) is None:
        pytest.skip("needs a C++ compiler")
    native, package = Path(__file__).parents[3] / "native", folder / "saccade_cpu"
    shutil.copytree(native / "saccade_cpu", package, ignore=shutil.ignore_patterns("*.so"))
    code = f"from setup import build; from pathlib import Path; build(Path({str(package)!r}))"
    told |= {"SACCADE_CPU_EMULATE_TILES": "1"} if abilities() == 3 else {}
    subprocess.run([sys.executable, "-c", code], cwd=native, env=os.environ | told, check=True, capture_output=True)
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


@pytest.mark.slow
@pytest.mark.skipif((abilities() or 0) < 3, reason="needs a processor with AVX-512 that multiplies bfloat16")
def test_tiles_multiply_as_pairs_do(tmp_path: Path) -> None:
    """The tile instructions agree with the pair instructions, also for sizes with a remainder."""
    code = """
import torch, saccade, saccade_cpu
from saccade import masks
assert saccade_cpu.abilities() == 4
torch.manual_seed(0)
sizes = [(100, 64, 64, 4, 2), (333, 128, 96, 2, 2), (257, 48, 32, 2, 1), (9, 64, 80, 4, 2)]
for n, width, value_width, heads, kv_heads in sizes:
    for mask in (None, masks.Causal(), masks.Window(20, 20)):
        shapes = (heads, width), (kv_heads, width), (kv_heads, value_width)
        half = [torch.randn(2, h, n, d).bfloat16().requires_grad_() for h, d in shapes]
        wide = [x.detach().double().requires_grad_() for x in half]
        weights = torch.randn(2, heads, n, value_width).bfloat16()
        own, exact = saccade.attention(*half, mask, impl="native"), saccade.attention(*wide, mask, impl="reference")
        found = [own, *torch.autograd.grad(own, half, weights)]
        right = [exact, *torch.autograd.grad(exact, wide, weights.double())]
        for x, y in zip(found, right):
            assert (x.double() - y).norm() < 0.005 * y.norm(), (n, mask)
        own, exact = (saccade.AttentionMatrix(*x[:2], mask, impl="native").received() for x in (half, wide))
        assert (own - exact).norm() < 1e-5 * exact.norm(), (n, mask)
print("same")
"""
    env = os.environ | {"PYTHONPATH": built(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.stdout == "same\n", run.stderr[-3000:]


@needs_native
@pytest.mark.slow
def test_no_step_out_of_bounds_and_nothing_undefined(tmp_path: Path) -> None:
    """The sanitizers, which end the process at the first fault, find none at any level."""
    path = built(tmp_path, SACCADE_CPU_SANITIZE="1")
    code = """
import torch, saccade
from saccade import masks, positions
torch.manual_seed(0)
def tried(dtype, sizes, mask, **options):
    batch, heads, kv_heads, q_len, kv_len, width, value_width = sizes
    shapes = [(batch, heads, q_len, width), (batch, kv_heads, kv_len, width), (batch, kv_heads, kv_len, value_width)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    bias = options.get("bias")
    extra = [] if bias is None else [bias.requires_grad_()] if isinstance(bias, torch.Tensor) else [*bias.parameters()]
    out = saccade.attention(*tensors, mask, impl="native", **options)
    torch.autograd.grad(out.float().square().sum(), [*tensors, *extra])
    options.pop("dropout_p", None)
    with torch.no_grad():
        saccade.AttentionMatrix(*tensors[:2], mask, impl="native", **options).summary()
dtypes = [torch.float32, *([torch.bfloat16] if __import__("saccade_cpu").abilities() >= 3 else [])]
for dtype in dtypes:
    several = [(1, 4, 2, 90, 90, 33, 17), (2, 4, 2, 1, 1300, 64, 64), (1, 1, 1, 1100, 1100, 16, 16)]
    for sizes in several:
        for mask in (None, masks.Causal(), masks.Window(9, 3), masks.longformer(8, [0]), masks.Strided(3)):
            tried(dtype, sizes, mask)
    sizes = (1, 4, 2, 90, 90, 33, 17)
    tried(dtype, sizes, masks.Causal(), dropout_p=0.2, softcap=5.0)
    for bias in (positions.ALiBi(4), positions.T5(4), torch.randn(1, 4, 90, 90), torch.randn(1, 1, 1, 90)):
        tried(dtype, sizes, masks.Window(20, 0), bias=bias)
print("clean")
"""
    libraries = [
        subprocess.run(
            [os.environ.get("CXX", "g++"), f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    highest = abilities() or 0
    for level in range((4 if highest == 3 else highest) + 1):
        env = os.environ | {
            "SACCADE_CPU_LEVEL": str(level),
            "ASAN_OPTIONS": "detect_leaks=0",
            "LD_PRELOAD": " ".join(libraries),
            "PYTHONPATH": path,
        }
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert run.stdout == "clean\n", run.stderr[-3000:]


@needs_native
def test_a_long_rule_with_a_step_goes_to_kernels_that_gather_its_keys(monkeypatch):
    monkeypatch.setattr("saccade.engine.kernels.native.is_on", lambda: True)
    query, rule = torch.randn(1, 1, 2048, 64), masks.sparse_transformer(45)
    matrix = sc.AttentionMatrix(query, query, rule)
    assert matrix.explain().kernel == "fused"
    narrow, half = query[..., :8], query.bfloat16()  # less is multiplied between the steps, or for less
    assert sc.AttentionMatrix(narrow, narrow, rule).explain().kernel == "native"
    is_left = bool(Native().verdict(sc.AttentionMatrix(half, half, rule).inputs, Request()).should_skip)
    assert is_left is (read_dtype(torch.bfloat16) is torch.float32)
    assert sc.AttentionMatrix(query[:, :, :1024], query[:, :, :1024], rule).explain().kernel == "native"
    biased = sc.AttentionMatrix(query, query, rule, bias=torch.zeros(1, 1, 1, 2048))
    assert biased.explain().kernel == "native"  # `fused` would write the bias of each tile to memory
    assert matrix.explain(dropout_p=0.1).kernel == "native"  # the next one with dropout is slower still


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_are_converted_if_enough_queries_repay_it(dtype: torch.dtype, monkeypatch) -> None:
    """Slow half-precision inputs are converted for many queries; ``impl="native"`` always runs."""
    monkeypatch.setattr("saccade.engine.kernels.native.is_on", lambda: True)
    monkeypatch.setattr("saccade.engine.kernels.native.abilities", lambda: 0)
    key, enough = torch.randn(1, 2, 4096, 32, dtype=dtype), 128 if dtype is torch.bfloat16 else 8

    def reasons(
        rows: int, impl: str = "auto", *, is_slow: bool = True, trains: bool = False, bias: Tensor | None = None
    ) -> tuple[str, ...]:
        monkeypatch.setattr(aten_flash, "multiplies_slowly", lambda _: is_slow)
        query = torch.randn(1, 4, rows, 32, dtype=dtype, requires_grad=trains)
        verdict = Native().verdict(sc.AttentionMatrix(query, key, bias=bias).inputs, Request(impl=impl))
        assert not verdict.cannot
        return verdict.should_skip

    assert reasons(enough // 2) == ()  # two query heads share each key
    assert reasons(enough // 2 - 1)[0].startswith(f"{enough - 2} queries per key are too few to repay converting")
    assert reasons(enough, is_slow=False)[0].startswith(f"torch multiplies {str(dtype)[6:]}")
    assert reasons(1, impl="native") == ()
    assert reasons(1, trains=True) == ()
    bias = torch.zeros(1, 1, 1, 4096, dtype=dtype)
    assert reasons(2, bias=bias) == ()
    assert reasons(1, bias=bias)[0].startswith("2 queries per key are too few to repay converting")
