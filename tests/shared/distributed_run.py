"""Packed runs under torchrun or accelerate, as `launches.py` starts them.

    distributed_run.py FOLDER SCENARIOS [RANK]

RANK, if given, is killed at the end, while the others wait for it.
"""

import os
import signal
import sys
from contextlib import contextmanager
from functools import partial

import tiny
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, gather_object
from check_memo import forgotten, remember
from compiling import compile_anew
from datasets import IterableDataset
from launches import run_scenarios
from tiny_models import small_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import arguments, dataset, logs_of, lora_config, losses, packed_trainer, rows
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

import trl_packfa
from trl_packfa import PackedLayout, PackedSFTConfig, PackedSFTTrainer
from trl_packfa.attention import dispatch
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.errors import ContaminationError
from trl_packfa.layout.call_context import find_layout
from trl_packfa.parallel import sequence_parallel
from trl_packfa.parallel.sequence_parallel import shifted_labels

STEPS, SAVE, BATCH = 4, 2, 8


def model():
    return tiny.model(layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)


def mamba():
    """Build a model with mixers that run document by document."""
    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))


def quantized(base, storage):
    """Load the saved model in NF4, with its codes in tensors of this dtype."""
    config = BitsAndBytesConfig(**tiny.NF4, bnb_4bit_quant_storage=storage)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype="float32")


def deepspeed_options(stage):
    """Return a trainer's arguments for ZeRO in this stage. In stage 3 DeepSpeed would keep the weights of a small
    model whole between their uses."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    options = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {
        "zero_optimization": {"stage": stage, **(options if stage == 3 else {})},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
    }
    return {"deepspeed": config, "use_cpu": False, "ddp_backend": None}


def forget_the_last_engine():
    """Let the next trainer run another engine; the process group stays."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for noted in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # by accelerate
        os.environ.pop(noted, None)
    unset_hf_deepspeed_config()  # transformers' own, under which every model is built in parts


def experts():
    return small_model("mixtral", num_hidden_layers=2)


SHARED = ("llama", "qwen3", "gemma2", "gpt_oss")
# Models that four processes can share have fewer key/value heads than processes.
FOUR_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
BUILDERS = {"model": model, "mamba": mamba, "experts": experts}
BUILDERS |= {kind: partial(small_model, kind, **FOUR_HEADS) for kind in SHARED}


