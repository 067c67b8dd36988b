"""A missing optional package gives an error that names its extra, in a form that can be pasted into a shell."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import saccade as sc
from saccade import caches, integrations, models, viz
from saccade.cli import main

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
A = sc.AttentionMatrix(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))


def _kept() -> None:
    with TemporaryDirectory() as folder:
        caches.save_cache(caches.KVCache(), Path(folder) / "cache")


def _matched() -> None:
    found = models.Detections(torch.zeros(1, 3, 2), torch.rand(1, 3, 4))
    models.match_sets(found, [models.Targets(torch.tensor([0]), torch.rand(1, 4))])


def _audited() -> None:
    from saccade.auditing.loading import model_of  # noqa: PLC0415  as the command does

    model_of("config.json")


def _as_parquet() -> None:
    layer = sc.nn.MultiHeadAttention(8, 2)
    with torch.no_grad(), sc.record(layer) as recording:
        layer(torch.zeros(1, 2, 8))
    with TemporaryDirectory() as folder:
        recording.to_parquet(Path(folder) / "heads.parquet")


USES: list[tuple[str, str, Callable[[], object]]] = [
    ("matplotlib", "viz", lambda: viz.heatmap(A, head=0)),
    ("matplotlib", "viz", lambda: viz.mosaic(A)),
    ("matplotlib", "viz", lambda: viz.head_grid(torch.zeros(2, 2))),
    ("matplotlib", "viz", lambda: viz.profile(torch.zeros(4))),
    ("matplotlib", "viz", lambda: viz.bipartite(torch.zeros(1, 2), y_labels=["a"], x_labels=["b", "c"])),
    ("pyarrow", "tables", _as_parquet),
    ("anywidget", "notebook", lambda: viz.report_widget(A)),
    ("safetensors", "models", models.small_decoder),
    ("tokenizers", "models", lambda: models.small_decoder().tokenizer),
    ("safetensors", "models", _kept),
    ("scipy", "pictures", _matched),
    ("transformers", "transformers", integrations.transformers.install),
    ("transformers", "transformers", _audited),
]


@pytest.mark.parametrize(("package", "extra", "use"), USES, ids=lambda each: each if isinstance(each, str) else "")
def test_the_extra_is_named(package, extra, use, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="must be installed") as caught:
        use()
    assert caught.value.name == package
    command = re.search(r"Hint: (.+)", str(caught.value))[1]
    assert shlex.split(command) == ["pip", "install", f"saccade-attention[{extra}]"]
    assert "[" not in command.replace(
        f"'saccade-attention[{extra}]'", ""
    )  # a shell would expand brackets without quotes
    assert any(requirement.startswith(package) for requirement in PROJECT["optional-dependencies"][extra])


@pytest.mark.parametrize("package", ["tokenizers", "safetensors", "matplotlib"])
def test_a_command_ends_with_a_sentence(package, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["saccade", "look", "--model", "small-decoder", "A", "text."])
    with pytest.raises(SystemExit, match=r"^1$|pip install") as ended:
        main()
    told = capsys.readouterr().err + str(ended.value.code)
    assert re.search(r"pip install 'saccade-attention\[(cli|models)\]'", told)


def test_every_extra_that_an_error_names_exists():
    sources = [path.read_text("utf-8") for path in (Path(__file__).parents[2] / "src").rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r"saccade-attention\[(\w+)\]", text)}
    named |= {extra for text in sources for extra in re.findall(r'missing_extra\([^()]*"(\w+)"\)', text)}
    assert {"models", "viz", "cli"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_the_survey_says_so_too(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\nfrom benchmarks.survey.__main__ import main\nmain(['llama'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install 'saccade-attention[transformers]'" in done.stderr
