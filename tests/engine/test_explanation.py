"""Forecasts of `explain` agree with what the product then computes and allocates."""

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.kernels.longer_cases import stretched
from tests.engine.kernels.native_levels import NATIVE, needs_native
from tests.sampled import sampled
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import saccade as sc
from saccade import masks, positions
from saccade.engine.kernels import aten_flash, fused_threads, tiled
from saccade.engine.kernels.kernel import Request
from saccade.engine.kernels.matmul import Matmul
from saccade.engine.kernels.native import Native, abilities
from saccade.engine.memory_accounting import counted
from saccade.masks import plan_cache as kept_plans
from saccade.testing.case import Case
from saccade.testing.cases import CASES

# Forecasts may be off by a tenth of the real size, or by a few small tensors that are not counted.
SHARE, SLACK = 0.1, 1 << 16


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the plans of earlier products, and let one thread run everything, since the profiler sees only one."""
    kept_plans._cached_plan.cache_clear()
    monkeypatch.setattr(fused_threads, "_MODE_PROBES", (lambda: True,))


def peak(run: Callable[[], object]) -> int:
    """Return the peak memory of a call by torch's allocator, results and temporary tensors included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    del result
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


class Counted:
    """Counts of computed pairs, and of calls of torch's flash operation."""

    pairs = 0


def _pairs_of_a_call(query: Tensor, key: Tensor, causal: bool) -> int:
    """Return the pairs that torch's operation computes, by blocks of 512 keys up to the last that some row sees."""
    batch, heads, rows, _ = query.shape
    height = 256 if rows >= 768 else 64 if rows >= 192 else 32
    total = 0
    for first in range(0, rows, height):
        block = min(height, rows - first)
        last = min(first + block, key.shape[2]) if causal else key.shape[2]
        total += sum(block * min(512, key.shape[2] - start) for start in range(0, last, 512))
    return batch * heads * total


