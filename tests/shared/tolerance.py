"""All numeric tolerances of the repository, strictest first.

1. exact: `torch.equal`, no function needed. Isolation is exact too.
2. regrouped: float32 sums of other terms together, and what the check measures where only rounding differs.
3. float32 against the float64 oracle: `torch.testing.assert_close` defaults for float32.
4. bf16 and fp16: error at most 2x (forward) or 3x (gradient) that of plain eager attention in the same dtype.
5. runs: figures and weights of a run against the same run padded.

Every bound is in units of what is compared. With `MARGINS=FILE` each comparison appends its test and what it found, as
a share of what is allowed, to the file; `python tools/margins.py` makes a table of them.
"""

import json
import math
import os

import torch

# A figure of a run is a mean over many tokens. Rounding moves it by some last places of its value, and a step's
# rounding moves all later steps; it has no direction, so it grows with the root of the steps. Allowed is twice what
# moves TRL's own padded run if its weights begin one last place off: 29 of float32's last places and the root of the
# steps (20 steps, SSE4), or under autocast one rounding: 0.25 of bfloat16's. Padded against packed: 8 and 0.12.
RUN_PLACES = {torch.float32: 64.0, torch.bfloat16: 0.5}
# Of bfloat16's: the loss and the gradients of pairs hang on differences of sums of log-probabilities. Measured: 0.3.
BFLOAT16_PAIRS = 1.0
# Of float32's: TRL keeps the adapters of a 4-bit model in bfloat16, and rounds each update to it.
BFLOAT16_ADAPTERS = 256.0
# A run that is a negative control differs by more than this many times what is allowed.
CONTROL = 10.0
# The share of the largest value by which another negative control differs: more than any tolerance here allows.
VISIBLE = 1e-2
# Relative difference that regrouped sums may have: 256 last places of float32.
REGROUPED = 256 * torch.finfo(torch.float32).eps
# The same of every type with random weights, some of which are ill-conditioned: of the logits' spread.
ILL_CONDITIONED = 1e-3
# The same in float64.
FLOAT64 = 1e-10
# Two ways to compute in half precision, both rounded once: last places of the largest value.
_HALF_PLACES = 4.0
# Gradients smaller than this share of the largest may be rounding alone, and are compared with this share.
_SMALL_GRADIENT = 1e-2
FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_RELATIVE, _ABSOLUTE = 1.3e-6, 1e-5  # of float32
_RECOMPUTED = {torch.float32: (1e-4, _ABSOLUTE), torch.float64: (0.0, 1e-12)}


def record(bound, share):
    """Append a comparison to the file that `MARGINS` names."""
    if "MARGINS" in os.environ:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0]
        with open(os.environ["MARGINS"], "a") as file:
            file.write(json.dumps([bound, float(share), test]) + "\n")


def _assert_close(bound, actual, expected, *, rtol, atol):
    """Assert `|actual - expected| <= atol + rtol * |expected|`, in units of the largest expected value above one."""
    unit = expected.abs().max().double().clamp(min=1.0)
    actual, expected = actual.double() / unit, expected.double() / unit
    if "MARGINS" in os.environ and actual.shape == expected.shape:
        record(bound, ((actual - expected).abs() / (atol + rtol * expected.abs())).max())
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_float32(actual, oracle):
    """Assert tier 3; values above one are compared in units of the oracle's largest value, like sums of many terms."""
    _assert_close("float32", actual, oracle, rtol=_RELATIVE, atol=_ABSOLUTE)


def assert_recomputed(actual, expected):
    """Assert tier 3 for gradients through recomputed layers, in units of the largest, because sums are regrouped. Two
    float64 results must agree within 1e-12, because regrouping changes only their last digits."""
    dtype = torch.float64 if actual.dtype == expected.dtype == torch.float64 else torch.float32
    rtol, atol = _RECOMPUTED[dtype]
    _assert_close(f"recomputed, {dtype}", actual, expected, rtol=rtol, atol=atol)


def assert_regrouped(actual, expected):
    """Assert tier 2 for one tensor, or for the gradients of named parameters."""
    if not isinstance(expected, dict):
        actual, expected = {"": actual}, {"": expected}
    assert actual.keys() == expected.keys() and expected
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    largest = max(sizes.values())
    for name, tensor in expected.items():
        off = float((actual[name] - tensor).abs().max())
        assert_rounding(off / max(sizes[name], _SMALL_GRADIENT * largest), name)


def assert_rounding(difference, where="", *, allowed=REGROUPED):
    """Assert tier 2 for a relative difference."""
    record("regrouped" if allowed == REGROUPED else f"regrouped, {allowed:.0e}", difference / allowed)
    assert difference <= allowed, f"{where} differs by {difference:.2e}, allowed {allowed:.0e}"


