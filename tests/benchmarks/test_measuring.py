import itertools
import json

import pytest

from benchmarks import measuring, reporting


class Machine:
    """A clock that work moves, and a reference product whose rate the test writes."""

    def __init__(self, rates=()):
        self.now, self.looks, self.slept = 0.0, 0, []
        self._rates = itertools.chain(rates, itertools.repeat(100.0))

    def clock(self):
        return self.now

    def work(self, seconds):
        def call():
            self.now += seconds

        return call

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def rate(self):
        self.looks += 1
        return next(self._rates)

    def referee(self, *, samples=1, patience=10.0):
        return measuring.Referee(self.rate, samples=samples, patience=patience, clock=self.clock, sleep=self.sleep)


def timed(machine, calls, *, rounds=4, warm_up=0, referee=None, **options):
    referee = machine.referee() if referee is None else referee
    return measuring.in_turn(calls, rounds=rounds, warm_up=warm_up, referee=referee, clock=machine.clock, **options)


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians():
    times = [(1.0, 8.0), (2.0, 4.0), (4.0, 40.0)]  # ratios 8, 2, 10; medians 2 and 8
    assert measuring.median_ratio(times) == 8.0


def test_a_drift_that_hits_both_sides_does_not_move_the_ratio():
    assert measuring.median_ratio([(drift, 3.0 * drift) for drift in (1.0, 1.7, 0.6, 2.9)]) == pytest.approx(3.0)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_slope_is_the_power(power):
    sizes = [4096, 8192, 16384, 65536]
    assert measuring.slope(sizes, [3.0 * n**power for n in sizes]) == pytest.approx(power)


def test_the_slope_is_fitted_to_all_sizes_not_drawn_between_the_ends():
    assert measuring.slope([1, 2, 4], [1.0, 4.0, 4.0]) == pytest.approx(1.0)
    assert measuring.slope([1, 2, 4, 8], [1.0, 1.0, 8.0, 8.0]) == pytest.approx(1.2)


def test_sides_take_turns():
    order = []
    measuring.in_turn(
        [lambda: order.append("A"), lambda: order.append("B")], rounds=3, warm_up=1, referee=Machine().referee()
    )
    assert order == ["A", "B"] * 4


def test_warm_up_is_not_timed():
    machine = Machine()
    costs = iter([9.0, 1.0, 1.0])

    def call():
        machine.now += next(costs)

    assert timed(machine, [call], rounds=2, warm_up=1).times == [[1.0], [1.0]]


def test_a_quiet_machine_is_asked_for_as_many_rounds_as_wanted():
    machine = Machine()
    found = timed(machine, [machine.work(1.0), machine.work(3.0)])
    assert found == measuring.Rounds([[1.0, 3.0]] * 4, 100.0, True)
    assert machine.slept == []


def test_a_round_beside_which_the_reference_was_slow_is_repeated():
    # The first peak, a look before the first round, then one after each; the second round's is slow.
    machine = Machine([100.0, 100.0, 100.0, 50.0])
    costs = iter([1.0, 7.0, 1.0, 1.0, 1.0])

    def call():
        machine.now += next(costs)

    found = timed(machine, [call])
    assert found.times == [[1.0]] * 4
    assert found.quiet
    assert found.rate == 100.0


def test_the_look_before_a_round_counts_too():
    machine = Machine()
    referee = machine.referee(patience=0.0)
    costs = iter([7.0, 1.0, 1.0])

    def call():
        machine.now += next(costs)

    # No patience: the round is run at once, and does not count although the look after it is fine.
    machine._rates = itertools.chain([50.0, 50.0, 50.0], itertools.repeat(100.0))
    assert timed(machine, [call], rounds=2, referee=referee).times == [[1.0], [1.0]]


def test_a_machine_that_stays_busy_gives_all_rounds_and_says_so():
    machine = Machine([100.0])
    machine._rates = itertools.chain([100.0], itertools.repeat(50.0))
    found = timed(machine, [machine.work(2.0)], rounds=4, referee=machine.referee(patience=3.0))
    assert not found.quiet
    assert found.times == [[2.0]] * 8
    assert found.rate == 50.0
    assert sum(machine.slept) <= 3.0


