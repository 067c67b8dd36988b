"""On a GPU: what does the choice of kernels, the mask and the look for NaN cost beside torch's own calls?"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import saccade as sc
from benchmarks.checking import assert_rows_by_definition
from benchmarks.measuring import Call, Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks

HEADS, DIM, DTYPE = 8, 64, torch.bfloat16
PLAIN, LONG, DECODE, LOOK = (2048, 8192), (16_384, 65_536), 32_768, 16_384
TITLE = f"on a GPU, {HEADS} heads of {DIM}, bfloat16"
TITLE_ZH = f"在 GPU 上，{HEADS} 个头，每头宽 {DIM}，bfloat16"
SPARSE = {"window": masks.sliding_window(1024), "longformer": masks.longformer(512, [0])}
PLAIN_TARGET, SPARSE_TARGET, MOST_FORWARDS = 0.95, 0.9, 6.0
ROUNDS = 20


def measure(referee: Referee, device: str = "cuda") -> Iterator[Row]:
    """Rows of this question; one that says so where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        yield Row("everything", "not measured: there is no CUDA device here", "", None, {})
        return
    name = torch.cuda.get_device_name() if device == "cuda" else device
    quiet = referee.unruffled()  # whose product runs on the processor
    yield from _plain(quiet, device, name)
    yield from _sparse(quiet, device)
    yield from _decode(quiet, device)
    yield from _statistics(quiet, device)


def _inputs(n: int, device: str, q_len: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, m, DIM, device=device, dtype=DTYPE) for m in (q_len or n, n, n)]


def _plain(referee: Referee, device: str, name: str) -> Iterator[Row]:
    for n in PLAIN:
        tensors = _inputs(n, device)
        for case, mask in (("full", None), ("causal", masks.Causal())):
            _check(tensors, mask)
            ours = _synchronised(lambda t=tensors, m=mask: sc.attention(*t, m), device)
            theirs = _synchronised(
                lambda t=tensors, m=mask: F.scaled_dot_product_attention(*t, is_causal=m is not None), device
            )
            for part, run in (("forward", _same), ("forward + backward", _there_and_back)):
                calls = (run(ours, tensors), run(theirs, tensors))
                pair = compare(*calls, rounds=ROUNDS, referee=referee)
                yield ratio_row(f"{case}, {n}, {part}", pair, peer="SDPA", target=PLAIN_TARGET, note=name)


def _sparse(referee: Referee, device: str) -> Iterator[Row]:
    compiled = torch.compile(flex_attention)
    for case, mask in SPARSE.items():
        for n in LONG:
            tensors = _inputs(n, device)
            _check(tensors, mask)
            theirs_blocks = create_block_mask(mask, None, None, n, n, device=device)
            ours = _synchronised(lambda t=tensors, m=mask: sc.attention(*t, m), device)
            theirs = _synchronised(lambda t=tensors, b=theirs_blocks: compiled(*t, block_mask=b), device)
            pair = compare(ours, theirs, rounds=ROUNDS, referee=referee)
            yield ratio_row(f"{case}, {n}, forward", pair, peer="FlexAttention", target=SPARSE_TARGET)


def _decode(referee: Referee, device: str) -> Iterator[Row]:
    tensors = _inputs(DECODE, device, 1)
    _check(tensors, masks.Causal())
    ours = _synchronised(lambda: sc.attention(*tensors, masks.Causal()), device)
    theirs = _synchronised(lambda: F.scaled_dot_product_attention(*tensors), device)
    pair = compare(ours, theirs, rounds=ROUNDS, referee=referee)
    yield ratio_row(f"one token, {DECODE} keys", pair, peer="SDPA")


def _statistics(referee: Referee, device: str) -> Iterator[Row]:
    tensors = _inputs(LOOK, device)
    matrix = sc.AttentionMatrix(*tensors[:2], masks.Causal())
    forward = _synchronised(lambda: matrix @ tensors[2], device)
    questions: dict[str, Callable[[], object]] = {
        "entropy": matrix.entropy,
        "received": matrix.received,
        "summary": matrix.summary,
    }
    for case, question in questions.items():
        pair = compare(_synchronised(question, device), forward, rounds=ROUNDS // 4 or 1, referee=referee)
        forwards = pair.ours / pair.theirs
        told, met = f"at most {MOST_FORWARDS:g}", forwards <= MOST_FORWARDS
        yield Row(f"{case}, causal, {LOOK}", f"{forwards:.1f} forwards", told, met, {"forwards": forwards})


def _check(tensors: list[Tensor], mask: masks.Mask | None) -> None:
    """Rows of the definition, before anything is timed."""
    out = sc.attention(*tensors, mask)
    if out.shape[2] > 1:
        assert_rows_by_definition(out.cpu(), [x.cpu() for x in tensors], masks.Full() if mask is None else mask)


def _synchronised(call: Callable[[], object], device: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        out = call()
        if device == "cuda":
            torch.cuda.synchronize()
        return out  # type: ignore[return-value]  # of products; of questions nobody reads it

    return run


def _same(call: Callable[[], Tensor], tensors: list[Tensor]) -> Call:
    return call


def _there_and_back(call: Callable[[], Tensor], tensors: list[Tensor]) -> Call:
    def run() -> None:
        for x in tensors:
            x.requires_grad_().grad = None
        call().sum().backward()
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        for x in tensors:
            x.requires_grad_(False)

    return run
