"""Every page, hint and workflow installs the distribution by its name, with the same words."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FOREIGN = re.compile(r"pip3? install [^\n`]*?(?<![-\w/.])saccade(?![-\w./])")
_EXTRA = re.compile(r"(?<![-\w])saccade\[[a-z,]+\]")


def _texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and not name.startswith("docs/decisions/")]
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".ipynb", ".html", ".js", ".cff", ""}
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8", errors="ignore")
        for path in paths
        if path.is_file() and path.suffix in kinds and path != Path(__file__)
    }


def test_no_text_installs_another_distribution() -> None:
    found = {name: _FOREIGN.findall(text) + _EXTRA.findall(text) for name, text in _texts().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_pages_say_the_same_sentence() -> None:
    texts = _texts()
    pages = [
        "README.md",
        "README.zh-CN.md",
        *(f"docs/{language}/{page}.md" for language in ("en", "zh") for page in ("start", "which-kernel")),
    ]
    sentences = [re.findall(r".*`pip install 'saccade-attention\[all,cpu\]'`.*", texts[page]) for page in pages]
    assert all(len(found) == 1 for found in sentences)
    assert len({found[0] for found in sentences}) == 2  # one in each language
    found = [name for name, text in texts.items() if re.search(r"pip install (?:'saccade-cpu|saccade-cpu)", text)]
    assert found == []
