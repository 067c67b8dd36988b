"""A kernel that is left out because another one is faster runs where that other one cannot."""

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native

import saccade as sc
from saccade import masks
from saccade.engine.dispatch import KERNELS

STEPS = masks.Causal() & (masks.Window(127, 0) | masks.Strided(64) | masks.Prefix(4))


@pytest.fixture
def with_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native.is_on", lambda: True)


def explained(
    n: int, mask: masks.Mask | None = STEPS, *, dtype: torch.dtype = torch.float32, heads: int = 4, **options
):
    query = torch.zeros((), dtype=dtype).expand(1, heads, n, 16)
    dropout_p = options.pop("dropout_p", 0.0)
    return sc.AttentionMatrix(query, query, mask, **options).explain(dropout_p=dropout_p)


@needs_native
@pytest.mark.usefixtures("with_native")
def test_a_rule_with_steps_is_left_to_fused_where_that_can_run():
    found = explained(4096)
    assert found.kernel == "fused"
    assert found.skipped["native"] == ("its mask is strided, and it would also compute the pairs in between",)


@needs_native
@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize(
    "options",
    [
        {"bias": torch.zeros(1, 4, 1, 4096, requires_grad=True)},
        {"softcap": 30.0},
        {"dropout_p": 0.1},
    ],
    ids=["trained bias", "softcap", "dropout"],
)
def test_it_is_not_left_to_tiled(options):
    found = explained(4096, **options)
    assert found.kernel == "native"
    assert "native" not in found.skipped


@needs_native
@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"dropout_p": 0.1}], ids=["softcap", "dropout"])
def test_few_keys_are_left_to_fused_alone(options):
    assert explained(8, masks.Causal()).kernel == "fused"
    assert explained(8, masks.Causal()).skipped["native"][0].startswith("8 keys are too few to repay packing them")
    assert explained(8, masks.Causal(), **options).kernel == "native"


@needs_native
@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize("length", [8, 48, 4096])
def test_the_dtype_is_the_reason_at_any_length(length):
    """Not that there are few keys or few pairs, which more of them would mend."""
    assert explained(length, dtype=torch.float64, softcap=30.0).skipped["native"] == ("it has no float64",)


@needs_native
@pytest.mark.usefixtures("with_native")
def test_reasons_are_given_if_both_kernels_refuse():
    found = explained(4096, dtype=torch.float64, softcap=30.0)
    assert found.kernel == "tiled"
    assert found.skipped["native"] == ("it has no float64",)
    assert found.skipped["fused"] == ("it has no softcap",)


@pytest.mark.usefixtures("without_native")
def test_many_small_tiles_are_left_to_complete_rows():
    assert explained(64).kernel == "matmul"  # all rows at once
    found = explained(160)
    assert found.kernel == "tiled"
    assert found.skipped["fused"][0].startswith("its mask is strided: 6")
    assert explained(4096).kernel == "fused"
    assert explained(64, masks.longformer(8, [0])).kernel == "fused"


def test_kernels_leave_to_kernels_that_exist():
    names = {kernel.name for kernel in KERNELS}
    assert {kernel.defers_to for kernel in KERNELS if kernel.defers_to} <= names
