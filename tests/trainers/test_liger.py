"""`use_liger_kernel=True`: Liger's own patch of a model is made before ours, so that the check is of what trains."""

from types import MethodType

import pytest
from training import arguments, losses, packed_trainer

from trl_packfa.trainers.sft import check_gate, model_code


@pytest.fixture
def events(monkeypatch):
    """A Liger that puts forwards on instances, as the real one does; when it is applied, checked, run."""
    events = []

    def forward(self, hidden_states):
        events.append("norm") if events[-1] != "norm" else None
        return type(self).forward(self, hidden_states)

    def apply(model, config):
        assert config == {"fused_linear_cross_entropy": False}, "TRL's choice"
        events.append("applied")
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = MethodType(forward, module)

    check = check_gate.check
    monkeypatch.setattr(model_code, "apply_liger_kernel", apply)
    too_late = "transformers.trainer.apply_liger_kernel"
    monkeypatch.setattr(too_late, lambda *args: pytest.fail("applied after the check"))
    monkeypatch.setattr(check_gate, "check", lambda *a, **k: events.append("checked") or check(*a, **k))
    return events


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
def test_liger_is_applied_once_and_checked(events):
    args = arguments(use_liger_kernel=True, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = packed_trainer(args, eval_dataset=packed_trainer(arguments()).train_dataset)
    assert events.index("applied") == 0, "before anything runs"
    trainer.train()
    assert "checked" in events and events[events.index("checked") + 1] == "norm", "the check runs Liger's forwards"
    assert events.count("applied") == 1 and trainer.check_report.is_exact and len(losses(trainer)) == 2
    assert trainer.args.use_liger_kernel, "as it was asked for: checkpoints say so"


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
def test_liger_that_is_not_installed_is_refused_by_transformers(monkeypatch):
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: False)
    with pytest.raises(ImportError, match=r"(?i)use_liger_kernel.*not available(.|\n)*pip install"):
        packed_trainer(arguments(use_liger_kernel=True))
