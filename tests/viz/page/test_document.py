"""The file stands for itself: it asks no host, runs only its own code, and what it is told is never read as markup."""

import base64
import hashlib
import re
from importlib.resources import files

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.viz.page.layer_kinds import attention
from tests.viz.page.page_reader import Page, elements_of, written

from saccade.viz import report
from saccade.viz.page.document import code, document

BROWSER = files("saccade.viz.page").joinpath("browser")
SOURCES = {path.name: path.read_text("utf-8") for path in BROWSER.iterdir() if path.name.endswith(".js")}
ELEMENTS = ["html", "head", "meta", "meta", "meta", "link", "title", "style", "body", "main", "noscript"]
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "</title><script>alert(1)</script>",
    "{{script}}",
    "{{parts}}",
    r"\1\g<0>",
    "<!--",
    "]]>",
    "&lt;script&gt;&amp;",
    "'\"`${alert(1)}",
    "\x00\x1b[31m\r\n",
    "\u202egnp\u2066\u200f",
    "\ud800",
    "\udcff\ud83d",
    "\u2028\u2029\ufeff",
    "https://example.com/",
]
TAGS = [*ELEMENTS, *["script"] * 3]  # the index, maps of one layer, its code; heads come between


def expected_tags(heads):
    return [*TAGS, *["script"] * heads]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_no_markup(tmp_path, text):
    plain = written(tmp_path, attention(4, 4, heads=2), title="plain", tokens=list("abcd"))
    path = report(
        {text: attention(4, 4, heads=2)},
        tmp_path / "hostile.html",
        tokens=[text, f"a{text}", f"{text}b", "plain"],
        title=text,
        other=attention(4, 4, heads=2),
        names=(text, "other"),
    )
    raw = path.read_bytes().decode("utf-8")
    found = elements_of(raw)
    assert [tag for tag, _, _ in elements_of(plain.text)] == expected_tags(2)
    assert [tag for tag, _, _ in found] == [*expected_tags(2), *["script"] * 3]
    assert [own for own in found if own[0] in ("script", "style")][-1][2] == code("file")
    assert {name for _, attributes, _ in found for name in attributes} <= {
        "lang", "charset", "http-equiv", "content", "name", "rel", "href", "type", "data-part",
    }  # fmt: skip
    for mark in "\x00\x1b\u202e\u2066\u200f\u2028\u2029\ufeff":
        assert mark not in raw
    assert "onerror" not in raw.replace("&gt;", ">").split("</title>", 1)[1]
    page = Page(path)
    title = next(own for own in found if own[0] == "title")[2]
    assert title == page.index["title"]
    assert all(token.isprintable() or "\u200c" in token for token in page.side()["texts"][0]["tokens"])
    assert page.side()["name"].isprintable()
    assert page.layer()["name"].isprintable()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(), min_size=3, max_size=3), st.text())
def test_any_text_is_read_back(tmp_path, tokens, title):
    page = written(tmp_path, attention(3, 3, heads=1, kv_heads=1), tokens=[*tokens], title=title)
    assert len(page.tokens()[1]) == 3
    assert [tag for tag, _, _ in elements_of(page.text)] == expected_tags(1)
    for token, shown in zip(tokens, page.tokens()[1], strict=True):
        if re.fullmatch(r"[a-z ]*[a-z]", token):
            assert shown == token


def test_nothing_is_put_into_what_was_put_in():
    made = document("{{script}}{{style}}", {"index": "abc", "x": "{{title}}"})
    assert "<title>{{script}}{{style}}</title>" in made
    assert 'data-part="x">{{title}}</script>' in made


def test_no_host_is_asked(tmp_path):
    text = written(tmp_path, attention(9, 9)).text
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", re.sub(r'data-part="[^"]*">[^<]*', "", text))
    assert {address for address in addresses if "://" in address} <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(?:import\s*\(|XMLHttpRequest|WebSocket|sendBeacon|fetch\()", text)
    assert not re.search(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
    for tag, attributes, _ in elements_of(text):
        assert not {"src", "action", "srcset"} & set(attributes)
        assert tag != "link" or attributes["href"] == "data:,"


def test_the_policy_allows_this_code_and_this_style_alone(tmp_path):
    found = elements_of(written(tmp_path, attention(4, 4)).text)
    policy = next(own["content"] for _, own, _ in found if own.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    for rule, text in (
        ("script-src", next(text for tag, own, text in found if tag == "script" and own["type"] == "module")),
        ("style-src", next(text for tag, _, text in found if tag == "style")),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def imports_of(text):
    """(names, file) of every import."""
    return [
        ([name.strip() for name in names.split(",") if name.strip()], file)
        for names, file in re.findall(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";$', text, re.MULTILINE)
    ]


def exports_of(text):
    return set(re.findall(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", text, re.MULTILINE))


def names_of(text):
    """Names that stand at the top of a file."""
    own = r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+)"
    several = [
        names.split(",") for names in re.findall(r"^(?:export )?(?:const|let|var) [{\[]([^}\]]*)", text, re.MULTILINE)
    ]
    return [*re.findall(own, text, re.MULTILINE), *(name.strip() for names in several for name in names)]


@pytest.mark.parametrize("file", sorted(SOURCES))
def test_imports_name_what_another_file_exports(file):
    text = SOURCES[file]
    assert len(re.findall(r"^\s*import\b", text, re.MULTILINE)) == len(imports_of(text))
    for names, other in imports_of(text):
        assert other in SOURCES, f"{file} imports {other}, which is not there"
        assert set(names) <= exports_of(SOURCES[other]), f"{file} imports from {other} what it does not export"
        for name in names:
            assert re.fullmatch(r"\w+", name), f"{file} renames {name}, which is not done where files are joined"
            used = re.sub(r"^import .*$", "", text, flags=re.MULTILINE)
            assert re.search(rf"\b{name}\b", used), f"{file} imports {name} and does not use it"
    assert len(re.findall(r"^export\b(?! default)", text, re.MULTILINE)) == len(exports_of(text))
    assert text.count("\n") <= 300


def test_no_name_stands_at_the_top_of_two_files():
    seen = {}
    for file, text in SOURCES.items():
        for name in names_of(text):
            assert name not in seen, f"{name} stands in {seen.get(name)} and in {file}"
            seen[name] = file
    assert {"Side", "Reading", "make"} <= set(seen)


@pytest.mark.parametrize("name", ["file", "notebook"])
def test_joined_code_holds_every_file_that_it_needs_once(name):
    needed, left = [], [f"{name}.js"]
    while left:
        file = left.pop()
        if file not in needed:
            needed.append(file)
            left += [other for _, other in imports_of(SOURCES[file])]
    joined = code(name)
    assert not re.search(r"^import\b", joined, re.MULTILINE)
    assert re.findall(r"^export.*$", joined, re.MULTILINE) == (
        ["export default { render };"] if name == "notebook" else []
    )
    assert sorted(names_of(joined)) == sorted(own for file in needed for own in names_of(SOURCES[file]))
    assert "</script" not in joined.lower()
    assert "<!--" not in joined
