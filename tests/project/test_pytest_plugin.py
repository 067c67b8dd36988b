"""``pytest --saccade-audit`` in somebody else's suite. Loaded by its name: an entry point needs a new installation."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch  # noqa: F401  what is imported within a run of pytester's is imported again by the next
import transformers.models.llama.modeling_llama  # noqa: F401
from tests.sampled import sampled

import saccade.testing  # noqa: F401

SUITE = """
import pytest, torch, transformers
from saccade import masks

@pytest.fixture
def llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
"""


@pytest.fixture
def run(pytester):
    """Runs pytest on a suite, with the plugin."""

    def ran(body, *arguments):
        pytester.makepyfile(SUITE + body)
        return pytester.runpytest("-p", "saccade_pytest", "--strict-markers", "-rs", *arguments)

    return ran


def test_audits_are_skipped_before_a_model_is_made(run):
    suite = """
@pytest.fixture
def costly():
    raise RuntimeError("made")

@pytest.mark.reach("causal")
def test_marked(audit, costly):
    audit(costly)

def test_not_marked(audit):
    raise RuntimeError("made")

def test_other():
    pass
"""
    ran = run(suite)
    ran.assert_outcomes(passed=1, skipped=2)
    ran.stdout.fnmatch_lines(["SKIPPED * audits run with --saccade-audit"])
    run(suite, "--saccade-audit").assert_outcomes(passed=1, errors=1, failed=1)


def test_reports_are_english_whatever_the_language(run, monkeypatch):
    """Logs of CI are read by everyone, so neither the system nor a figure's language changes them."""
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    ran = run(
        """
@pytest.mark.reach("causal & window(2, 0)", length=12)
def test_broken(audit, llama):
    from saccade import viz
    viz.set_language("zh")
    try:
        audit(llama)
    finally:
        viz.set_language("en")
""",
        "--saccade-audit",
    )
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["E * Failed: the model does not follow the rule", "E * claim * verdict *"])
    ran.stdout.no_re_match_line(r".*[\u4e00-\u9fff]")


def test_a_rule_that_is_kept_passes_and_a_broken_one_shows_table_and_script(run):
    ran = run(
        """
@pytest.mark.reach("causal", length=12)
def test_kept(audit, llama):
    assert audit(llama).shape == (2, 12)

@pytest.mark.reach("causal & window(2, 0)", length=12)
def test_broken(audit, llama):
    audit(llama)
""",
        "--saccade-audit",
    )
    ran.assert_outcomes(passed=1, failed=1)
    ran.stdout.fnmatch_lines(
        [
            "*_ test_broken _*",
            ">       audit(llama)",
            "E       Failed: the model does not follow the rule",
            "E       LlamaForCausalLM, 2 x 12 tokens, float32, seed 0",
            "E       reach * BROKEN * output * depends on token *",
            "-* the leak without saccade -*",
            "import torch, transformers",
            'print("output * moves by", *',
        ]
    )
    assert "saccade.audit(" not in ran.stdout.str()  # the traceback ends at the line of the test


def test_arguments_of_the_call_override_the_marker(run):
    run(
        """
BOTH = masks.Causal() & masks.Window(2, 0)

@pytest.mark.reach
def test_the_configuration(audit, llama):
    assert audit(llama, length=10).rule == "assumed from the configuration: Causal() in 2 layers"

MARKS = {10: pytest.mark.reach(BOTH, length=10), 14: pytest.mark.reach([BOTH, BOTH], length=14)}

@pytest.mark.parametrize("length", [pytest.param(length, marks=mark) for length, mark in MARKS.items()])
def test_the_marker(audit, llama, length):
    with pytest.raises(pytest.fail.Exception, match=rf"2 x {length} tokens"):
        audit(llama)
    assert audit(llama, "causal", tests=3).tests == 3
    assert audit(llama, rule=masks.Causal(), length=16).shape == (2, 16)

def test_without_a_marker(audit, llama):
    assert audit(llama, "causal", length=10).rule == "Causal() in 2 layers"
""",
        "--saccade-audit",
    ).assert_outcomes(passed=4)


def test_a_marked_test_that_audits_nothing_fails(run):
    ran = run(
        """
@pytest.mark.reach("causal")
def test_without_the_fixture(llama):
    return None

@pytest.mark.reach("causal")
def test_without_a_call(audit):
    pass

@pytest.mark.reach("causal", "full")
def test_two_rules(audit):
    pass
""",
        "--saccade-audit",
    )
    ran.assert_outcomes(failed=2, errors=1)
    ran.stdout.fnmatch_lines(["a test marked reach must take the fixture audit and call it with a model"])
    ran.stdout.fnmatch_lines(["E * takes from 0 to 1 positional arguments but 2 were given"])


_FRESH = """
import sys, pytest
pytest.main(["-q", "-p", "saccade_pytest", "-p", "no:cacheprovider", *sys.argv[1:]])
print(sorted({"torch", "saccade", "numpy"} & sys.modules.keys()))
"""
MARKED = "import pytest\n@pytest.mark.reach('causal')\ndef test_it(audit):\n    pass\n"


