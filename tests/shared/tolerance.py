"""The only numeric tolerances of the repository, strongest first.

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
    """Tier 3; values above one are compared in units of the oracle's largest, as sums of many terms are."""
    unit = oracle.abs().max().clamp(min=1.0)
    torch.testing.assert_close((actual.double() / unit).float(), (oracle / unit).float())


def assert_recomputed(actual, expected):
    """Tier 3 for gradients through recomputed layers, in units of the largest: sums are regrouped. Between two results
    in float64, where regrouping shows in the last digits only, within 1e-12."""
    unit = expected.abs().max().clamp(min=1.0)
    if actual.dtype == expected.dtype == torch.float64:
        torch.testing.assert_close(actual / unit, expected / unit, rtol=0.0, atol=1e-12)
        return
    torch.testing.assert_close((actual.double() / unit).float(), (expected / unit).float(), rtol=1e-4, atol=1e-5)


def assert_low_precision(actual, eager, oracle, *, factor):
    """Tier 4."""
    ours = (actual.double() - oracle).abs().max()
    theirs = (eager.double() - oracle).abs().max()
    assert ours <= factor * theirs + _ABSOLUTE, f"error {ours:.2e}, eager attention's {theirs:.2e}, factor {factor}"


def assert_trajectory(actual, expected, *, allowed=TRAJECTORY):
    """Tier 5: worst step and mean drift."""
    differences = torch.tensor(actual, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    assert differences.abs().max() <= allowed, f"worst step {differences.abs().max():.2e}, allowed {allowed:.0e}"
    assert differences.mean().abs() <= allowed / 2, f"drift {differences.mean():.2e}, allowed {allowed / 2:.0e}"


def assert_weights(actual, expected, *, allowed=TRAJECTORY):
    """Tier 5 for what a run ends with: every weight."""
    assert actual.keys() == expected.keys()
    worst = max(float((actual[name].double() - expected[name].double()).abs().max()) for name in expected)
    assert worst <= allowed, f"worst weight {worst:.2e}, allowed {allowed:.0e}"


def differs(actual, expected):
    """Whether a negative control shows a difference that no tolerance here would forgive."""
    return (actual.double() - expected.double()).abs().max() > 1e-2 * expected.double().abs().max()


def assert_estimate(actual, expected):
    """A figure that is said to be an estimate: within 15 per cent."""
    assert abs(actual - expected) <= 0.15 * abs(expected), f"estimated {actual:.4g}, measured {expected:.4g}"
