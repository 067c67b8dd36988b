"""Two recordings beside one another; what comes from outside; runs that go on; the page in a notebook."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from tests.viz.browser.page_driver import at, pixel, until

from saccade import AttentionMatrix, masks, record, viz
from saccade.nn import MultiHeadAttention
from saccade.statistics import Pooled
from saccade.viz.page.document import code, style
from saccade.viz.page.html_report import checked_options, page_parts

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<b>bold</b>",
    "$x^{$",
    "{{script}}",
    "שלום",
    "مرحبا",
    "🙂",
    "👩‍👩‍👧",
    "你",
    "Ġä",
    "½",
    "ł",
    "\x00\x1b[31m",
    "\u202eevil",
    "\ud83d",
    "javascript:alert(1)",
    "&lt;",
    "'\"`",
]


def _matrix(seed, count=9, heads=2, kv_len=None):
    torch.manual_seed(seed)
    query, key = torch.randn(1, heads, count, 8), torch.randn(1, heads, kv_len or count, 8)
    return AttentionMatrix(2 * query, key, masks.Causal() if kv_len is None else None)


@pytest.mark.ci
def test_text_from_outside_is_only_text(open_page, tmp_path):
    given = _matrix(0, len(HOSTILE))
    path = viz.report(
        given, tmp_path / "hostile.html", tokens=HOSTILE, title=HOSTILE[0], names=("<i>", "<u>"), other=given
    )
    page = open_page(path)
    assert page.title() == page.locator("h1").inner_text() == HOSTILE[0]
    assert page.locator("img, b, u, i:not(.bar)").count() == 0
    shown = page.eval_on_selector_all("[data-token]", "all => all.map((one) => one.textContent)")
    as_they_are = [0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16]
    assert [shown[place] for place in as_they_are] == [HOSTILE[place] for place in as_they_are]
    # Characters that are invisible or would reverse the line are written as escapes.
    assert shown[12:15] == ["\\x00\\x1b[31m", "\\u202eevil", "\\ud83d"]
    page.mouse.move(*at(page, 8, 0))
    assert HOSTILE[0] in page.locator(".tip").inner_text()
    page.locator('[data-token="0"]').click()
    assert HOSTILE[0] in page.locator(".strongest caption").first.inner_text()
    with page.expect_download() as download:
        page.get_by_label("Save").select_option("svg")
    with open(download.value.path(), encoding="utf-8") as file:
        assert "<img" not in file.read()


def test_fragments_of_characters_are_read(open_page, tmp_path):
    tokens = ["Hello", "Ġä", "½", "ł", "å¥½", "Ċ"]
    page = open_page(viz.report(_matrix(0, 6), tmp_path / "bytes.html", tokens=tokens))
    shown = page.eval_on_selector_all("[data-token]", "all => all.map((one) => one.textContent)")
    assert shown == ["Hello", " 你(1/3)", "你(2/3)", "你(3/3)", "好", "↵"]


@pytest.mark.ci
def test_the_policy_forbids_everything_else(open_page, browser, tmp_path):
    path = viz.report(_matrix(0), tmp_path / "page.html")
    page = browser.new_context().new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    tried = """async () => {
      const refused = [];
      document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
      document.body.append(Object.assign(document.createElement("script"), { textContent: "window.ran = true" }));
      document.body.append(Object.assign(document.createElement("img"), { src: "http://127.0.0.1:9/x.png" }));
      document.body.append(Object.assign(document.createElement("style"), { textContent: "main { color: red }" }));
      await fetch("http://127.0.0.1:9/").catch(() => {});
      await new Promise((done) => setTimeout(done, 200));
      return [refused, window.ran];
    }"""
    refused, ran = page.evaluate(tried)
    page.context.close()
    assert set(refused) == {"script-src-elem", "img-src", "style-src-elem", "connect-src"}
    assert ran is None


@pytest.mark.ci
def test_two_recordings(open_page, tmp_path):
    one, other = _matrix(0), _matrix(1)
    page = open_page(viz.report(one, tmp_path / "two.html", other=other, names=("before", "after")), "#head=1")
    recording = page.get_by_label("Recording")
    assert recording.locator("option").all_inner_texts() == ["before", "after", "after − before"]
    values = [matrix.summary().named("entropy").values[0, 1].item() for matrix in (one, other)]
    label = '[data-head="1"]'
    assert float(page.locator(label).get_attribute("aria-label").split()[-1]) == pytest.approx(values[0], rel=0.01)
    recording.select_option("1")
    assert float(page.locator(label).get_attribute("aria-label").split()[-1]) == pytest.approx(values[1], rel=0.01)
    recording.select_option("difference")
    until(page, "saccade.mapView.levels[0].signed")
    told = float(page.locator(label).get_attribute("aria-label").split()[-1])
    assert told == pytest.approx(values[1] - values[0], rel=0.01)
    page.mouse.move(*at(page, 5, 2))
    both = page.locator(".tip").inner_text().split(": ")[1].split(" | ")
    dense = [matrix.to_dense()[0, 1] for matrix in (one, other)]
    assert [float(own) for own in both] == pytest.approx([own[5, 2].item() for own in dense], rel=0.01)
    page.mouse.move(5, 5)
    change = dense[1] - dense[0]
    rose, fell = (int(own) for own in (change.argmax(), change.argmin()))
    found = page.evaluate("[...saccade.mapView.levels[0].levels]")
    assert (found[rose] > 128, found[fell] < 128) == (True, True)
    assert pixel(page, rose // 9, rose % 9)[1] < 60, "dark red for what rose most"
    assert pixel(page, fell // 9, fell % 9)[2] > 100, "blue for what fell"
    assert page.locator(".measures th[scope=col]").all_inner_texts() == ["", "before", "after"]


@pytest.mark.ci
def test_recordings_of_other_shapes(open_page, tmp_path):
    given = {"other": [_matrix(0, 5, heads=3)], "given": [_matrix(0), _matrix(1)]}
    page = open_page(viz.report(given["given"], tmp_path / "unlike.html", other=given["other"]), "#layer=1&head=1")
    page.get_by_label("Recording").select_option("difference")
    until(page, "saccade.message !== null")
    page.get_by_label("Recording").select_option("1")
    until(page, "saccade.layer.queries === 5")
    assert page.locator("[data-head]").count() == 3


def test_two_texts(open_page, tmp_path):
    given = _matrix(0, 3, kv_len=5)
    tokens = (["wir", "sehen", "etwas"], ["we", "see", "some", "thing", "there"])
    page = open_page(viz.report({"cross": given}, tmp_path / "cross.html", tokens=tokens))
    assert page.locator(".texts h3").all_inner_texts() == ["Text of the queries", "Text of the keys"]
    page.locator(".texts section").first.locator('[data-token="1"]').hover()
    assert page.locator(".strongest caption").all_inner_texts() == ["1 “sehen” looks at"]
    best = given.to_dense()[0, 0, 1].argmax().item()
    row = page.locator(".strongest tbody tr").first.locator("td")
    assert [row.nth(0).inner_text(), row.nth(1).inner_text()] == [str(best), tokens[1][best]]
    page.locator(".texts section").last.locator('[data-token="4"]').hover()
    assert page.locator(".strongest caption").all_inner_texts() == ["4 “there” is looked at by"]


@pytest.mark.slow
def test_a_long_text_is_laid_out_piece_by_piece(open_page, tmp_path):
    count = 13000
    query = torch.randn(1, 1, count, 4)
    given = AttentionMatrix(query, query, masks.Window(12, 0))
    tokens = [f"{place} " for place in range(count)]
    page = open_page(viz.report(given, tmp_path / "long.html", tokens=tokens))
    assert page.locator("[data-token]").count() == 12000
    page.locator("input[type=search]").fill("12999")
    page.locator("input[type=search]").press("Enter")
    assert page.locator('[data-token="12999"]').is_visible()
    weight, is_exact = page.evaluate("saccade.reading.at(12999, 12998)")
    assert is_exact
    assert weight == pytest.approx(given[0, 0, 12999, 12998].item(), rel=1e-3)
    weight, is_exact = page.evaluate("saccade.reading.at(12999, 12985)")
    assert not is_exact, "it is hidden, and stands in a cell with others that are not"


@pytest.mark.ci
def test_a_page_of_what_was_kept(open_page, tmp_path):
    layer = MultiHeadAttention(16, 2)
    with record(layer, keep="statistics") as recording:
        layer(torch.randn(1, 6, 16))
    page = open_page(viz.report(recording, tmp_path / "statistics.html"))
    assert "NaN" not in page.locator(".heads").inner_text()
    assert page.evaluate("saccade.mapView.levels.length") == 0
    page.mouse.move(*at(page, 3, 2))
    assert page.locator(".tip").inner_text().endswith("not kept in this recording")
    page.locator('[data-token="3"]').click()
    assert page.get_by_text('sc.record(model, keep="qk") keeps the maps').is_visible()


@pytest.mark.slow
def test_a_run_that_goes_on_is_read_anew(open_page, tmp_path):
    layer, path = MultiHeadAttention(16, 2), tmp_path / "live.html"
    with record(layer, keep="qk") as recording, viz.live_report(recording, path, every=0.5):
        layer(torch.randn(1, 6, 16))
        while not path.exists():
            torch.ones(1)
        page = open_page(path, "#head=1")
        assert "reloads every" in page.locator("header").inner_text()
        layer(torch.randn(1, 7, 16))
        until(page, "document.body.dataset.ready && saccade.layer.queries === 7")
        assert page.evaluate("saccade.state.now.head") == 1, "what is looked at stays"
    until(page, "document.body.dataset.ready && !saccade.given.live")


def test_in_a_notebook(browser):
    options = checked_options(None, "In a notebook", ("first", "second"), 0, None, None, 10**6)
    given = {"parts": page_parts(options, [_matrix(0)]), "style": style(), "height": 500}
    page = browser.new_context().new_page()
    module = base64.b64encode(code("notebook").encode()).decode()
    page.set_content("<div id=out></div>")
    page.evaluate(
        """async ([module, given]) => {
          const { default: widget } = await import("data:text/javascript;base64," + module);
          widget.render({ model: { get: (name) => JSON.parse(given)[name] }, el: document.querySelector("#out") });
        }""",
        [module, json.dumps(given)],
    )
    tiles = page.locator("#out [data-head]")
    tiles.first.wait_for()
    assert tiles.count() == 2
    tiles.nth(1).click()
    tiles.nth(1).press("ArrowLeft")
    assert page.locator("#out .map h2").inner_text().startswith("layer 0 (0), head 0")
    assert page.url == "about:blank"
    page.context.close()


@pytest.mark.ci
def test_a_mean_of_a_cell_is_not_called_a_bound(open_page, tmp_path):
    layer = MultiHeadAttention(16, 2)
    with record(layer, keep=[Pooled(4)]) as recording:
        layer(torch.randn(1, 12, 16))
    page = open_page(viz.report(recording, tmp_path / "means.html"))
    page.mouse.move(*at(page, 7, 5))
    assert "all of the cell" in page.locator(".tip").inner_text()
    page.mouse.click(*at(page, 7, 5))
    assert page.locator(".strongest td:last-child").first.inner_text().startswith("Σ")
    with record(layer, keep=[Pooled(4, "max")]) as recording:
        layer(torch.randn(1, 12, 16))
    page = open_page(viz.report(recording, tmp_path / "most.html"))
    page.mouse.move(*at(page, 7, 5))
    assert "at most" in page.locator(".tip").inner_text()