def assert_half(actual, expected):
    """Assert that two results in half precision differ by their own rounding alone."""
    places = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert_rounding(float(places), allowed=_HALF_PLACES * torch.finfo(expected.dtype).eps)


def assert_low_precision(actual, eager, oracle, *, factor):
    """Assert tier 4: low-precision errors relative to eager attention."""
    ours = (actual.double() - oracle).abs().max()
    theirs = (eager.double() - oracle).abs().max()
    allowed = factor * theirs + _ABSOLUTE * oracle.abs().max().clamp(min=1.0)  # eager's may be exactly right
    record(f"{actual.dtype} beside eager", ours / allowed)
    assert ours <= allowed, f"error {ours:.2e}, eager attention's {theirs:.2e}, factor {factor}"


def assert_no_worse(found, eager, oracle):
    """Assert tier 4 for outputs and the gradients of named parameters, as pairs."""
    assert_low_precision(found[0], eager[0], oracle[0], factor=FORWARD_FACTOR)
    assert found[1].keys() == eager[1].keys() == oracle[1].keys()
    for name, gradient in found[1].items():
        assert_low_precision(gradient, eager[1][name], oracle[1][name], factor=GRADIENT_FACTOR)


def assert_gradients(found, expected):
    """Assert tier 3 for the gradients of named parameters."""
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        assert_recomputed(gradient, expected[name])


def share_of_allowed(actual, expected, *, steps, size=0.0, dtype=torch.float32, places=None):
    """Return the difference of a figure after some steps as a share of what tier 5 allows, with its sign. `size` is
    that of numbers which the figure is the difference of."""
    unit = max(1.0, abs(expected), size) * torch.finfo(dtype).eps * math.sqrt(steps)
    share = (actual - expected) / (unit * (RUN_PLACES[dtype] if places is None else places))
    return share if math.isfinite(share) else math.inf


def _shares(actual, expected, **options):
    """Return the shares of a run's figures: one or several of each step, beginning with the first."""
    assert len(actual) == len(expected) and len(expected)
    steps = [[step] if isinstance(step, (int, float)) else step for step in (*actual, *expected)]
    pairs = zip(steps[: len(actual)], steps[len(actual) :], strict=True)
    return [
        share_of_allowed(a, b, steps=number, **options)
        for number, (ours, theirs) in enumerate(pairs, 1) for a, b in zip(ours, theirs, strict=True)
    ]  # fmt: skip


def assert_trajectory(actual, expected, *, dtype=torch.float32, places=None):
    """Assert tier 5: the worst step, and half of it for the mean drift."""
    shares = _shares(actual, expected, dtype=dtype, places=places)
    worst, drift = max(map(abs, shares)), abs(sum(shares)) / len(shares)
    record(f"run, {dtype}" if places is None else f"run, {places:g} places", max(worst, 2 * drift))
    assert worst <= 1.0, f"worst step {worst:.2f} of what is allowed"
    assert drift <= 0.5, f"drift {drift:.2f} of what is allowed"


def assert_another_run(actual, expected, *, dtype=torch.float32):
    """Assert that a negative control is far from tier 5."""
    worst = max(map(abs, _shares(actual, expected, dtype=dtype)))
    record("run, control", worst)
    assert worst > CONTROL, f"the control's worst step is {worst:.2f} of what is allowed"


def assert_weights(actual, expected, *, steps=1):
    """Assert tier 5 for every weight at the end of a run, in last places of the largest weight."""
    assert actual.keys() == expected.keys()
    off = {name: (actual[name].double() - tensor.double()).abs().max() for name, tensor in expected.items()}
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    shares = {name: share_of_allowed(float(off[name]), 0.0, steps=steps, size=sizes[name]) for name in expected}
    worst = max(shares, key=lambda name: shares[name])
    record("weights", shares[worst])
    assert shares[worst] <= 1.0, f"{worst} is off by {off[worst]:.2e}, {shares[worst]:.2f} of what is allowed"


def differs(actual, expected):
    """Tell whether a negative control differs more than any tolerance here allows."""
    share = (actual.double() - expected.double()).abs().max() / (VISIBLE * expected.double().abs().max())
    if share > 1.0:
        record("control", share)
    return share > 1.0


def assert_estimate(actual, expected):
    """Assert that an estimated figure is within 15 per cent."""
    assert abs(actual - expected) <= 0.15 * abs(expected), f"estimated {actual:.4g}, measured {expected:.4g}"


def assert_by_chance(differences):
    """Assert that independent differences of one spread have a mean of zero: it is within five standard deviations."""
    deviations = float(differences.mean() / differences.std() * math.sqrt(differences.numel()))
    record("by chance", abs(deviations) / 5)
    assert abs(deviations) <= 5, f"the mean is {deviations:.1f} standard deviations from zero"
