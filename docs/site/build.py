"""Build the site, in English and Chinese, into out/site or the folder that is named: ``make site``.

The pages are those of docs/en and docs/zh; the reference is generated from the docstrings. The site loads nothing from
other hosts. A warning of Sphinx (a broken link, a page in no table of contents) is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
LANGUAGES = {"en": "en", "zh": "zh_CN"}  # and what Sphinx calls them
TITLES = {
    "en": {"api": "Functions and classes", "decisions": "Decisions"},
    "zh": {"api": "函数与类", "decisions": "设计决策"},
}
PACKAGES = [
    "saccade",
    *(
        f"saccade.{name}"
        for name in (
            *(
                "masks",
                "scores",
                "positions",
                "statistics",
                "scorers",
                "matrix",
                "mechanisms",
                "caches",
                "nn",
                "vision",
            ),
            *("models", "text", "viz", "recording", "auditing", "distributed", "integrations.transformers"),
            *("integrations.flex", "costs", "learning", "tasks", "testing", "theory"),
        )
    ),
]
REPORT_PAGES = ROOT / "examples" / "report_pages.py"
_REPORT = re.compile(r"\[([^]]+)\]\([./]*examples/report_pages\.py#([\w-]+)\)")
_DIAGRAM = re.compile(r"```mermaid\n.*?```", re.DOTALL)


def main(out: Path) -> None:
    """Build both languages, the page that links to them, and the example pages of reports."""
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([sys.executable, str(REPORT_PAGES), "--out", str(out / "reports")], check=True)
    for language, code in LANGUAGES.items():
        source = out.with_name(f"{out.name}-source") / language
        shutil.rmtree(source, ignore_errors=True)
        write_source(language, source)
        options = ["-q", "-W", "--keep-going", "-j", "2", "-c", str(HERE), "-D", f"language={code}"]
        command = [sys.executable, "-m", "sphinx", *options, str(source), str(out / language)]
        subprocess.run(command, check=True)
    shutil.copy(HERE / "first.html", out / "index.html")
    print(out / "index.html")


def write_source(language: str, source: Path) -> None:
    """Write all pages of a language, as Sphinx reads them."""
    source.mkdir(parents=True)
    for page in (DOCS / language).glob("*.md"):
        text = _rewritten(page.read_text(encoding="utf-8"), language)
        head, _, rest = text.partition("\n")
        entries = index_entries(page.stem, language)
        (source / page.name).write_text(f"{head}\n\n{entries}{rest}", encoding="utf-8")
    locale = source / "locale" / LANGUAGES[language] / "LC_MESSAGES"
    if (words := HERE / "locale" / f"{LANGUAGES[language]}.po").exists():
        locale.mkdir(parents=True)
        shutil.copy(words, locale / "sphinx.po")
    _write_recipes(language, source)
    shutil.copytree(DOCS / language / "notebooks", source / "notebooks")
    (source / "decisions").mkdir()
    for page in (DOCS / "decisions").glob("*.md"):
        (source / "decisions" / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (source / "images").symlink_to(DOCS / "images")
    (source / "examples").symlink_to(ROOT / "examples")
    _write_index(language, source)
    _write_decisions(language, source)
    _write_reference(language, source)


def parts() -> list[dict[str, object]]:
    """Return the table of contents."""
    return tomllib.loads((HERE / "structure.toml").read_text(encoding="utf-8"))["part"]


def index_entries(page: str, language: str) -> str:
    """Return a MyST directive for each word that readers type and for which the page comes first in a search."""
    found = tomllib.loads((HERE / "search_words.toml").read_text(encoding="utf-8")).get(page, {})
    words = [*found.get("en", []), *(found.get("zh", []) if language == "zh" else [])]
    return "".join(f"```{{index}} ! {word}\n```\n\n" for word in dict.fromkeys(words))


def recipes(language: str) -> list[str]:
    """Return the names of the recipes, in the order in which their page lists them."""
    listed = (DOCS / language / "recipes" / "index.md").read_text(encoding="utf-8")
    return re.findall(r"\]\(([\w-]+)\.md\)", listed)


def _with_reports(text: str, language: str, up: str = "") -> str:
    """Return a page with its links to an example page of a report, such as ``report_pages.py#dates``, leading there."""
    return _REPORT.sub(rf'<a href="{up}../reports/\2.html#language={language}">\1</a>', text)


