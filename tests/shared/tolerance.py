"""All numeric tolerances of the repository, strictest first.

1. exact: `torch.equal`, no function needed.
2. isolation: exact too, see `assert_isolated`.
3. float32 against the float64 oracle: `torch.testing.assert_close` defaults for float32.
4. bf16 and fp16: error at most 2x (forward) or 3x (gradient) that of plain eager attention in the same dtype.
5. trajectories: losses of a run against the same run padded.
"""

import torch

# Measured: 20 steps of LoRA in float32, padded against the same run packed, differ by 2e-6 at a loss of 9.7; padded
# against itself with micro-batches regrouped by as much.
TRAJECTORY = 1e-5
# Measured: 4 steps of QLoRA, whose adapters TRL keeps in bfloat16, differ by 5e-5 if micro-batches are regrouped.
BFLOAT16_TRAJECTORY = 2e-4
# Measured on a CPU: ten steps under bfloat16's autocast, padded against packed, differ by 5e-3.
BFLOAT16_LOSSES = 2e-2
FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_ABSOLUTE = 1e-5  # for results that are exactly right in eager attention


def assert_float32(actual, oracle):
    """Assert tier 3; values above one are compared in units of the oracle's largest value, like sums of many terms."""
    unit = oracle.abs().max().clamp(min=1.0)
    torch.testing.assert_close((actual.double() / unit).float(), (oracle / unit).float())


def assert_recomputed(actual, expected):
    """Assert tier 3 for gradients through recomputed layers, in units of the largest, because sums are regrouped. Two
    float64 results must agree within 1e-12, because regrouping changes only their last digits."""
    unit = expected.abs().max().clamp(min=1.0)
    if actual.dtype == expected.dtype == torch.float64:
        torch.testing.assert_close(actual / unit, expected / unit, rtol=0.0, atol=1e-12)
        return
    torch.testing.assert_close((actual.double() / unit).float(), (expected / unit).float(), rtol=1e-4, atol=1e-5)


def assert_low_precision(actual, eager, oracle, *, factor):
    """Assert tier 4: low-precision errors relative to eager attention."""
    ours = (actual.double() - oracle).abs().max()
    theirs = (eager.double() - oracle).abs().max()
    assert ours <= factor * theirs + _ABSOLUTE, f"error {ours:.2e}, eager attention's {theirs:.2e}, factor {factor}"


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


def assert_trajectory(actual, expected, *, allowed=TRAJECTORY):
    """Assert tier 5: the worst step and the mean drift of the losses."""
    differences = torch.tensor(actual, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    assert differences.abs().max() <= allowed, f"worst step {differences.abs().max():.2e}, allowed {allowed:.0e}"
    assert differences.mean().abs() <= allowed / 2, f"drift {differences.mean():.2e}, allowed {allowed / 2:.0e}"


def assert_weights(actual, expected, *, allowed=TRAJECTORY):
    """Assert tier 5 for every weight at the end of a run."""
    assert actual.keys() == expected.keys()
    worst = max(float((actual[name].double() - expected[name].double()).abs().max()) for name in expected)
    assert worst <= allowed, f"worst weight {worst:.2e}, allowed {allowed:.0e}"


def differs(actual, expected):
    """Tell whether a negative control differs more than any tolerance here allows."""
    return (actual.double() - expected.double()).abs().max() > 1e-2 * expected.double().abs().max()


def assert_estimate(actual, expected):
    """Assert that an estimated figure is within 15 per cent."""
    assert abs(actual - expected) <= 0.15 * abs(expected), f"estimated {actual:.4g}, measured {expected:.4g}"
