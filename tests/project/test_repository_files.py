"""Files that other tools read: the GitHub action, issue templates, the recipe, the container and the paper."""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.sampled import sampled

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/audit"
JUDGE = ROOT / ".github/actions/judge"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
annotations = runpy.run_path(str(ACTION / "annotate.py"))["annotations"]


def _report(verdict: str) -> dict[str, object]:
    claim = {"name": "reach", "verdict": verdict, "finding": "token 3 reaches token 1\n100 %", "why": ""}
    return {"model": "Decoder", "rule": "Causal()", "claims": [claim]}


@pytest.mark.parametrize(
    "verdict, strict, start",
    [
        ("broken", False, "::error"),
        ("broken", True, "::error"),
        ("not answered", False, "::warning"),
        ("not answered", True, "::error"),
    ],
)
def test_a_claim_that_does_not_hold_is_annotated(verdict: str, strict: bool, start: str) -> None:
    (line,) = annotations(_report(verdict), strict=strict)
    assert line == f"{start} title=saccade audit, reach::Decoder, Causal(): token 3 reaches token 1%0A100 %25"


def test_a_claim_that_holds_is_not_annotated() -> None:
    assert annotations(_report("held"), strict=True) == []


def test_a_broken_law_and_what_is_left_out_are_annotated() -> None:
    write = runpy.run_path(str(JUDGE / "annotate.py"))["annotations"]
    laws = [
        {"name": "oracle", "verdict": "broken", "why": "the output\n100 %"},
        {"name": "pure", "verdict": "kept", "why": ""},
        {"name": "rows", "verdict": "unexpectedly kept", "why": ""},
    ]
    notice, error, warning = write({"laws": laws, "notes": ["takes no grouped heads"]})
    assert notice == "::notice title=saccade judge::takes no grouped heads"
    assert error == "::error title=saccade judge, oracle::the output%0A100 %25"
    assert warning == "::warning title=saccade judge, rows::expected to fail, but kept"


@pytest.mark.ci
def test_the_action_judges_a_kernel(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "KERNEL": "saccade:attention", "ARGUMENTS": "--law oracle --case causal", "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, JUDGE / "annotate.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    written = {tmp_path / "saccade-judge.xml", tmp_path / "saccade-judge.html"}
    assert all(path.stat().st_size for path in written)


@pytest.mark.ci
@pytest.mark.parametrize("rule, status", sampled([pytest.param("window(1, 0)", 1), pytest.param("causal", 0)], 2))
def test_the_action_runs_the_audit(rule: str, status: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "MODEL": "small-decoder",
        "RULE": rule,
        "ARGUMENTS": "--length 12 --tests 2", "RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, ACTION / "annotate.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("::error title=saccade audit" in done.stdout) == bool(status)
    report = tmp_path / "saccade-audit.json"
    assert json.loads(report.read_text("utf-8"))["ok"] is (status == 0)
    assert (tmp_path / "output").read_text("utf-8") == f"report={report}\n"


def test_the_action_hands_its_inputs_over_in_the_environment() -> None:
    inputs = {ACTION: {"MODEL", "TRAINER", "RULE", "ARGUMENTS"}, JUDGE: {"KERNEL", "CLAIMS", "ARGUMENTS"}}
    for folder, names in inputs.items():
        action = yaml.safe_load((folder / "action.yml").read_text("utf-8"))
        for step in action["runs"]["steps"]:
            assert "${{" not in step["run"]  # a text in a shell script could hold commands
        assert set(action["runs"]["steps"][1]["env"]) == names


@pytest.mark.ci
def test_the_action_audits_a_training_setup(tmp_path: Path) -> None:
    setup = tmp_path / "my_setup.py"
    setup.write_text(
        "import torch, saccade as sc\n"
        "def make():\n"
        "    return sc.models.small_decoder(), torch.stack, [torch.arange(3, 15), torch.arange(5, 17)]\n"
    )
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "MODEL": "",
        "TRAINER": f"{setup}:make", "ARGUMENTS": "--tests 2 --claim batch", "RUNNER_TEMP": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, ACTION / "annotate.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "saccade-audit.json").read_text("utf-8"))["model"] == "Decoder, as trained"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_workflow_of_the_page_gives_inputs_that_the_action_has(language: str) -> None:
    page = (ROOT / "docs" / language / "audit.md").read_text("utf-8")
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    inputs = yaml.safe_load((ACTION / "action.yml").read_text("utf-8"))["inputs"]
    steps = [step for step in workflow["jobs"]["audit"]["steps"] if "actions/audit" in step.get("uses", "")]
    assert len(steps) == 2
    assert all(step["with"].keys() <= inputs.keys() for step in steps)
    runs = [step["run"] for step in workflow["jobs"]["audit"]["steps"] if "run" in step]
    assert any("pytest --saccade-audit" in run for run in runs)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_github_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text("utf-8")), dict)


def test_the_recipe_has_the_version_and_requirements_of_the_project() -> None:
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text("utf-8"))
    assert recipe["context"]["version"] == VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {re.sub(r"^torch(?=\W)", "pytorch", name.replace(" ", "")) for name in project["dependencies"]}
    wanted.add(f"python{project['requires-python']}")
    assert {name.replace(" ", "") for name in recipe["requirements"]["run"]} == wanted


def test_the_container_runs_the_commands_of_a_fresh_clone() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    assert [line.split()[0] for line in lines if line[:1].isalpha()] == ["FROM", "RUN", "COPY", "RUN", "CMD"]
    assert "RUN make -C /saccade demo" in lines


def test_the_paper_cites_works_of_the_bibliography() -> None:
    paper = (ROOT / "paper/paper.md").read_text("utf-8")
    known = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "docs/bibliography.bib").read_text("utf-8"), re.MULTILINE))
    cited = set(re.findall(r"@([a-z]+\d{4}[a-z0-9]+)", paper))
    assert len(cited) > 5
    assert cited <= known
