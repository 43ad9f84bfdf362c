"""The arithmetic bound: that it multiplies what training multiplies, no less and no more, and trains nothing."""

import json
import subprocess
import sys

import arithmetic_bound
import pytest
import tiny
import torch
import training
from arithmetic_bound import ProductsOnly, linears, needed_products
from operations import OperationCounter
from peft import get_peft_model
from tiny_models import small_model
from torch.utils.flop_counter import FlopCounterMode

from trl_packfa.bench.sides import parse_sides
from trl_packfa.errors import InvalidConfig

_LAYERS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def flops_of_training(model, tokens):
    """What torch counts of the layers' products, every position scored."""
    ids = torch.arange(tokens)[None] % tiny.VOCAB
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    return sum(by_operation.get(operation, 0) for operation in _LAYERS)


def with_adapter(**options):
    return get_peft_model(tiny.model(layers=2, **options), training.lora_config()).train()


@pytest.mark.parametrize("build", [
    lambda: tiny.model(layers=2).train(),
    lambda: tiny.model(layers=2).requires_grad_(False).train(),
    with_adapter,
    lambda: with_adapter(tie_word_embeddings=True),
], ids=["whole model", "frozen", "adapter", "tied head"])  # fmt: skip
def test_layers_multiply_as_torch_counts(build):
    """Also the first layer's projections, whose frozen inputs have no gradient; twice the tokens is the negative."""
    model = build()
    if not any(p.requires_grad for p in model.parameters()):
        model.get_output_embeddings().requires_grad_(True)
    products = [product for layer in linears(model) for product in layer.products(40, 40, torch.float32)]
    assert sum(product.flops for product in products) == flops_of_training(model, 40) != flops_of_training(model, 80)


def test_untrained_positions_are_not_scored():
    layers = linears(with_adapter())
    every, few = ([p for layer in layers for p in layer.products(40, n, torch.float32)] for n in (40, 10))
    head = 2 * 2 * 64 * tiny.VOCAB  # forward and its input's gradient
    assert sum(p.flops for p in every) - sum(p.flops for p in few) == 30 * head
    nothing = needed_products(layers, tiny.model().config, lengths=[], trained=0, dtype=torch.float32)
    assert not [product for product in nothing if product.flops]


@pytest.mark.parametrize("lengths", [(64,) * 8, (4096,), (9, 300, 7, 21)])
def test_attention_is_half_of_its_square(lengths):
    """Six products, of the tokens that a token sees; to within the rounding of documents to their mean."""
    config = tiny.model().config
    attention = sum(p.flops for p in needed_products([], config, lengths=lengths, trained=0, dtype=torch.float32))
    width, layers = 64, config.num_hidden_layers
    assert attention == pytest.approx(6 * layers * width * sum(n * n for n in lengths), rel=0.01)


def test_stacked_experts_are_refused():
    with pytest.raises(InvalidConfig, match=r"does not know how '.*mlp.*' multiplies"):
        linears(small_model("mixtral"))


def test_a_step_runs_its_products_and_trains_nothing():
    trainer = training.packed_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    only, counted = ProductsOnly(trainer), []

    def counting(*args, **kwargs):
        with OperationCounter() as counter:
            loss = only(*args, **kwargs)
        counted.append(counter.flops)
        return loss

    trainer._run_micro_batch = counting
    trainer.train()
    assert training.losses(trainer) == [0.0] * 3
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    batch = trainer.data_collator([{"input_ids": [5] * 40}, {"input_ids": [6] * 9}])
    counting(trainer.model, batch)
    given = {"lengths": (40, 9), "trained": 47, "dtype": torch.float32}
    needed = needed_products(linears(trainer.model), trainer.model.config, **given)
    assert counted[-1] == sum(product.flops for product in needed)
    assert len(set(counted)) == 4  # each batch has products of its own


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_bound_is_a_side_of_the_benchmark(lengths_file, tmp_path):
    """With the tokens of the step that it bounds; the strategies of `trl-packfa bench` stay as they are."""
    output = tmp_path / "bench.json"
    argv = f"--model tiny --lengths {lengths_file} --strategies step,step-bound --max_steps 2 --untimed_steps 1"
    argv += " --eval_documents 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    argv += f" --output {output} --output_dir {tmp_path / 'out'}"
    subprocess.run([sys.executable, arithmetic_bound.__file__, *argv.split()], check=True)
    step, bound = json.loads(output.read_text())["sides"]
    figures = ("none", None, None, step["tokens_per_step"])
    names = ("trainer", "validation_loss", "attention", "tokens_per_step")
    assert tuple(bound[name] for name in names) == figures and step["trainer"] == "trl-packfa"
    with pytest.raises(InvalidConfig, match="there is no strategy 'step-bound'"):
        parse_sides("step-bound")
