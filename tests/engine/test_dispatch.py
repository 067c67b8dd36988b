"""Tests of the choice of a kernel by device, mask, length and dtype. Devices are faked, so that none is needed."""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine.dispatch import Request, choose_kernel, reasons_to_skip
from saccade.engine.kernels.kernel import Kernel

PACKED = masks.Documents([[1000, 3096], [4096]], rule=masks.Causal())
SINK = {"sink_logit": (4,)}
FLOAT32, HALF = (torch.float32,), (torch.bfloat16, torch.float16)
ANY = (*FLOAT32, *HALF)
TABLE = [
    # device, dtypes, mask, (q_len, kv_len), options, lse asked for: kernel
    ("cuda", ANY, None, (4096, 4096), {}, False, "sdpa"),
    ("cuda", ANY, masks.Causal(), (4096, 4096), {}, False, "sdpa"),
    ("cuda", ANY, masks.Causal(), (1, 4096), {}, False, "sdpa"),
    ("cuda", ANY, None, (7, 9), {}, False, "sdpa"),
    ("cuda", ANY, masks.Causal(), (16, 4096), {}, False, "tiled"),
    ("cuda", ANY, masks.Causal(), (2048, 4096), {}, False, "flex"),
    ("cuda", FLOAT32, masks.Causal(), (4096, 4096), {}, True, "flex"),
    ("cuda", FLOAT32, masks.Causal(), (4096, 4096), SINK, False, "flex"),
    ("cuda", FLOAT32, masks.Causal(), (512, 512), SINK, False, "tiled"),
    ("cuda", HALF, masks.sliding_window(1024), (8192, 8192), {}, False, "varlen"),
    ("cuda", FLOAT32, masks.sliding_window(1024), (8192, 8192), {}, False, "flex"),
    ("cuda", HALF, masks.sliding_window(100), (512, 512), {}, False, "varlen"),
    ("cuda", FLOAT32, masks.sliding_window(100), (512, 512), {}, False, "tiled"),
    ("cuda", HALF, PACKED, (4096, 4096), {}, False, "varlen"),
    ("cuda", FLOAT32, PACKED, (4096, 4096), {}, False, "flex"),
    ("cuda", ANY, masks.longformer(256, [0]), (16384, 16384), {}, False, "flex"),
    ("cuda", ANY, masks.bigbird(64, random_blocks=3), (16384, 16384), {}, False, "flex"),
    ("cuda", ANY, masks.Causal() & masks.Padding([4096, 3000]), (4096, 4096), {}, False, "flex"),
    ("cuda", ANY, masks.Causal(), (4096, 4096), {"softcap": 30.0}, False, "flex"),
    ("cuda", ANY, masks.Causal(), (4096, 4096), {"bias": positions.ALiBi(4)}, False, "flex"),
    ("cuda", ANY, masks.Causal(), (4096, 4096), {"scale": -1.0}, False, "flex"),
    ("cuda", ANY, lambda b, h, q, kv: q >= kv, (4096, 4096), {}, False, "tiled"),
    ("cuda", FLOAT32, masks.Causal(), (4096, 4096), {"score": scores.Additive(64, 64, 8)}, False, "tiled"),
    ("cuda", (torch.float64,), masks.Causal(), (4096, 4096), {}, False, "sdpa"),
    ("cuda", (torch.float64,), masks.Causal(), (4096, 4096), {}, True, "tiled"),
    *((device, ANY, None, (4096, 4096), {}, False, "sdpa") for device in ("mps", "xpu")),
    *((device, ANY, masks.Causal(), (4096, 4096), {}, False, "sdpa") for device in ("mps", "xpu")),
    *((device, ANY, masks.sliding_window(1024), (8192, 8192), {}, False, "tiled") for device in ("mps", "xpu")),
    *((device, ANY, masks.Causal(), (4096, 4096), {}, True, "tiled") for device in ("mps", "xpu")),
    ("cpu", ANY, None, (4096, 4096), {}, False, "fused"),
    ("cpu", ANY, masks.longformer(256, [0]), (16384, 16384), {}, True, "fused"),
    ("cpu", ANY, masks.Causal(), (4096, 4096), {"softcap": 30.0}, False, "tiled"),
]


class Found(NamedTuple):
    kernel: Kernel
    skipped: dict[str, tuple[str, ...]]


def route(device, dtype, mask, lengths, options, needs_lse, **more):
    """Return the kernel that would run on a device, asked with a fake query there."""
    q_len, kv_len = lengths
    query, key = (torch.zeros((), dtype=dtype).expand(2, heads, n, 64) for heads, n in ((4, q_len), (2, kv_len)))
    made = {name: torch.zeros(x) if name == "sink_logit" else x for name, x in options.items()}
    given = sc.AttentionMatrix(query, key, mask, **made).inputs
    if device != "cpu":
        with FakeTensorMode():
            given = given.replaced(query=torch.empty(query.shape, dtype=dtype, device=device))
    request = Request(needs_lse=needs_lse, **more)
    kernel = choose_kernel(given, request)
    return Found(kernel, reasons_to_skip(given, request, kernel))


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize(
    ("device", "dtype", "mask", "lengths", "options", "needs_lse", "expected"),
    [
        pytest.param(row[0], dtype, *row[2:], id=f"{number}-{row[0]}-{str(dtype)[6:]}-{row[-1]}")
        for number, row in enumerate(TABLE)
        for dtype in row[1]
    ],
)
def test_the_table(device, dtype, mask, lengths, options, needs_lse, expected):
    found = route(device, dtype, mask, lengths, options, needs_lse)
    assert found.kernel.name == expected
    assert all(reasons for reasons in found.skipped.values())


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_cases_that_every_gpu_leaves_to_tiled(device):
    plain = (device, torch.float32, masks.Causal(), (4096, 4096), {}, False)
    assert route(*plain, dropout_p=0.1).kernel.name == "tiled"
    assert route(*plain, needs_backward=True).kernel.name == "tiled"


def test_an_environment_variable_leaves_the_others_out(monkeypatch):
    plain = ("cuda", torch.bfloat16, masks.sliding_window(1024), (8192, 8192), {}, False)
    monkeypatch.setenv("SACCADE_GPU", "tiled")
    found = route(*plain)
    assert found.kernel.name == "tiled"
    assert found.skipped["varlen"] == ("SACCADE_GPU=tiled disables it",)
    assert found.skipped["flex"] == ("SACCADE_GPU=tiled disables it",)
    assert route(*plain, impl="flex").kernel.name == "flex"
    monkeypatch.setenv("SACCADE_GPU", "fast")
    with pytest.raises(ValueError, match="SACCADE_GPU must be auto or tiled in the environment; got 'fast'"):
        route(*plain)


def test_reasons_are_reported():
    found = route("cuda", torch.float32, masks.sliding_window(100), (512, 512), {}, True)
    assert found.skipped["sdpa"] == (
        "it supports full masks, and causal masks with as many queries as keys",
        "it does not return the lse, which is needed here",
    )
    assert found.skipped["varlen"] == ("it has no float32", "its lse has no gradient")
    (reason,) = found.skipped["flex"]
    assert reason.endswith("pairs are too few to repay compiling (at least 33,554,432 are needed)")


def test_positions_in_tables_are_no_values():
    places = {"q_positions": torch.arange(4096), "kv_positions": torch.arange(4096).flip(0)}
    found = route("cuda", torch.float32, masks.Causal(), (4096, 4096), places, False)
    assert found.kernel.name == "tiled"
    assert found.skipped["flex"] == ("its mask is not hashable, so its compiled form could not be reused",)
