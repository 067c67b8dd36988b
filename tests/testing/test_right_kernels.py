"""Correct kernels by many algorithms: no law accuses one."""

import re
from pathlib import Path

import pytest
import torch

from saccade.testing import check_laws, history, oracle
from saccade.testing.right_kernels import RIGHT_KERNELS
from saccade.testing.wrong_kernels import mean

Q, K, V = (torch.randn(2, 4, 90, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
MASK = torch.rand(2, 4, 90, 90, generator=torch.Generator().manual_seed(3)) < 0.3
MASK[:, 1, 5] = False  # a row without a visible key


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_counts_them(language):
    text = (Path(__file__).parents[2] / "docs" / language / "conformance.md").read_text("utf-8")
    assert re.search(rf"\b{len(RIGHT_KERNELS)} (algorithms|种算法)", text)
    assert len(RIGHT_KERNELS) >= 50


@pytest.mark.parametrize("name", RIGHT_KERNELS)
def test_a_right_kernel_is_the_definition(name):
    inputs = [x.clone().requires_grad_() for x in (Q, K[:, :2], V[:, :2])]
    others = [x.clone().requires_grad_() for x in (Q, K[:, :2], V[:, :2])]
    out, want = RIGHT_KERNELS[name](*inputs, MASK), oracle.attention(*others, MASK)[0]
    torch.testing.assert_close(out, want)
    gradients = torch.autograd.grad((out * Q).sum(), inputs), torch.autograd.grad((want * Q).sum(), others)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.ci
@pytest.mark.parametrize("name", ["einsum", "3 parts merged by lse", "FlashAttention in blocks of 64"])
def test_no_law_accuses_a_right_kernel(name):
    assert check_laws.false_alarms(name, seed=3, share=40) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT_KERNELS)
def test_no_law_accuses_a_right_kernel_over_20_seeds(name):
    assert [str(found) for seed in range(20) for found in check_laws.false_alarms(name, seed, share=13)] == []


def test_the_command_prints_a_table_of_right_kernels(capsys, monkeypatch):
    arguments = ["--right", "plain", "--seeds", "2", "--share", "400"]
    assert history.main(arguments) == 0
    assert capsys.readouterr().out.endswith("1 right kernels over 2 seeds, 0 with a false alarm\n")
    monkeypatch.setitem(RIGHT_KERNELS, "plain", mean)
    assert history.main(arguments) == 1
    assert "FALSE ALARM" in capsys.readouterr().out
