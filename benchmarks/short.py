"""What does a short sequence cost beside SDPA, where every microsecond of Python shows?"""

import torch
from torch.nn import functional as F

import saccade as sc
from benchmarks.measuring import compare, undisturbed
from saccade import masks


def main(peak: float) -> list[tuple[str, str, str, bool]]:
    """Rows of (question, measured, target, met)."""
    rows = []
    causal = masks.Causal()
    for n in (16, 64, 128, 256, 512):
        q, k, v = (torch.randn(1, 8, n, 64) for _ in range(3))
        for name, mask in (("full", None), ("causal", causal)):
            ours = lambda q=q, k=k, v=v, mask=mask: sc.attention(q, k, v, mask)  # noqa: E731
            theirs = lambda q=q, k=k, v=v, mask=mask: F.scaled_dot_product_attention(  # noqa: E731
                q, k, v, is_causal=mask is not None
            )
            torch.testing.assert_close(ours(), theirs(), rtol=1e-5, atol=1e-5)
            runs = 1000 if n <= 128 else 200
            pair, quiet = undisturbed(
                lambda a=ours, b=theirs, runs=runs: compare(a, b, runs=runs, warm_up=50), peak=peak
            )
            allowed = 1.2 * pair.theirs + 20e-6
            rows.append(
                (
                    f"{name}, n={n}, float32, forward",
                    f"{1e6 * pair.ours:.0f} µs  (SDPA {1e6 * pair.theirs:.0f} µs)" + ("" if quiet else "  [disturbed]"),
                    f"at most 1.2x SDPA + 20 µs = {1e6 * allowed:.0f} µs",
                    pair.ours <= allowed,
                )
            )
    return rows