def test_half_of_the_rounds_are_enough():
    machine = Machine()
    referee = machine.referee(patience=0.0)
    machine._rates = itertools.chain([100.0, 100.0, 100.0], itertools.repeat(50.0))
    found = timed(machine, [machine.work(2.0)], rounds=4, referee=referee)
    assert found.quiet
    assert found.times == [[2.0]] * 2
    assert found.rate == 100.0


def test_a_batch_is_judged_as_one():
    machine = Machine()
    found = timed(machine, [machine.work(1e-6)], rounds=100, batch=25)
    assert len(found.times) == 100
    assert machine.looks == 1 + 1 + 4


def test_waiting_ends_with_the_first_quiet_look():
    machine = Machine()
    referee = machine.referee(patience=10.0)
    machine._rates = iter([50.0, 50.0, 90.0])
    assert referee.wait()
    assert machine.slept == [0.5, 0.5]
    assert referee.patience == 9.0


def test_patience_is_shared_by_all_waits():
    machine = Machine()
    referee = machine.referee(patience=1.2)
    machine._rates = itertools.repeat(50.0)
    assert not referee.wait()
    assert sum(machine.slept) == pytest.approx(1.2)
    assert not referee.wait()
    assert sum(machine.slept) == pytest.approx(1.2)


def test_a_better_rate_raises_the_peak_and_condemns_what_was_measured_before():
    machine = Machine([60.0])
    referee = machine.referee()
    early = reporting.Row("a case", "1.00 s", rate=60.0)
    assert not early.is_disturbed(referee)
    referee.look()
    assert referee.peak == 100.0
    assert early.is_disturbed(referee)
    assert not reporting.Row("memory", "1 MiB").is_disturbed(referee)


def test_the_first_peak_is_the_best_of_many():
    assert Machine([10.0, 90.0, 20.0]).referee(samples=3).peak == 90.0


def test_compare_reports_medians_and_ratio():
    machine = Machine()
    pair = measuring.compare(lambda: None, lambda: None, rounds=3, referee=machine.referee())
    assert pair.quiet
    assert pair.rate == 100.0
    assert min(pair.ours, pair.theirs, pair.ratio) > 0.0


@pytest.mark.parametrize(
    "seconds, text", [(12.34, "12.3 s"), (1.0, "1.00 s"), (0.1234, "123 ms"), (0.0123, "12.3 ms"), (2.5e-6, "2.50 µs")]
)
def test_durations(seconds, text):
    assert reporting.duration(seconds) == text


def test_a_ratio_meets_its_target_or_not():
    pair = measuring.Pair(0.01, 0.05, 5.0, 1.0, True)
    assert reporting.ratio_row("case", pair, peer="SDPA", target=5.0).met is True
    assert reporting.ratio_row("case", pair, peer="SDPA", target=5.1).met is False
    assert reporting.ratio_row("case", pair, peer="SDPA").met is None
    assert reporting.ratio_row("case", pair, peer="SDPA").measured == "5.0x: 10.0 ms, SDPA 50.0 ms"


def test_results_are_written_whole(tmp_path):
    referee = Machine([100.0]).referee()
    rows = {
        "one": [
            reporting.Row("case", "2.0x", "at least 1x", True, {"ratio": 2.0}, 100.0),
            reporting.Row("other", "1", rate=50.0),
        ]
    }
    path = reporting.write(rows, referee, tmp_path / "bench")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [row["disturbed"] for row in written["rows"]] == [False, True]
    assert written["rows"][0]["ratio"] == 2.0
    assert {"cpu", "cores", "torch", "threads"} <= set(written["machine"])
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = reporting.replace(tmp_path / "results.json", b"old")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        reporting.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_the_table_shows_every_row(capsys):
    referee = Machine([100.0]).referee()
    reporting.say(
        {
            "one": [
                reporting.Row("case [a]", "2.0x", "at least 3x", False, rate=100.0),
                reporting.Row("busy", "1", rate=9.0),
            ]
        },
        referee,
    )
    printed = capsys.readouterr().out
    assert "case [a]" in printed
    assert "NO" in printed
    assert "[disturbed]" in printed
