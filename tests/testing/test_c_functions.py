"""Functions of C++ through ctypes: forward, backward, and what goes wrong."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.sampled import kept

from saccade.testing import adapters
from saccade.testing.judging import Declaration, Source, judge

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <unistd.h>

static void weights(const double* q, const double* k, const uint8_t* mask, int64_t keys, int64_t width, double scale,
                    std::vector<double>& p) {
  double most = -INFINITY, sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    p[j] = 0;
    if (!mask[j]) continue;
    for (int64_t d = 0; d < width; ++d) p[j] += q[d] * k[j * width + d];
    p[j] *= scale;
    most = std::isnan(p[j]) || p[j] > most ? p[j] : most;
  }
  for (int64_t j = 0; j < keys; ++j) sum += p[j] = mask[j] ? std::exp(p[j] - most) : 0;
  for (int64_t j = 0; j < keys; ++j) p[j] = mask[j] ? p[j] / sum : 0;
}

extern "C" int attention(const double* q, const double* k, const double* v, const uint8_t* mask, double* out,
                         const int64_t* n, double scale) {
  const int64_t heads = n[1], groups = n[2], rows = n[3], keys = n[4], width = n[5], values = n[6];
  std::vector<double> p(keys);
  for (int64_t row = 0; row < n[0] * heads * rows; ++row) {
    const int64_t head = row / rows, group = head / heads * groups + head % heads / (heads / groups);
    weights(q + row * width, k + group * keys * width, mask + row * keys, keys, width, scale, p);
    std::fill(out + row * values, out + (row + 1) * values, 0.0);
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t e = 0; mask[row * keys + j] && e < values; ++e)
        out[row * values + e] += p[j] * v[(group * keys + j) * values + e];
  }
  return 0;
}

extern "C" int backward(const double* q, const double* k, const double* v, const uint8_t* mask, const double* out,
                        const double* grad, double* dq, double* dk, double* dv, const int64_t* n, double scale) {
  const int64_t heads = n[1], groups = n[2], rows = n[3], keys = n[4], width = n[5], values = n[6];
  std::vector<double> p(keys);
  std::fill(dq, dq + n[0] * heads * rows * width, 0.0);
  std::fill(dk, dk + n[0] * groups * keys * width, 0.0);
  std::fill(dv, dv + n[0] * groups * keys * values, 0.0);
  for (int64_t row = 0; row < n[0] * heads * rows; ++row) {
    const int64_t head = row / rows, group = head / heads * groups + head % heads / (heads / groups);
    weights(q + row * width, k + group * keys * width, mask + row * keys, keys, width, scale, p);
    double total = 0;
    for (int64_t e = 0; e < values; ++e) total += grad[row * values + e] * out[row * values + e];
    for (int64_t j = 0; j < keys; ++j) {
      if (!mask[row * keys + j]) continue;
      const int64_t at = group * keys + j;
      double change = -total;
      for (int64_t e = 0; e < values; ++e) {
        change += grad[row * values + e] * v[at * values + e];
        dv[at * values + e] += p[j] * grad[row * values + e];
      }
      for (int64_t d = 0; d < width; ++d) {
        dq[row * width + d] += p[j] * change * scale * k[at * width + d];
        dk[at * width + d] += p[j] * change * scale * q[row * width + d];
      }
    }
  }
  return 0;
}

extern "C" int crashing(const double* q, const double* k, const double* v, const uint8_t* mask, double* out,
                        const int64_t* n, double scale) {
  if (n[5] != n[6]) __builtin_trap();
  return attention(q, k, v, mask, out, n, scale);
}

extern "C" int leaving(const double*, const double*, const double*, const uint8_t*, double*, const int64_t*, double) {
  exit(0);
}

extern "C" int waiting(const double*, const double*, const double*, const uint8_t*, double*, const int64_t*, double) {
  fputs("called\n", stderr);
  while (sleep(120)) {}
  return 3;
}

extern "C" int refusing(const double*, const double*, const double*, const uint8_t*, double*, const int64_t*, double) {
  return 3;
}
"""
LAWS = ["oracle", "gradients_of_inputs", "gradcheck", "scale", "strides", "isolation", "pure", "offered"]
CASES = ["causal", "nothing", "all-heads-share", "widths-differ"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("library")
    (folder / "mine.cpp").write_text(SOURCE, encoding="utf-8")
    command = ["g++", "-O1", "-shared", "-fPIC", "mine.cpp", "-o", "mine.so"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "mine.so")


@pytest.mark.ci
def test_a_forward_and_a_backward_function_are_judged_together(library):
    claims = Declaration(dtypes=("float64",), settings={"dtype": "float64", "backward": "backward"})
    source = Source.parse(f"{library}::attention")
    found = judge(source.load(), claims, source=source, laws=LAWS, cases=CASES, seed=0)
    assert found.ok, found
    assert {result.law for result in found.report.kept} >= {*LAWS[:4], "isolation"}, found


@pytest.mark.ci
def test_a_status_other_than_0_is_a_failure_and_a_script_shows_it(library):
    claims = Declaration(dtypes=("float64",), settings={"dtype": "float64"})
    source = Source.parse(f"{library}::refusing")
    found = judge(source.load(), claims, source=source, laws=["oracle"], cases=["causal"], seed=0)
    (example,) = found.counter_examples
    assert "RuntimeError: the C function returned 3" in example.message
    assert "the call raises RuntimeError" in example.shows[0]


@pytest.mark.ci
def test_inputs_of_another_dtype_and_gradients_without_a_backward_function_are_refused(library):
    form = adapters.c_function(library, "attention", "float64")
    query = torch.randn(1, 1, 2, 4, requires_grad=True)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert form.reasons(query, query, query, mask) == ("takes float64 only on the CPU", "has no gradients")
    with pytest.raises(ValueError, match="backward must be a function of the library"):
        adapters.c_function(library, "attention", backward="nothing")


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command runs in one process")


def command_of(library, name):
    command = [sys.executable, "-m", "saccade", "judge", f"{library}::{name}", "--law", "oracle", "--seed", "5"]
    return [*command, "--claim", 'dtypes=["float64"]', "--claim", 'settings={dtype="float64"}']


@pytest.mark.ci
@on_linux
def test_the_command_names_the_trial_in_which_a_function_crashes(library):
    command = [*command_of(library, "crashing"), "--claim", "gradients=false"]
    cases = [argument for case in CASES for argument in ("--case", case)]
    done = subprocess.run([*command, *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    trial = "oracle, case widths-differ, float64, seed 5"
    assert f"::crashing must return from each call; got SIGILL in the trial {trial}" in done.stderr


@pytest.mark.slow
@pytest.mark.many
@on_linux
def test_the_command_tries_what_a_function_that_crashes_can_do(library):
    command = [*command_of(library, "crashing"), "--claim", "gradients=false", "--case", "causal"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The law that could be tried holds." in done.stdout


@on_linux
def test_a_function_that_ends_the_process_is_no_success(library, tmp_path):
    """The exit code is 1, and text that was printed before appears once."""
    claims = tmp_path / "claims.py"
    claims.write_text('print("read")\nCLAIMS = {"gradients": False}\n')
    command = [*command_of(library, "leaving"), "--claims", f"{claims}::CLAIMS", "--case", "causal"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "read\n")
    trial = "oracle, case causal, float64, seed 5"
    assert f"::leaving must return from each call; got exit status 0 in the trial {trial}." in done.stderr


@pytest.fixture
def _with_sigint() -> Iterator[None]:
    """A command inherits that SIGINT is ignored, as it is in tests that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@on_linux
@pytest.mark.usefixtures("_with_sigint")
@pytest.mark.parametrize("number", kept([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], signal.SIGINT))
def test_an_interrupted_command_stops_a_function_that_does_not_return(library, number):
    command = [*command_of(library, "waiting"), "--claim", "gradients=false", "--case", "causal"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "called\n"
        running.send_signal(number)
        try:
            left = running.communicate(timeout=60)[1]  # which waits until no process has the pipe open
        finally:
            running.kill()
    assert (left, running.returncode) == ("", -number if number == signal.SIGKILL else 130)
