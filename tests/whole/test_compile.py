"""`torch_compile=True` with packing: a layer's graphs, compiled once for all layers and for batches of whatever
documents; a backbone that is compiled whole is one graph."""

import copy
import os
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from compiling import compile_anew
from peft import get_peft_model
from pretended import on_any_device, pretend
from selection import exhaustive
from tiny_models import small_model
from tolerance import assert_float32, assert_gradients, assert_recomputed, assert_trajectory, differs
from torch._dynamo.exc import FailOnRecompileLimitHit
from training import AfterEachStep, arguments, dataset, lora_config, losses, packed_trainer, trained

from trl_packfa import check, patch, unpatch
from trl_packfa.attention import varlen
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.compile import runs_compiled, uncompiled
from trl_packfa.trainers.sft import model_code

# More layers than torch compiles variants of a function.
LAYERS, STEPS = 10, 8
# Of each batch's documents: few and many, one alone, of one token, one long.
BATCHES = ((13, 1, 29), (40,), (2, 30, 3, 3, 18, 5), (1, 1), (60, 5))
BACKBONE_AND_HEAD = 2


def train(out, strategy, *, compiled=True, lora=True, model=None, **options):
    seen = []
    options |= {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    args = arguments(out=out, packing_strategy=strategy, max_length=96, max_steps=STEPS, check_packing=False,
                     use_peft=lora, learning_rate=1e-4, **options)  # fmt: skip
    adapters = {} if lora else {"peft_config": None}
    trainer = packed_trainer(args, model=model or tiny.model(layers=2), train_dataset=dataset(100), **adapters)
    trainer.add_callback(AfterEachStep(lambda: seen.append(compiled_graphs())))
    return seen, losses(trained(trainer))


@pytest.mark.parametrize(("strategy", "lora"), [("step", True), ("bfd", False)], ids=["step-LoRA", "bfd-full"])
def test_a_run_compiles_one_layer_in_its_first_step(strategy, lora, tmp_path):
    """However many there are. Adapters: the first layer's input needs no gradient, which is a graph of its own."""
    seen, compiled = train(tmp_path / "compiled", strategy, lora=lora, model=tiny.model(layers=LAYERS))
    assert seen == [1 + lora] * STEPS
    eager = train(tmp_path / "eager", strategy, lora=lora, model=tiny.model(layers=LAYERS), compiled=False)
    assert_trajectory(compiled, eager[1])


def test_checkpointed_layers_are_in_it(tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    seen, compiled = train(tmp_path / "compiled", "step", **options)
    assert seen[1] == seen[-1] <= 3  # transformers' hook on the embeddings cuts the first graph off
    assert_trajectory(compiled, train(tmp_path / "eager", "step", compiled=False)[1])


def test_fixed_shapes_would_be_many(tmp_path, monkeypatch):
    """The control."""
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        seen, _ = train(tmp_path, "step", model=tiny.model(layers=1))
    assert seen[-1] > seen[0]


@pytest.mark.parametrize("allowed", [True, False])
def test_layers_that_differ_have_graphs_of_their_own(allowed, tmp_path, monkeypatch):
    """Past torch's own limit of variants; the control leaves it as it is."""
    if not allowed:
        monkeypatch.setattr(model_code, "allow_graphs_of_layers", lambda layers: nullcontext())
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 5)
    model = tiny.model(layers=6)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = type(layer.mlp)(SimpleNamespace(**{**vars(model.config), "intermediate_size": 16 + 8 * number}))
    outcome = nullcontext() if allowed else pytest.raises(FailOnRecompileLimitHit)
    with torch._dynamo.config.patch(**limits, fail_on_recompile_limit_hit=True), outcome:
        seen, _ = train(tmp_path, "step", lora=False, model=model)
        assert seen[1] == seen[-1] >= 6
        assert torch._dynamo.config.recompile_limit == 5, "torch's limit is put back when training ends"


def test_layers_share_graphs_where_attention_leaves_them(tmp_path):
    """Dropout is drawn outside of graphs; what is left of a layer is compiled once for all."""
    several, _ = train(tmp_path / "several", "step", lora=False, model=tiny.model(layers=4, attention_dropout=0.1))
    compile_anew()
    two, _ = train(tmp_path / "two", "step", lora=False, model=tiny.model(layers=2, attention_dropout=0.1))
    assert several[-1] == several[1] == two[1]


def test_the_whole_model_is_left_uncompiled_and_unpatch_takes_the_layers_back(tmp_path):
    args = arguments(out=tmp_path, torch_compile=True, torch_compile_backend="eager", use_peft=False, max_steps=1)
    trainer = trained(packed_trainer(args, model=tiny.model(layers=2), peft_config=None))
    assert not hasattr(trainer.model_wrapped, "_orig_mod") and runs_compiled(trainer.model)
    with uncompiled(trainer.model):
        assert not runs_compiled(trainer.model)
    again = copy.deepcopy(trainer.model)
    assert not runs_compiled(again) and again.state_dict().keys() == tiny.model(layers=2).state_dict().keys()
    unpatch(trainer.model)
    assert not runs_compiled(trainer.model)


def test_a_check_may_run_uncompiled():
    """As the trainer's does on a model that is compiled already; what is compiled by itself, as flex's kernel, still
    is. A call of the model is the control."""
    model = torch.compile(patch(tiny.model(layers=1)), backend="eager")
    with uncompiled(model):
        report = check(model)
        assert compiled_graphs() == 0 and not runs_compiled(model)
        torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert compiled_graphs() == 1 and report.is_exact and "compiled" not in str(report)
    model(**tiny.batch(tiny.documents()))
    assert compiled_graphs() == 1 + BACKBONE_AND_HEAD and runs_compiled(model)


def same_as_eager(model, batches=BATCHES, *, backend="aot_eager"):
    compiled = torch.compile(model, backend=backend)
    for seed, lengths in enumerate(batches):
        batch = tiny.batch(tiny.documents(lengths, seed=seed))
        ways = (model, compiled)
        (expected, grads), (actual, compiled_grads) = (logits_and_gradients(f, model, batch) for f in ways)
        assert_recomputed(actual, expected)
        assert_gradients(compiled_grads, grads)


def logits_and_gradients(forward, model, batch):
    model.zero_grad()
    logits = forward(**batch).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Windows, softcap, sinks, experts, masks that carry the layout, layers of several kinds.
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", *exhaustive("phi", "mixtral")])
def test_gradients_are_those_without_compiling(name):
    model = tiny.model(name, layers=2) if name in tiny.ARCHITECTURES else small_model(name)
    same_as_eager(patch(model.train()))
    assert compiled_graphs() == BACKBONE_AND_HEAD


# Biases, document by document, stateful mixers, frequencies of the longest document, routing: in parts.
@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [("mpt", False), ("llama-dynamic", False), ("jamba", True), ("deepseek_v32", True),
     *exhaustive(("falcon", True), ("jamba", False), ("roformer", True), ("deepseek_v3", False))],
)  # fmt: skip
def test_so_are_those_of_models_that_leave_the_graph(name, checkpointed):
    model = tiny.model(name) if name in tiny.ARCHITECTURES else small_model(name)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    same_as_eager(patch(model.train()), BATCHES[1:3], backend="eager")


