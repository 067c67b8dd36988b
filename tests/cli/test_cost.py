"""``saccade cost`` as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

import saccade as sc
from saccade import masks
from saccade.cli.app import app
from saccade.distributed import exchange, figures


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, ["cost", *arguments])


def test_a_window_is_planned_and_drawn(cost, tmp_path):
    file = tmp_path / "plan.png"
    result = cost("causal & window(4095, 0)", "--tokens", "131072", "--ranks", "8", "--picture", "--out", str(file))
    assert result.exit_code == 0, result.output
    plan = exchange(masks.sliding_window(4096), 131_072, 32, 32, 128, ranks=8)
    assert result.stdout.startswith(str(plan))
    rows = [line for line in result.stdout.splitlines() if line[:5].strip().isdigit()]
    assert [row[6:22].find("█") for row in rows] == [-1, 0, 2, 4, 6, 8, 10, 12]
    assert "darkest: 63.98 MiB" in result.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


def test_json_is_the_plan(cost):
    result = cost("causal", "--tokens", "4096", "--ranks", "4", "--kv-heads", "8", "--json", "--layout", "zigzag")
    told = json.loads(result.stdout)
    plan = exchange(masks.Causal(), 4096, 32, 8, 128, ranks=4, layout="zigzag")
    assert told["bytes_sent"] == plan.bytes_sent.tolist()
    assert told["strategy"] == plan.strategy
    assert told["imbalance"] == plan.imbalance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["windw(3)", "--tokens", "9"], "saccade cost: RULE: parse: text must name known masks"),
        (
            ["causal", "--tokens", "9", "--kv-heads", "5", "--ranks", "8"],
            "saccade cost: kv_heads must divide the 32 heads",
        ),
        (["causal", "--tokens", "9", "--kv-heads", "5"], "saccade cost: num_kv_heads must divide num_heads=32"),
        (["causal", "--tokens", "9", "--picture"], "--picture must be used with --ranks"),
        (
            ["causal", "--tokens", "1", "--out", "cost.png"],
            "--out must be used with at least two tokens; got --tokens 1",
        ),
        (["--tokens", "9"], "RULE must be given, or --model instead"),
        (["causal", "--tokens", "9", "--ranks", "8", "--seconds"], "--seconds must be left out if --ranks"),
        (["causal", "--tokens", "9", "--ranks", "64", "--strategy", "ulysses"], "64 ranks do not divide 32 heads"),
        (["causal", "--tokens", "99999", "--ranks", "5000", "--picture"], "--picture must have at most 4,096 ranks"),
        (["causal", "--tokens", "9", "--ranks", "8", "--json", "--picture"], "--json"),
    ],
)
def test_refused_plans(cost, arguments, message):
    result = cost(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_one_machine(cost):
    result = cost("causal & window(255, 0)", "--tokens", "4096", "--dtype", "float32", "--memory", "0.5")
    assert result.exit_code == 0, result.output
    told = sc.cost(masks.sliding_window(256), 4096, num_heads=32, head_dim=128)
    assert result.stdout.startswith(str(told))
    assert "in 0.5 GiB: a run fits, a training step does not fit" in result.stdout
    assert told.forward.peak_bytes <= 2**29 < told.training.peak_bytes


@pytest.mark.ci
def test_memory_is_drawn_against_length(cost, tmp_path):
    file = tmp_path / "cost.png"
    result = cost("causal", "--tokens", "512", "--heads", "2", "--head-dim", "16", "--out", str(file))
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.stdout.replace("\n", "")
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_on_one_machine(cost):
    result = cost("--model", "small-decoder", "--tokens", "256")
    assert result.stdout.startswith("cost of Decoder at 256 tokens, batch 1, float32"), result.output


@pytest.mark.parametrize("strategy", ["fetch", "gather", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_traffic_is_what_ranks_receive(strategy, layout):
    plan = exchange(masks.longformer(300, [0]), 4096, 8, ranks=4, strategy=strategy, layout=layout)
    traffic = figures.traffic(plan)
    assert traffic.sum(1).tolist() == plan.bytes_received.tolist()
    assert traffic.sum(0).tolist() == plan.bytes_sent.tolist()


def test_a_picture_of_many_ranks_is_as_wide_as_one_of_few():
    plan = exchange(masks.sliding_window(4096), 1 << 20, 8, ranks=256)
    rows = figures.picture(plan).splitlines()[1:-1]
    assert len(rows) == 32
    assert {len(row) for row in rows} == {5 + 1 + 64 + 1 + 4}
