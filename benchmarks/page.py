"""Size of a page of 10,000 tokens in 144 heads, the time until it is open, and its frame rate during panning."""

import base64
import json
import math
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

import saccade as sc
from benchmarks.measuring import Referee
from benchmarks.reporting import Row, duration
from saccade.viz.page.document import document
from saccade.viz.page.html_report import checked_options, page_parts

N, LAYERS, HEADS, DIM = 10_000, 12, 12, 32
SIZE = 8_000_000  # what a page has room for, if nothing is said
TITLE = f"a page of {LAYERS * HEADS} heads, {N} tokens, causal"
TITLE_ZH = f"{LAYERS * HEADS} 个头的页面，{N} 个词元，因果"
MOST_BYTES, MOST_SECONDS, FRAMES = 10_000_000, 3.0, 30.0
_PAN = """async () => {
  const map = saccade.mapView, start = performance.now(), before = map.frames;
  let steps = 0;
  await new Promise((done) => {
    const step = () => {
      map.look(100 + (7 * ++steps) % 4000, 200 + (5 * steps) % 4000, TOKENS, TOKENS);
      if (performance.now() - start < 3000) requestAnimationFrame(step);
      else done();
    };
    requestAnimationFrame(step);
  });
  return 1000 * (map.frames - before) / (performance.now() - start);
}"""


def layers(n: int) -> list[sc.AttentionMatrix]:
    """Return heads of different sharpness that attend to different distances."""
    torch.manual_seed(0)
    angles = torch.arange(n)[:, None] * 0.05 * torch.randn(LAYERS, HEADS, 1, DIM // 2)
    turned = torch.cat([angles.cos(), angles.sin()], -1) * (1 + torch.arange(HEADS)[:, None, None] % 4)
    query, key = torch.randn(2, LAYERS, HEADS, n, DIM) + turned
    return [sc.AttentionMatrix(query[i, None], key[i, None], sc.masks.Causal()) for i in range(LAYERS)]


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  an extra

    yield from _sizes()
    given = layers(N)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        start = time.perf_counter()
        sc.viz.report(given, path, tokens=[f"word{i % 997} " for i in range(N)])
        written = time.perf_counter() - start
        size = path.stat().st_size
        figures = {"seconds": written, "bytes": float(size)}
        browser = playwright.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        opened = time.perf_counter() - start
        _check(page, given)
        closely = page.evaluate("saccade.side.layers.flatMap((layer) => Object.values(layer.close))")
        told = f"at most {MOST_BYTES / 1e6:.0f} MB"
        yield Row("written", f"{_held(size, closely)}, in {duration(written)}", told, size <= MOST_BYTES, figures)
        told = f"at most {MOST_SECONDS:g} s"
        yield Row("opened", duration(opened), told, opened <= MOST_SECONDS, {"seconds": opened})
        for case, tokens in (("panning, 3,000 tokens in view", 3000), ("panning, 120 tokens in view", 120)):
            frames = page.evaluate(_PAN.replace("TOKENS", str(tokens)))
            told = f"at least {FRAMES:g} a second"
            yield Row(case, f"{frames:.0f} frames a second", told, frames >= FRAMES, {"frames": frames})
        browser.close()


def _sizes() -> Iterator[Row]:
    """Return the sizes of pages of shorter texts and their content, the same on every machine."""
    options = checked_options("page", None, "", ("", ""), 0, None, None, SIZE)
    for n in (16, 64, 128, 300, 1000):
        parts = page_parts("page", options, layers(n))
        told = json.loads(zlib.decompress(base64.b64decode(parts["index"])))["sides"][0]["layers"]
        closely = [close for layer in told for close in layer["close"].values()]
        size = sum(map(len, parts.values())) + len(document("", {}))
        yield Row(f"{n} tokens", _held(size, closely), "", None, {"bytes": float(size), "heads": float(len(closely))})


def _held(size: int, closely: list[dict[str, int]]) -> str:
    weights = "all weights" if closely[0]["whole"] else f"{closely[0]['k']} weights of each token"
    return f"{size / 1e6:.1f} MB: {len(closely)} heads closely, {weights}"


def _check(page, given: list[sc.AttentionMatrix]) -> None:  # type: ignore[no-untyped-def]  # playwright is an extra
    """Check that a weight on the page equals that of the matrix."""
    now = page.evaluate("saccade.state.now")
    row = given[now["layer"]][0, now["head"], 5000]
    weight, is_exact = page.evaluate(f"saccade.reading.at(5000, {int(row.argmax())})")
    if not (is_exact and math.isclose(weight, row.max().item(), rel_tol=1e-3)):
        raise AssertionError(f"the page says {weight}, the matrix {row.max().item()}")


def _chromium() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise FileNotFoundError("page: a Chromium must be installed; got none.\nHint: apt-get install chromium")
    return found
