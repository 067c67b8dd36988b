"""Tests of what a page shows and of its reactions to mouse and keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.viz.browser.page_driver import at, pixel, until

from saccade import AttentionMatrix, masks, viz

TOKENS = ["the", "cat", "sat", "on", "the", "mat", "and", "then", "the", "cat", "sat", "down", "again"]
COUNT = len(TOKENS)


def _matrices(layers: int = 3, heads: int = 4, count: int = COUNT) -> list[AttentionMatrix]:
    torch.manual_seed(0)
    made = [torch.randn(2, 1, heads, count, 8) for _ in range(layers)]
    return [AttentionMatrix(2 * query, key, masks.Causal()) for query, key in made]


@pytest.fixture(scope="module")
def given() -> list[AttentionMatrix]:
    return _matrices()


@pytest.fixture(scope="module")
def path(given, tmp_path_factory) -> Path:
    return viz.report(given, tmp_path_factory.mktemp("page") / "page.html", tokens=TOKENS, title="Cats & mats")


def _tile(page, layer, head):
    return page.locator(f'[data-layer="{layer}"][data-head="{head}"]')


def _order(page):
    """Return the numbers of the heads, four a layer, in the displayed order."""
    count = "all => all.map((one) => 4 * one.dataset.layer + 1 * one.dataset.head)"
    return page.eval_on_selector_all("[data-head]", count)


def _chosen(page):
    return page.evaluate("(({layer, head}) => [layer, head])(saccade.state.now)")


def test_every_head_is_there(open_page, path, given):
    page = open_page(path)
    assert page.title() == page.locator("h1").inner_text() == "Cats & mats"
    assert page.locator("[data-head]").count() == 12
    entropy = given[1].summary().named("entropy").values[0, 2]
    assert _tile(page, 1, 2).get_attribute("aria-label") == f"layer 1, head 2: entropy {float(f'{entropy:.3g}'):g}"


def test_a_click_shows_a_head(open_page, path, given):
    page = open_page(path)
    _tile(page, 2, 1).click()
    assert _chosen(page) == [2, 1]
    assert page.locator(".map h2").inner_text().startswith("layer 2 (2), head 1")
    assert _tile(page, 2, 1).get_attribute("aria-pressed") == "true"
    assert page.locator('[aria-pressed="true"]').count() == 1
    row = page.locator(".measures tr", has=page.locator("th", has_text="largest weight")).locator("td").first
    assert float(row.inner_text()) == pytest.approx(
        float(given[2].summary().named("largest_weight").values[0, 1]), rel=0.01
    )


def test_every_weight_can_be_read(open_page, path, given):
    page = open_page(path, "#layer=1&head=3")
    found = page.evaluate(
        """() => {
          const all = [...Array(13).keys()], plain = (weight) => (Number.isNaN(weight) ? null : weight);
          const shown = ([weight, isExact]) => [plain(weight), isExact];
          return all.map((i) => all.map((j) => shown(saccade.reading.at(i, j))));
        }"""
    )
    dense = given[1].to_dense()[0, 3]
    for i in range(COUNT):
        for j in range(COUNT):
            weight, is_exact = found[i][j]
            assert is_exact
            assert (weight is None) == (j > i)
            assert weight is None or weight == pytest.approx(dense[i, j].item(), rel=1e-3, abs=1e-6)


def test_colours_stand_for_weights(open_page, path, given):
    page = open_page(path, "#layer=0&head=0&scale=linear")
    page.mouse.move(5, 5)
    dense = given[0].to_dense()[0, 0]
    assert pixel(page, 2, 9) == [211, 216, 218]  # hidden
    visible = [(i, j) for i in range(COUNT) for j in range(i + 1)]
    visible.sort(key=lambda pair: dense[pair].item())
    light = [sum(pixel(page, *pair)) for pair in visible[:: len(visible) // 8]]
    assert light == sorted(light, reverse=True)
    assert light[0] > light[-1] + 200
    page.keyboard.press("l")
    middle = visible[len(visible) // 4]
    assert sum(pixel(page, *middle)) < 765 - 60, "on a logarithmic scale small weights are seen"


def test_pointing_at_the_map_tells_the_weight(open_page, path, given):
    page = open_page(path, "#layer=1&head=0")
    page.mouse.move(*at(page, 8, 4))
    said = page.locator(".tip").inner_text()
    assert said.startswith("8 “the” → 4 “the”: ")
    assert float(said.split(": ")[1]) == pytest.approx(given[1].to_dense()[0, 0, 8, 4].item(), rel=0.01)
    page.mouse.move(*at(page, 2, 9))
    assert "hidden by the mask" in page.locator(".tip").inner_text()


def test_pointing_at_a_token_lights_what_it_looks_at(open_page, path, given):
    page = open_page(path, "#layer=1&head=0&scale=linear")
    page.locator('[data-token="9"]').hover()
    backgrounds = page.eval_on_selector_all("[data-token]", "all => all.map((one) => one.style.background)")
    strength = [float(found[1]) if (found := re.search(r"/ ([\d.]+)\)", own)) else 0.0 for own in _alpha(backgrounds)]
    weights = given[1].to_dense()[0, 0, 9]
    assert strength.index(max(strength)) == weights.argmax().item()
    assert all(own == 0 for own in strength[10:]), "what comes later is not seen"
    shadows = page.eval_on_selector_all("[data-token]", "all => all.map((one) => one.style.boxShadow)")
    assert [bool(own) for own in shadows][:9] == [False] * 9, "earlier tokens do not look at it"
    first = page.locator(".strongest.at tbody tr").first.locator("td")
    assert first.nth(0).inner_text() == str(weights.argmax().item())
    assert float(first.nth(2).inner_text()) == pytest.approx(weights.max().item(), rel=0.01)
    queries = given[1].to_dense()[0, 0, :, 9]
    assert page.locator(".strongest.from tbody tr").first.locator("td").nth(0).inner_text() == str(
        queries.argmax().item()
    )
    page.mouse.move(5, 5)
    assert page.locator(".strongest").count() == 0


def _alpha(backgrounds):
    """Return the alpha of ``rgba(r, g, b, a)`` or ``rgb(r g b / a)``."""
    return [re.sub(r"rgba\(.*, ([\d.]+)\)", r"rgb(/ \1)", own) for own in backgrounds]


def test_a_chosen_token_stays(open_page, path):
    page = open_page(path)
    page.locator('[data-token="6"]').click()
    page.mouse.move(5, 5)
    assert page.locator(".strongest caption").first.inner_text() == "6 “and” looks at"
    page.keyboard.press(".")
    assert page.locator(".strongest caption").first.inner_text() == "7 “then” looks at"
    page.keyboard.press("Escape")
    assert page.locator(".strongest").count() == 0


@pytest.mark.ci
def test_text_is_found_over_tokens(open_page, path):
    page = open_page(path)
    page.keyboard.press("/")
    page.keyboard.type("CATSAT")
    assert page.locator("header output").inner_text() == "2"
    assert page.eval_on_selector_all(".found", "all => all.map((one) => Number(one.dataset.token))") == [1, 2, 9, 10]
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator("header output").inner_text() == "2 of 2"
    assert page.evaluate("saccade.state.now.query") == 9
    page.keyboard.press("Escape")
    page.locator("input[type=search]").fill("dog")
    assert page.locator("header output").inner_text() == "0"


def test_heads_are_sorted_and_found(open_page, path, given):
    page = open_page(path)
    page.get_by_label("Find heads").select_option("previous")
    values = torch.stack([one.summary().named("previous_mass").values[0] for one in given])
    order = values.flatten().argsort(descending=True).tolist()
    tiles = page.eval_on_selector_all(
        "[data-head]", "all => all.map((one) => 4 * one.dataset.layer + 1 * one.dataset.head)"
    )
    assert tiles == order
    page.get_by_label("Order").select_option("least")
    tiles = page.eval_on_selector_all(
        "[data-head]", "all => all.map((one) => 4 * one.dataset.layer + 1 * one.dataset.head)"
    )
    assert tiles == order[::-1]


def test_the_head_most_like_this_one(open_page, tmp_path):
    torch.manual_seed(1)
    query, key = torch.randn(2, 1, 4, COUNT, 8)
    query[:, 3], key[:, 3] = query[:, 1] + 0.01, key[:, 1]  # head 3 is next to head 1
    path = viz.report(AttentionMatrix(query, key), tmp_path / "like.html", tokens=TOKENS)
    page = open_page(path, "#head=1")
    page.get_by_label("Find heads").select_option("like")
    until(page, "saccade.state.now.by === 'likeness'")
    tiles = page.eval_on_selector_all("[data-head]", "all => all.map((one) => Number(one.dataset.head))")
    assert tiles[:2] == [1, 3]


@pytest.mark.ci
def test_sinks_are_hidden(open_page, tmp_path):
    torch.manual_seed(2)
    query, key = torch.randn(1, 1, COUNT, 8), torch.randn(1, 1, COUNT, 8)
    query[..., 0], key[..., 0] = 4.0, 0.0
    key[..., 0, 0] = 4.0  # everybody looks at the first token
    given = AttentionMatrix(query, key, masks.Causal())
    page = open_page(viz.report(given, tmp_path / "sink.html", tokens=TOKENS), "#scale=linear")
    page.mouse.move(5, 5)
    dense = given.to_dense()[0, 0]
    dense[:, 0] = 0
    row = int(dense[1:].max(-1).values.argmax()) + 1
    best = int(dense[row].argmax())
    before = pixel(page, row, best)
    page.keyboard.press("s")
    assert pixel(page, 9, 0) == [211, 216, 218]
    assert sum(pixel(page, row, best)) < sum(before) - 100, "without the sink, the strongest is the darkest"


def test_the_keyboard_walks_over_heads(open_page, path):
    page = open_page(path, "#layer=1&head=1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert _chosen(page) == [2, 2]
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    assert _chosen(page) == [2, 2], "at the last layer it stays"
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()


@pytest.mark.ci
def test_the_map_is_zoomed_and_panned(open_page, path):
    page = open_page(path)
    x, y = at(page, 10, 3)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    until(page, "saccade.state.now.view !== null")
    left, top, width, height = page.evaluate("saccade.state.now.view")
    assert (width, height) == pytest.approx((COUNT / 2, COUNT / 2))
    assert at(page, 10, 3) == pytest.approx([x, y], abs=2), "what is pointed at stays where it is"
    page.mouse.down()
    page.mouse.move(x + 100, y + 50, steps=4)
    page.mouse.up()
    moved = page.evaluate("saccade.state.now.view")
    assert moved[0] < left
    assert moved[1] < top
    assert page.evaluate("saccade.state.now.query") is None, "a drag chooses nothing"
    page.locator(".canvas canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("saccade.state.now.view[0]") > moved[0]
    page.keyboard.press("0")
    assert page.evaluate("saccade.state.now.view") is None
    page.mouse.click(*at(page, 5, 2))
    assert page.evaluate("[saccade.state.now.query, saccade.state.now.key]") == [5, 2]


@pytest.mark.ci
def test_the_address_keeps_the_view(open_page, path):
    page = open_page(path)
    page.get_by_label("Coloured by").select_option("distance")
    _tile(page, 1, 3).click()
    page.mouse.click(*at(page, 6, 4))
    page.keyboard.press("+")
    until(page, "location.hash.includes('view=') && location.hash.includes('query=6')")
    fragment = page.evaluate("location.hash")
    again = open_page(path, fragment)
    state = "JSON.stringify(saccade.state.now)"
    assert again.evaluate(state) == page.evaluate(state)
    assert again.locator(".map h2").inner_text() == page.locator(".map h2").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fragment",
    ["#layer=99&head=7", "#view=1,2&by=none&side=3", "#query=-5&key=1e9", "#%zz&scale=<b>", "#theme=x&language=fr"],
)
def test_an_address_that_makes_no_sense_does_no_harm(open_page, path, fragment):
    page = open_page(path, fragment)
    assert page.locator("[data-head]").count() == 12
    assert page.evaluate("saccade.mapView.levels.length") > 0


def test_saved_files(open_page, path, given):
    page = open_page(path, "#layer=1&head=2&query=8")
    saved = {}
    for kind in ("png", "svg", "json"):
        with page.expect_download() as download:
            page.get_by_label("Save").select_option(kind)
        assert download.value.suggested_filename == f"layer1-head2.{kind}"
        saved[kind] = Path(download.value.path()).read_bytes()
    assert saved["png"].startswith(b"\x89PNG")
    told = json.loads(saved["json"])
    weights, keys = given[1].to_dense()[0, 2, 8].sort(descending=True)
    assert told["query"]["looksAt"][0]["start"] == keys[0].item()
    assert told["query"]["looksAt"][0]["weight"] == pytest.approx(weights[0].item(), rel=1e-3)
    assert told["values"]["entropy"] == pytest.approx(given[1].summary().named("entropy").values[0, 2].item(), rel=1e-4)
    texts = [one.text for one in ET.fromstring(saved["svg"]).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:COUNT] == TOKENS


def test_chinese_dark_and_narrow(open_page, path):
    page = open_page(path, "#language=zh", size=(400, 800), color_scheme="dark")
    assert page.locator(".heads h2").inner_text() == "注意力头"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing reaches over the side"
    dark = page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor")
    assert dark == "rgb(22, 23, 27)"
    assert page.evaluate("document.querySelector('main').lang") == "zh-CN"
    page.get_by_role("button", name="English").click()
    assert page.locator(".heads h2").inner_text() == "Heads"
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor") == "rgb(255, 255, 255)"


def test_both_languages_say_everything(open_page, path):
    page = open_page(path)
    words = page.evaluate("saccade.words")
    assert set(words["en"]) == set(words["zh"])
    assert [row[0] for row in words["en"]["keys"]] == [row[0] for row in words["zh"]["keys"]]
    names = page.evaluate("saccade.side.measures.map((one) => one.name)")
    assert set(names) <= set(words["zh"]["measures"])
    assert set(names) <= set(words["zh"]["meanings"])


def test_small_maps_on_the_tiles(open_page, path):
    page = open_page(path)
    page.keyboard.press("m")
    until(page, "document.querySelectorAll('[data-head] canvas').length === 12")
    sizes = page.eval_on_selector_all("[data-head] canvas", "all => all.map((one) => [one.width, one.height])")
    assert sizes == [[COUNT, COUNT]] * 12