@pytest.mark.ci
@pytest.mark.parametrize(
    "suite, arguments, loaded",
    [
        ("", ["--collect-only"], "[]"),
        (MARKED, [], "[]"),
        (MARKED, ["--saccade-audit"], "['numpy', 'saccade', 'torch']"),
    ],
    ids=["an empty suite", "audits are skipped", "audits run"],
)
def test_a_run_that_audits_nothing_does_not_wait_for_torch(tmp_path, suite, arguments, loaded):
    (tmp_path / "test_marked.py").write_text(suite, encoding="utf-8")
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", _FRESH, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == loaded, done.stdout


def test_the_entry_point_names_a_module_that_is_shipped():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (name,) = project["project"]["entry-points"]["pytest11"].values()
    shipped = [root / path for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    assert find_spec(name) is not None
    assert root / "src" / f"{name}.py" in shipped
    assert all(path.exists() for path in shipped)


KERNELS = """
import saccade as sc

def right(query, key, value, mask):
    return sc.attention(query, key, value, mask)

def top_left(query, key, value, mask):
    return sc.attention(query, key, value, mask.roll(1, 2) if mask.shape[2] < mask.shape[3] else mask)
"""


def test_each_law_of_a_kernel_is_a_test(pytester):
    pytester.makepyfile(mine=KERNELS)
    pytester.makefile(".toml", claims='[xfail]\nempty_rows = "not yet"\ncausality = "known"')
    options = ["-p", "saccade_pytest", "--saccade-seed", "0", "-k", "empty_rows or causality or lse"]
    claims = ["--saccade-claims", "claims.toml", "-rsxX"]
    ran = pytester.runpytest(*options, "--saccade-kernel", "mine.py::right", *claims)
    ran.assert_outcomes(passed=2, skipped=2)
    ran.stdout.fnmatch_lines(["SKIPPED * returns no lse"])
    ran = pytester.runpytest(*options, "--saccade-kernel", "mine.py::right", *claims, "-o", "xfail_strict=true")
    ran.assert_outcomes(failed=2, skipped=2)
    ran = pytester.runpytest(*options, "--saccade-kernel", "mine.py::top_left", "-k", "oracle")
    ran.assert_outcomes(failed=1, deselected=ran.parseoutcomes()["deselected"])
    ran.stdout.fnmatch_lines(
        ["The output equals softmax attention*", "query [[]*", "call 1: *", "script: *.py", "seed 0"]
    )


UNGROUPED = """
import torch

def ungrouped(q, k, v, causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(2 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v
"""


@pytest.mark.parametrize("folder", sampled(["a temporary folder", "the cache", "a folder"], 3))
def test_a_broken_law_prints_a_few_lines_and_writes_its_script(pytester, tmp_path, monkeypatch, folder):
    pytester.makepyfile(mine=UNGROUPED)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = [
        "-p",
        "saccade_pytest",
        "--saccade-kernel",
        "mine.py::ungrouped",
        "--saccade-seed",
        "0",
        "-k",
        "causality",
    ]
    options += {"a folder": ["--saccade-scripts", "found"], "a temporary folder": ["-p", "no:cacheprovider"]}.get(
        folder, []
    )
    ran = pytester.runpytest(*options)
    assert ran.parseoutcomes()["failed"] == 1
    # With the variable CI set, pytest prints the whole message once more in its summary.
    (script,) = {line.removeprefix("script: ") for line in ran.outlines if line.startswith("script: ")}
    expected = {"the cache": ".pytest_cache/d/saccade/", "a folder": "found/"}.get(folder, f"{tmp_path}/saccade-")
    assert script.startswith(expected)
    assert script.endswith("mine.py-ungrouped-causality.py")
    done = subprocess.run([sys.executable, script], cwd=pytester.path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    first = ran.outlines.index(next(line for line in ran.outlines if line.startswith("___")))
    last = ran.outlines.index("seed 0")
    assert last - first < 15
    assert done.stdout.splitlines()[0] in ran.outlines
    ran.stdout.fnmatch_lines(["mine.py::ungrouped: takes no grouped heads (declared for you: *--claim groups=true"])
    ran.stdout.fnmatch_lines(["mine.py::ungrouped: seed 0: --saccade-seed 0 repeats this run"])


def test_a_kernel_that_is_not_there_is_a_wrong_argument(pytester):
    ran = pytester.runpytest("-p", "saccade_pytest", "--saccade-kernel", "nowhere.py::right")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR


def test_a_text_within_the_window_of_the_given_rule_fails(run):
    ran = run(
        """
@pytest.mark.reach("causal & window(20, 0)", length=12)
def test_too_short(audit, llama):
    audit(llama)
""",
        "--saccade-audit",
    )
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["E       Failed: at 12 tokens the rule hides nothing more than*pass length=22 or more"])
