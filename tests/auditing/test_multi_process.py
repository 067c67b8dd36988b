"""Audits of models that several processes run together or as replicas: all find the same, and none waits forever."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from tests.auditing.rank_process import BORDER, CASES, DOCUMENTS, LENGTH

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # of processes that each import torch
LIMIT = 120  # seconds; a few are enough


def run(path, size, *cases):
    """Start one process for each rank; return for each case the results of all processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    parts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.auditing.rank_process", str(rank), str(size), str(path / "met"), *cases],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [part.communicate(timeout=LIMIT) for part in parts]
    finally:
        for part in parts:
            part.kill()
    assert [part.returncode for part in parts] == [0] * size, [error[-2000:] for _, error in said]
    each = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return {case: [own[case] for own in each] for case in cases}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return the results of two processes, which are started once for all tests."""
    return run(tmp_path_factory.mktemp("ranks"), 2, *CASES)


def verdicts(claims):
    return [claim["verdict"] for claim in claims]


def test_a_right_model_of_two_processes_is_not_accused(said):
    one, other = said["right"]
    assert one == other
    assert verdicts(one) == ["held"] * 3


def test_a_document_that_is_forgotten_across_the_border_is_found(said):
    one, other = said["forgets documents"]
    assert one == other
    assert verdicts(one) == ["broken", "held", "broken"]
    allowed = DOCUMENTS.to_dense(LENGTH)[0, 0]
    for claim in (one[0], one[2]):
        (_, row), (_, key) = claim["finding"]["row"], claim["finding"]["key"]
        assert row >= BORDER > key
        assert not allowed[row, key]
        assert claim["finding"]["module"] == "layers.1.attention"


def test_a_key_that_is_forgotten_at_the_border_is_found(said):
    one, other = said["forgets a key"]
    assert one == other
    assert verdicts(one) == ["held", "held", "broken"]
    assert one[2]["finding"] | {"passes": 0, "size": 0.0} == {
        "kind": "blind",
        "row": [0, BORDER],
        "key": [0, BORDER - 1],
        "size": 0.0,
        "module": "layers.1.attention",
        "probe": "replay",
        "passes": 0,
        "nouns": ["output", "token"],
    }


def test_a_model_that_keeps_its_own_rows_is_audited_from_end_to_end(said):
    one, other = said["own rows"]
    assert one == other
    assert verdicts(one) == ["held", "held", "not answered"]
    one, other = said["own rows, forgets documents"]
    assert one == other
    assert verdicts(one) == ["broken", "held", "not answered"]
    assert one[0]["finding"]["row"][1] >= BORDER > one[0]["finding"]["key"][1]


def test_processes_that_see_other_numbers_take_the_same_branches(said):
    one, other = said["unsteady"]
    assert one == other
    assert verdicts(one) == ["held"] * 3
    assert 0 < one[0]["largest"] < one[0]["allowed"]


def test_inputs_must_be_the_same(said):
    for why in said["other inputs"]:
        assert why.startswith("audit: inputs must be the same in all processes of the group")


def test_single_process_runners_are_refused(said):
    for why in said["other ways"]:
        assert why.startswith("audit: packed, padded, cache, against must be left out")


def test_replicas_are_audited_as_the_model_that_they_are(said, tmp_path):
    one, other = said["replicas leak"]
    assert one == other
    assert verdicts(one) == ["broken", "held", "broken"]
    assert one[2]["finding"]["module"] == "layers.1.attention"
    assert run(tmp_path, 1, "replicas leak") == {"replicas leak": [one]}


def test_a_single_replica_does_not_wait(said):
    one, other = said["one replica alone"]
    assert verdicts(one) == ["held"] * 3
    assert other is None