def _rewritten(text: str, language: str, up: str = "") -> str:
    """Return a page with its links rewritten for a site whose root is the folder of the language.

    Args:
        text: the page.
        language: its language.
        up: the way from the page's folder to that of the language: "" or "../".
    """
    numbers = iter(range(1, 100))
    text = _DIAGRAM.sub(lambda _: f"![]({up}images/flow-{next(numbers)}-{language}.svg)", text)
    for name in ("README.md", "README.zh-CN.md"):
        text = text.replace(f"]({up}../../{name})", f"]({up}index.md)")
    text = _with_reports(text, language, up)
    text = (
        text.replace(f"]({up}../../examples", f"]({up}examples")
        .replace(f"]({up}../images/", f"]({up}images/")
        .replace(f"]({up}../decisions/", f"]({up}decisions/")
    )
    return re.sub(rf"\]\({re.escape(up)}\.\./(?:en|zh)/", f"]({up}", text)


def _write_recipes(language: str, source: Path) -> None:
    (source / "recipes").mkdir()
    for page in (DOCS / language / "recipes").glob("*.md"):
        text = _rewritten(page.read_text(encoding="utf-8"), language, "../")
        (source / "recipes" / page.name).write_text(text, encoding="utf-8")
    with (source / "recipes" / "index.md").open("a", encoding="utf-8") as index:
        pages = "\n".join(recipes(language))
        index.write(f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{pages}\n```\n")


def _write_index(language: str, source: Path) -> None:
    readme = (ROOT / ("README.md" if language == "en" else "README.zh-CN.md")).read_text(encoding="utf-8")
    (source / "groups").mkdir()
    groups = []
    for part in parts():
        name = str(part["en"]).lower().replace(" ", "-")
        pages = "\n".join(f"/{page}" for page in part["pages"])
        text = f"# {part[language]}\n\n```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n"
        (source / "groups" / f"{name}.md").write_text(text, encoding="utf-8")
        groups.append(f"groups/{name}")
    menu = "```{toctree}\n:hidden:\n:maxdepth: 2\n\n" + "\n".join(groups) + "\n```\n"
    home = (source / "index.md").read_text(encoding="utf-8")
    shown = _with_reports(_front(readme), language)
    body = home.partition("\n")[2]
    (source / "index.md").write_text(f"{shown}\n\n{body}\n\n{menu}", encoding="utf-8")


def _front(readme: str) -> str:
    """Return the part of a README before its second heading, including images."""
    front = readme.partition("\n## ")[0]
    front = re.sub(r"\]\(docs/(?:en|zh)/", "](", front).replace("](docs/images/", "](images/")
    return re.sub(r" · \[[^]]+\]\(README[^)]*\)", "", front)


def _write_decisions(language: str, source: Path) -> None:
    names = sorted(path.stem for path in (DOCS / "decisions").glob("*.md"))
    pages = "\n".join(names)
    text = f"# {TITLES[language]['decisions']}\n\n```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n"
    (source / "decisions" / "index.md").write_text(text, encoding="utf-8")


def _write_reference(language: str, source: Path) -> None:
    folder = source / "api"
    folder.mkdir()
    for package in PACKAGES:
        # Document exported names once, in the module that defines them.
        twice = "   :no-index:\n" if package in ("saccade", "saccade.matrix") else ""
        # from_pretrained and the like are inherited from a base that is not public.
        inherited = "   :inherited-members: Module, tuple\n" if package == "saccade.models" else ""
        told = f".. automodule:: {package}\n   :members:\n   :show-inheritance:\n{inherited}{twice}"
        text = f"# {package}\n\n```{{eval-rst}}\n{told}```\n"
        (folder / f"{package}.md").write_text(text, encoding="utf-8")
    pages = "\n".join(PACKAGES)
    text = f"# {TITLES[language]['api']}\n\n```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n"
    (folder / "index.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "out" / "site")
