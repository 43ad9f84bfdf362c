"""Whatever happens to a model between patch and unpatch, packed equals document by document, or it is as it was.
Hypothesis draws sequences of patching, adapters, copies, files, dtypes, modes, compilation and checkpointing."""

import copy
import io
import os
import pickle

import pytest
import tiny
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peft import LoraConfig, PeftModel, get_peft_model
from tolerance import assert_float32, assert_recomputed, differs

from trl_packfa import describe, patch, unpatch

# Seen to hold: 150 at random; CI tries the same 40 every time.
INTERLEAVINGS = int(os.environ.get("INTERLEAVINGS", "24"))
LENGTHS = (5, 1, 8, 3)
TARGETS = {"mamba": ["in_proj", "x_proj"], "gpt2": ["c_attn", "c_proj"]}


def lora(name, rank):
    return LoraConfig(
        r=rank, target_modules=TARGETS.get(name, "all-linear"), lora_dropout=0.0, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def packed(model, docs):
    return torch.cat([x.detach() for x in tiny.split(model(**tiny.batch(docs)).logits, LENGTHS)])


def alone(model, docs):
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0].detach() for ids in docs])


def alone_in_float64(model, docs):
    """There and back nothing of a float32 model is lost."""
    try:
        return alone(model.double(), docs)
    finally:
        model.float()


def through_a_file(content, **options):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, **options)


def traces(model):
    """What a patch leaves on instances: forwards, states, configs of its own."""
    return [
        (name, attribute)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value).__module__.startswith("trl_packfa") or attribute.startswith("_trl_packfa")
        or (attribute == "config" and hasattr(value, "trl_packfa_source"))
    ]  # fmt: skip


class Interleavings(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(tiny.MODELS)), seed=st.integers(0, 3))
    def build(self, name, seed):
        self.name, self.model, self.is_patched, self.hooked = name, tiny.MODELS[name](), False, False
        self.docs, self.adapters = tiny.documents(LENGTHS, seed=seed), 0
        self.keys = list(self.model.state_dict())

    @property
    def peft(self):
        return isinstance(self.model, PeftModel)

    @rule(backend=st.sampled_from(["auto", "auto", "sdpa", "reference"]))
    def patch(self, backend):
        if self.name == "roformer":
            backend = "auto"
        assert patch(self.model, backend=backend) is self.model
        self.is_patched = True

    @rule()
    def unpatch(self):
        unpatch(self.model)
        self.is_patched = False

    @rule(rank=st.integers(1, 4))
    def add_adapter(self, rank):
        if self.adapters >= 2:
            return
        if not self.peft:
            self.model = get_peft_model(self.model, lora(self.name, rank))
        else:
            self.model.add_adapter(f"more{self.adapters}", lora(self.name, rank))
            self.model.set_adapter(f"more{self.adapters}")
        self.adapters += 1

    @precondition(lambda self: self.peft)
    @rule(number=st.integers(0, 1))
    def switch_adapter(self, number):
        names = list(self.model.peft_config)
        self.model.set_adapter(names[number % len(names)])

    @precondition(lambda self: self.peft)
    @rule()
    def merge_and_unload(self):
        self.model, self.adapters = self.model.merge_and_unload(), 0
        self.model.requires_grad_(True)  # PEFT leaves it frozen

    @precondition(lambda self: self.peft)
    @rule()
    def without_adapter(self):
        with self.model.disable_adapter():
            self.agrees()

    @rule(how=st.sampled_from(["deepcopy", "pickle", "file"]))
    def replace_by_copy(self, how):
        if how == "deepcopy":
            self.model = copy.deepcopy(self.model)
        elif self.hooked:
            return  # transformers' hook on the embeddings cannot be pickled, patched or not
        elif how == "pickle":
            self.model = pickle.loads(pickle.dumps(self.model))
        else:
            self.model = through_a_file(self.model, weights_only=False)

    @rule()
    def weights_through_a_file(self):
        self.model.load_state_dict(through_a_file(self.model.state_dict(), weights_only=True))

    @rule()
    def there_and_back_in_dtype(self):
        self.model.to(torch.bfloat16).to(torch.float32)

    @rule(training=st.booleans())
    def mode(self, training):
        self.model.train(training)

    @rule(on=st.booleans(), reentrant=st.booleans())
    def checkpointing(self, on, reentrant):
        if not self.model.supports_gradient_checkpointing:
            return
        self.hooked |= on
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        else:
            self.model.gradient_checkpointing_disable()

    @precondition(lambda self: self.is_patched and self.name in ("llama", "qwen2"))
    @rule()
    def compiled(self):
        torch.compiler.reset()
        compiled = torch.compile(self.model, backend="eager")
        with torch.no_grad():
            assert_float32(packed(compiled, self.docs), packed(self.model, self.docs).double())
        torch.compiler.reset()

    @precondition(lambda self: self.is_patched)
    @rule()
    def gradients_agree(self):
        self.model.train()
        found = []
        for batches in ([tiny.batch(self.docs)], [{"input_ids": ids[None], "use_cache": False} for ids in self.docs]):
            self.model.zero_grad()
            for batch in batches:
                logits = self.model(**batch).logits
                (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
            found.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
        self.model.zero_grad()
        assert found[0].keys() == found[1].keys() and found[0]
        for name, grad in found[0].items():
            assert_recomputed(grad, found[1][name])

    @invariant()
    def agrees(self):
        if not hasattr(self, "model"):
            return
        with torch.no_grad():
            if self.is_patched:
                assert_float32(packed(self.model, self.docs), alone_in_float64(self.model, self.docs))
            else:
                assert traces(self.model) == [] and describe(self.model) == "not patched"
        if not self.peft and not self.adapters:
            assert list(self.model.state_dict()) == self.keys

    def teardown(self):
        """However it went, unpatching restores what runs without it, bit for bit."""
        if not hasattr(self, "model"):
            return
        self.model.eval()
        call = {"input_ids": torch.cat(self.docs)[None], "use_cache": False}
        with torch.no_grad():
            before = self.model(**call).logits
            unpatch(self.model)
            after = self.model(**call).logits
        assert torch.equal(before, after) and traces(self.model) == []
        assert differs(tiny.split(after, LENGTHS)[2], alone(self.model, self.docs)[6:14]), "control: it must leak"


ALIKE = {"derandomize": True, "suppress_health_check": list(HealthCheck)}
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=8, stateful_step_count=8, **ALIKE)


@pytest.mark.slow
def test_many_interleavings_of_patches_and_calls_keep_the_invariants():
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=INTERLEAVINGS, stateful_step_count=20, **ALIKE)
    run_state_machine_as_test(Interleavings, settings=many)


def test_two_models_of_one_class_with_different_backends_take_turns():
    one, other, docs = tiny.model(seed=0), tiny.model(seed=1), tiny.documents(LENGTHS)
    control = other(input_ids=torch.cat(docs)[None]).logits
    patch(one, backend="reference")
    assert torch.equal(other(input_ids=torch.cat(docs)[None]).logits, control), "only one is patched"
    patch(other)
    with torch.no_grad():
        for _ in range(3):
            for model in (one, other):
                assert_float32(packed(model, docs), alone(model, docs).double())
    assert "backend used: reference" in describe(one) and "backend used: sdpa" in describe(other)
    unpatch(one)
    assert traces(one) == [] and traces(other) != []