def _pairs_of_panels(q: Tensor, k: Tensor, starts: Tensor, runs: Tensor, spans: Tensor) -> int:
    """Return the pairs that the compiled kernel computes: panels of 64 keys for 24 rows of each item and head."""
    (batch, heads, rows, _), columns = q.shape, k.shape[2]
    blocks, total = -(-rows // 24), 0
    for item in range(batch):
        for block in range(blocks):
            at = block if len(spans) == 1 else item * blocks + block
            for first, stop, _ in runs[starts[at] : starts[at + 1]].tolist():
                height = len(range(rows)[24 * block : 24 * block + 24])
                total += sum(height * len(range(columns)[64 * n : 64 * n + 64]) for n in range(first, stop))
    return heads * total


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Count pairs at the operations themselves, and after each block of the tiled kernel."""
    count, forward, made = Counted(), aten_flash._forward, tiled._compute_block
    compiled = None if abilities() is None else torch.ops.saccade_cpu.forward

    def called(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool, **options: Any) -> Any:
        count.pairs += _pairs_of_a_call(q, k, causal)
        return forward(q, k, v, dropout_p, causal, **options)

    def block(*args: Any, **options: Any) -> Any:
        result = made(*args, **options)
        count.pairs += result.scores.numel()
        return result

    def run(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, runs: Tensor, spans: Tensor, *options: Any) -> Any:
        assert compiled is not None
        count.pairs += _pairs_of_panels(q, k, starts, runs, spans)
        return compiled(q, k, v, starts, runs, spans, *options)

    with monkeypatch.context() as patch:
        if compiled is not None:
            patch.setattr(torch.ops.saccade_cpu, "forward", run)
        patch.setattr(aten_flash, "_forward", called)
        patch.setattr(tiled, "_compute_block", block)
        yield count


def check(matrix: sc.AttentionMatrix, value: Tensor, patch: pytest.MonkeyPatch, dropout_p: float = 0.0) -> None:
    """Check the forecasts of a matrix against counts."""
    said = matrix.explain(value_dim=value.shape[3], dropout_p=dropout_p)
    seed = 1 if dropout_p else None
    with counting(patch) as count:
        most = peak(lambda: matrix.matmul(value, dropout_p=dropout_p, seed=seed))
    rows, wide = math.prod(matrix.shape[:3]), matrix.inputs.compute_dtype.itemsize
    held = most - rows * (value.shape[3] * value.element_size() + wide)
    assert said.pairs == (math.prod(matrix.shape) if said.kernel in ("reference", "matmul") else count.pairs)
    assert said.flops == 2 * said.pairs * (matrix.inputs.query.shape[3] + value.shape[3])
    assert abs(said.extra_bytes - held) <= max(SHARE * held, SLACK), (said.extra_bytes, held)


def matrix_of(case: Case, dtype: torch.dtype, impl: str) -> tuple[sc.AttentionMatrix, Tensor]:
    given = case.inputs(dtype)
    score, relative = (
        None if module is None else copy.deepcopy(module).to(dtype).requires_grad_(False)
        for module in (case.score, case.relative)
    )
    options = {
        "bias": relative if given.bias is None else given.bias,
        "scale": case.scale,
        "softcap": case.softcap,
        "sink_logit": given.sink_logit,
        "q_positions": None if case.q_positions is None else torch.tensor(case.q_positions),
        "kv_positions": None if case.kv_positions is None else torch.tensor(case.kv_positions),
    }
    return sc.AttentionMatrix(given.query, given.key, case.mask, score=score, impl=impl, **options), given.value


def takes(impl: str, matrix: sc.AttentionMatrix) -> bool:
    """Return whether a kernel can run; true if there is no compiled kernel, whose tests are then skipped."""
    limited = {"native": Native(), "matmul": Matmul()}
    if impl not in limited or (impl == "native" and abilities() is None):
        return True
    return not limited[impl].verdict(matrix.inputs, Request(impl=impl)).cannot


# torch packs keys where the processor has AMX, unless oneDNN is kept from using it: the forecast cannot know.
packs_as_told = pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN is kept from using AMX")
HOW = {
    "auto": ("auto", torch.float32, 64, ()),
    "half": ("auto", torch.bfloat16, 64, packs_as_told),
    "tiled": ("tiled", torch.float32, 64, ()),
    "matmul": ("matmul", torch.float32, 16, ()),
    "matmul-half": ("matmul", torch.bfloat16, 16, ()),
    "reference": ("reference", torch.float32, 16, ()),
    "native": ("native", torch.float32, 64, needs_native),
    "native-half": ("native", torch.bfloat16, 64, needs_native),
}
EVERY_CASE = [
    pytest.param(case, impl, dtype, factor, marks=marks, id=f"{name}-{case}")
    for name, (impl, dtype, factor, marks) in HOW.items()
    for case in CASES
    if takes(impl, matrix_of(case, dtype, impl)[0])
]


@pytest.mark.parametrize("case, impl, dtype, factor", sampled(EVERY_CASE, 4))
def test_every_case(case: Case, impl: str, dtype: torch.dtype, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, value = matrix_of(stretched(case, factor), dtype, impl)
    check(matrix, value, monkeypatch)


LONG = [
    (masks.Causal(), 8192, {}),
    (masks.Documents([1024] * 8, rule=masks.Causal()), 8192, {}),
    (masks.Documents([1000, 3000, 2000, 2000, 192], rule=masks.Causal()), 8192, {}),
    (masks.Causal() & masks.Padding([1500, 2048]), 2048, {"batch": 2}),
    (masks.Causal() & masks.Padding([300, 512], side="left", padded_len=512), 512, {"batch": 2, "heads": 4}),
    (masks.Window(256, 256), 4096, {}),
    (masks.streaming(4, 256), 4096, {"heads": 4, "kv_heads": 1}),
    (masks.longformer(64, [0, 1000]), 4096, {}),
    (masks.bigbird(64, random_blocks=2), 4096, {}),
    (masks.sparse_transformer(64), 4096, {}),
    (masks.Neighborhood(64, 64, 7), 4096, {"heads": 2}),  # rows in squares
    (masks.Neighborhood(48, 48, 3).after(1) | masks.Global([0]), 48 * 48 + 1, {"sink": True}),
    (masks.Predicate(lambda b, h, q, kv: (q + kv + h) % 5 > 0), 1024, {"heads": 2}),
    (masks.Causal(), 2048, {"scale": -0.3}),
    (masks.Causal(), 2048, {"scale": 0.0, "width": 96}),
    (masks.Causal(), 2048, {"width": 16, "heads": 4, "kv_heads": 2}),
    (masks.Causal(), 2048, {"width": 160}),
    (masks.Global([0]), 8192, {"q_len": 1, "heads": 8, "kv_heads": 2}),
    (masks.Window(300, 0) | masks.Global([0, 1, 2000, 5000]), 8192, {"q_len": 4, "heads": 8, "kv_heads": 2}),
    (masks.Causal(), 4096, {"q_len": 700}),
]
# A tile of several items and heads, whose keys a product of matrices copies where heads stand last.
LONG_BATCH = (masks.Window(50, 50), 512, {"batch": 3, "heads": 4, "kv_heads": 2})


EVERY_LONG = [
    pytest.param(mask, n, options, impl, layout, marks=marks, id=f"{impl}-{layout}-{str(mask)[:50]}-{n}-{options}")
    for impl, layout, marks in (
        ("fused", "heads first", ()),
        ("tiled", "heads first", ()),
        ("fused", "heads last", ()),
        ("native", "heads first", needs_native),
    )
    for mask, n, options in LONG
    if impl != "native" or not isinstance(mask, masks.Predicate)  # which calls functions
]


@pytest.mark.ci
@pytest.mark.parametrize("mask, n, options, impl, layout", sampled(EVERY_LONG, 3))
def test_long(
    mask: masks.Mask,
    n: int,
    options: dict[str, Any],
    impl: str,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, heads, q_len = options.get("batch", 1), options.get("heads", 1), options.get("q_len", n)
    shapes = [(heads, q_len, 64), (options.get("kv_heads", heads), n, 64)]
    shapes.append((shapes[1][0], n, options.get("width", 64)))
    query, key, value = (
        torch.randn(batch, number, length, width)
        if layout == "heads first"
        else torch.randn(batch, length, number, width).transpose(1, 2)
        for number, length, width in shapes
    )
    sink = torch.zeros(heads) if options.get("sink") else None
    matrix = sc.AttentionMatrix(query, key, mask, scale=options.get("scale"), sink_logit=sink, impl=impl)
    check(matrix, value, monkeypatch, dropout_p=0.0 if impl == "fused" else 0.1)


@pytest.mark.parametrize("layout", ["heads first", "heads last"])
def test_keys_of_several_items(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_long(*LONG_BATCH, "tiled", layout, monkeypatch)


@pytest.mark.parametrize("impl", ["fused", NATIVE])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_buffers_of_the_operation_are_one_for_each_thread(
    impl: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, before = torch.randn(1, 2, 1024, 64), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(sc.AttentionMatrix(x, x, masks.Causal(), impl=impl), x, monkeypatch)
    finally:
        torch.set_num_threads(before)


COPIED = {
    "a padded width": {"width": 50, "value_width": 20},
    "numbers apart": {"is_apart": True},
    "half precision at odd steps": {"dtype": torch.bfloat16, "value_width": 65, "is_cut": True},
    "half precision that begins between two words": {"dtype": torch.bfloat16, "is_late": True},
    "rows of a bias in half precision": {"dtype": torch.bfloat16, "bias": torch.zeros(4, 1000, 1000).bfloat16()},
    "rows of a bias whose numbers stand apart": {"bias": torch.zeros(1, 4, 1000, 1000).mT},
    "numbers of a bias that all rows share": {"bias": torch.zeros(2, 1, 1, 1000)},
    "a bias by distance": {"bias": positions.ALiBi(4)},
    "bits": {"mask": masks.Random(3, 2), "kv_heads": 1},
    "bits of every item": {"mask": masks.Dense(torch.rand(2, 1, 1000, 1000) < 0.5)},
    "words of dropout": {"kv_heads": 1, "dropout_p": 0.1, "n": 5000, "width": 16, "value_width": 16},
}


@needs_native
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_the_compiled_kernel_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(COPIED[name])
    dtype, n, width = (options.pop(key, own) for key, own in (("dtype", torch.float32), ("n", 1000), ("width", 64)))
    kv_heads, value_width = options.pop("kv_heads", 2), options.pop("value_width", width)
    tensors = [
        torch.randn(2, heads, n, own).to(dtype)
        for heads, own in ((4, width), (kv_heads, width), (kv_heads, value_width))
    ]
    if options.pop("is_apart", False):
        tensors = [*(x.mT.contiguous().mT for x in tensors[:2]), tensors[2]]
    if options.pop("is_cut", False):
        tensors = [torch.cat([x, x[..., :1]], 3)[..., : x.shape[3]] for x in tensors]
    if options.pop("is_late", False):
        tensors = [*(F.pad(x.flatten(), (1, 0))[1:].view_as(x) for x in tensors[:2]), tensors[2]]
    (query, key, value), dropout_p = tensors, options.pop("dropout_p", 0.0)
    check(sc.AttentionMatrix(query, key, impl="native", **options), value, monkeypatch, dropout_p=dropout_p)


def test_half_the_pairs_of_a_causal_mask_and_no_mask_of_it() -> None:
    x = torch.zeros(1, 1, 1, 64).expand(1, 1, 16_384, 64)
    explained = sc.AttentionMatrix(x, x, masks.Causal(), impl="fused").explain()
    assert "(51.6 %)" in str(explained)
    assert explained.extra_bytes < torch.get_num_threads() * 2**20


@pytest.mark.ci
@pytest.mark.parametrize("impl", ["fused", "tiled", "reference"])
@pytest.mark.parametrize(
    "mask",
    [masks.Causal(), masks.Documents([20_000] * 5, rule=masks.Causal()), masks.Predicate(lambda b, h, q, kv: kv <= q)],
)
def test_to_ask_costs_little(impl: str, mask: masks.Mask) -> None:
    x = torch.zeros(1, 4, 1, 64).expand(1, 4, 100_000, 64)
    matrix = sc.AttentionMatrix(x, x, mask, impl=impl)
    assert counted(matrix.explain).most < 16 * 2**20
    assert not any(isinstance(x, Tensor) for x in matrix.inputs.plan.memo.values())


@needs_native
@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.Documents([4_000] * 5, rule=masks.Causal()), masks.Random(2, 64)]
)
def test_to_ask_the_compiled_kernel_costs_little(mask: masks.Mask) -> None:
    x = torch.zeros(1, 4, 1, 64).expand(1, 4, 20_000, 64)
    matrix = sc.AttentionMatrix(x, x, mask, impl="native")
    assert counted(matrix.explain).most < 16 * 2**20
    assert not any(isinstance(x, Tensor) for x in matrix.inputs.plan.memo.values())


@pytest.mark.parametrize(
    "mask, line",
    [
        (masks.Window(256, 0), "window   257 keys, the query's own included"),
        (masks.sliding_window(256), "window   256 keys, the query's own included"),
        (masks.Causal() & (masks.Window(100, 0) | masks.Global([0])), "window   101 keys, the query's own included"),
        (
            masks.Window(3, 3) | masks.Window(0, 0) | masks.Global([0]),
            "window   1 and 7 keys, the query's own included",
        ),
        (masks.Window(0, 0), "window   1 key, the query's own included"),
        (masks.Causal(), None),
        (masks.Window(None, 0), None),
    ],
    ids=str,
)
def test_the_keys_of_windows_are_counted(mask: masks.Mask, line: str | None) -> None:
    x = torch.randn(1, 1, 300, 8)
    lines = str(sc.AttentionMatrix(x, x, mask).explain()).splitlines()
    assert [one for one in lines if one.startswith("window")] == ([] if line is None else [line])


def test_a_window_has_the_keys_that_its_rows_have() -> None:
    for left, right in ((0, 0), (256, 0), (3, 5)):
        window = masks.Window(left, right)
        assert window.keys == int(window.to_dense(600)[0, 0, 300].sum())
    assert masks.Window(None, 3).keys is masks.Window(3, None).keys is None