def test_dropout_leaves_the_graph():
    model = patch(tiny.model(layers=1, attention_dropout=0.5).train())
    compiled = torch.compile(model, backend="eager")
    batch, drawn = tiny.batch(tiny.documents()), []
    for forward, seed in ((model, 0), (compiled, 0), (compiled, 1)):
        torch.manual_seed(seed)
        drawn.append(forward(**batch).logits.detach())
    assert_float32(drawn[1], drawn[0].double())
    assert differs(drawn[2], drawn[1])


@pytest.mark.parametrize(("backend", "lora"), [("varlen", True), *exhaustive(("flash", False))])
def test_flash_attention_is_in_the_graph(backend, lora, monkeypatch):
    """Told of every batch's boundaries and longest document, which the stand-in compares."""
    pretend(monkeypatch, backend)
    model = tiny.model("mistral", layers=2)
    model = patch(get_peft_model(model, lora_config()).train() if lora else model)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, backend="aot_eager")
        for seed, lengths in enumerate(BATCHES):
            batch = tiny.batch(tiny.documents(lengths, seed=seed))
            compiled(**batch).logits.float().square().mean().backward()
    assert compiled_graphs() == BACKBONE_AND_HEAD


def test_torchs_own_varlen_attn_is_traced(monkeypatch):
    """Only its kernel needs a GPU. Tokens, documents and the longest of them are symbols, not numbers."""
    on_any_device(monkeypatch, varlen.VarlenBackend)
    traced = []

    def without_kernels(graph, example_inputs):
        calls = [node for node in graph.graph.nodes if "varlen_attn" in str(node.target)]
        for call in calls:
            traced.append(call.args)
            call.target = lambda query, *_: (query.clone(), None, None)
        graph.recompile()
        return graph.forward

    model = patch(tiny.model("mistral", layers=2).to(torch.bfloat16).train())
    compiled = torch.compile(model, backend=without_kernels)
    for seed, lengths in enumerate(BATCHES):
        compiled(**tiny.batch(tiny.documents(lengths, seed=seed))).logits.float().sum().backward()
    assert len(traced) == 2, "one call a layer, traced once"
    for query, key, value, offsets, *_, longest in (call[:6] for call in traced):
        shapes = [node.meta["example_value"].shape[0] for node in (query, key, value, offsets)]
        assert all(isinstance(size, torch.SymInt) for size in (*shapes, longest.meta["example_value"]))


def test_the_operator_is_sound():
    """Schema, fake results and autograd, by torch's own checks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
    for sinks in (None, torch.randn(4, generator=generator, requires_grad=True)):
        torch.library.opcheck(torch.ops.trl_packfa.attend.default, (q, k, v, sinks, offsets, "sdpa", 0.5, None, None))


@pytest.mark.slow
@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
                    reason="torch's inductor needs a C++ compiler on a CPU")  # fmt: skip
def test_a_model_compiled_by_inductor_equals_the_eager_one():
    """torch's own compiler, which `torch_compile=True` takes."""
    model = patch(get_peft_model(tiny.model(layers=2), lora_config()).train())
    same_as_eager(model, backend="inductor")
    assert compiled_graphs() == BACKBONE_AND_HEAD