def cut_before_the_shift(labels, layout):
    """Return shifted labels of a row that two processes share, as if each had shifted its own part."""
    shifted, half = shifted_labels(labels, layout).clone(), -(-labels.numel() // 2)
    shifted.view(-1)[half - 1] = -100
    return shifted


def attend_to_own_part(attend, query, key, value, layout, arguments):
    """Attend with the layout of this process's tokens only."""
    return attend(query, key, value, PackedLayout.from_lengths([len(query)]), arguments)


def forget_the_others(ctx, grad):
    """Return the gradient of this process's loss only."""
    return ctx.shard.local(grad, dim=-1), None


FAULTS = {
    "labels": (sequence_parallel, "shifted_labels", cut_before_the_shift),
    "layout": (dispatch, "attend_sharded", attend_to_own_part),
    "gradients": (sequence_parallel._Gathered, "backward", staticmethod(forget_the_others)),
}


@contextmanager
def faulty(name):
    owner, slot, fault = FAULTS[name]
    right = vars(owner)[slot]
    setattr(owner, slot, fault)
    try:
        yield
    finally:
        setattr(owner, slot, right)


def trainer_of(
    folder, *, strategy="step", lora=True, fsdp=None, zero=None, patch_first=False, build=model, base=None,
    padded=False, documents=48, stream=False, sequence_parallel=1, **options
):  # fmt: skip
    """Build a trainer with the same examples in each step under any number of processes; `padded`: TRL's own."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        forget_the_last_engine()
    built = base or build()
    if zero is not None:
        options |= deepspeed_options(zero)
    defaults = {"max_steps": STEPS, "max_length": 96, "learning_rate": 2e-3, "gradient_accumulation_steps": 3}
    ours = {} if padded else {"packing_strategy": strategy, "use_peft": lora, "sequence_parallel": sequence_parallel}
    args = arguments(
        SFTConfig if padded else PackedSFTConfig, out=folder, save_strategy="steps", save_steps=SAVE,
        per_device_train_batch_size=BATCH * sequence_parallel // world, **ours,
        **({} if fsdp is None else {"fsdp": True, "fsdp_config": fsdp}),
        **{"ddp_backend": "gloo" if world > 1 else None, **defaults, **options},
    )  # fmt: skip
    if patch_first:
        trl_packfa.patch(built)
    adapter = lora_config() if lora else None
    cls = SFTTrainer if padded else PackedSFTTrainer
    data = dataset(documents)
    if stream:
        data = IterableDataset.from_generator(rows, gen_kwargs={"count": documents})
    return packed_trainer(args, cls=cls, model=built, peft_config=adapter, train_dataset=data)


def take_fsdp_on_a_cpu():
    """Make accelerate run FSDP on a CPU. accelerate 1.15 shards on accelerators only and silently runs FSDP on a CPU
    as DDP, although torch's `fully_shard` works there. This function enters accelerate's FSDP branch; the rest is
    accelerate's own code."""
    construct = AcceleratorState.__init__

    def enter(self, *args, fsdp_plugin=None, **kwargs):
        construct(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = enter


def take_deepspeed_on_a_cpu():
    """Make accelerate run DeepSpeed on a CPU. accelerate 1.15 has no process group for DeepSpeed on a CPU and starts
    it as one process, although DeepSpeed has a CPU accelerator. This function selects gloo; the rest is accelerate's
    and DeepSpeed's own code."""
    prepare = PartialState._prepare_backend

    def enter(self, *args, **kwargs):
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        return ("gloo", DistributedType.MULTI_CPU) if deepspeed else prepare(self, *args, **kwargs)

    PartialState._prepare_backend = enter


def run(
    folder, *, resume=None, leak=None, wrap=None, callbacks=(), evaluate=False, nf4=None, builds="model", fault=None,
    **scenario,
):  # fmt: skip
    """Train and save, and return losses, counts, engine and graphs. With `leak`, the rank with leaking attention,
    return the error of each rank. With `wrap`, an engine, return the verdict of each rank on a model that is patched
    after wrapping. With `fault`, rows are shared in a wrong way."""
    if wrap is not None:
        return check_wrapped(wrap)
    build = partial(quantized, *nf4) if nf4 else BUILDERS[builds]
    compile_anew()
    trainer = trainer_of(folder, build=build, **scenario)
    if leak is not None:
        with forgotten():  # the ranks have models of several kinds now, and all must run the check
            return errors_of_all(trainer, *([leak] if isinstance(leak, int) else leak))
    for callback in callbacks:
        trainer.add_callback(callback)
    if fault is not None:
        with faulty(fault):
            if scenario.get("check_packing", True):
                return caught(trainer)
            trainer.train()
            return {"losses": losses(trainer)}
    if evaluate:
        return {"eval": trainer.evaluate(dataset(8 if evaluate is True else evaluate))["eval_loss"]}
    trained = count_trained(trainer)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_fsdp_enabled:  # of a sharded state dict the Trainer would save nothing, without a word
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(f"{folder}/saved")
    logs, report = logs_of(trainer), None if scenario.get("padded") else trainer.check_report
    return {
        "losses": losses(trainer),
        "norms": [entry["grad_norm"] for entry in logs],
        "flos": trainer.state.total_flos,
        "sharded_row": report["shared row"].difference if report and "shared row" in report else None,
        "tokens": [entry["num_tokens"] for entry in logs],
        "trained": sum(gather_object([sum(trained)])),
        "verdict": report.verdict if report else "padded",
        "engine": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "graphs": compiled_graphs(),
        "wrapped": [type(trainer.model_wrapped).__name__, type(trainer.model).__name__],
    }


def count_trained(trainer):
    """Record the true tokens of this rank's packed micro-batches; TRL's own trainer has none."""
    if not isinstance(trainer, PackedSFTTrainer):
        return []
    found, run = [], trainer._run_micro_batch

    def counting(model, inputs, *args):
        layout = inputs.get("packed_layout")
        if layout is not None:
            found.append(layout.num_tokens - layout.padding)
        return run(model, inputs, *args)

    trainer._run_micro_batch = counting
    return found


def errors_of_all(trainer, rank, kind="forward"):
    """Return the error of each rank if documents leak or packed gradients are too small on one rank."""
    if trainer.accelerator.process_index == rank:
        attention = next(m for name, m in trainer.model.named_modules() if name.endswith("layers.1.self_attn"))
        override = vars(attention)["forward"]

        def leaks(hidden_states, **kwargs):
            if find_layout((), kwargs) is not None and kind == "forward":
                hidden_states = hidden_states + hidden_states.mean(dim=1, keepdim=True)
            elif find_layout((), kwargs) is not None:
                hidden_states = (hidden_states + hidden_states.detach()) / 2
            return override(hidden_states, **kwargs)

        attention.forward = leaks
    return caught(trainer)


def caught(trainer):
    try:
        trainer.train()
    except ContaminationError as error:
        return gather_object([f"{error!s} at step {trainer.state.global_step}"])
    return gather_object([None])


def check_wrapped(engine):
    """Return the verdict of each rank on a model that is patched after wrapping."""
    built = model()
    if engine == "FSDP2":
        mesh = init_device_mesh("cpu", (PartialState().num_processes,))
        for layer in built.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(built, mesh=mesh)
    else:
        built = DistributedDataParallel(built)
    return gather_object([trl_packfa.check(trl_packfa.patch(built)).verdict])


def _die_if_chosen(rank):
    if sys.argv[3:] == [str(rank)]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    take_fsdp_on_a_cpu()
    take_deepspeed_on_a_cpu()
    remember(setattr)
    run_scenarios(run, before_the_end=_die_if_chosen)
