"""`attn_implementation="packfa"` on every type (one of each kind in `make test-all`), in TRL's own trainer over 20
steps, and on several processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from committed import kind_of
from datasets import Dataset
from oracle import alone
from selection import one_of_each
from tiny import LENGTHS, documents, split, tokenizer, words
from tiny_models import NOT_BUILDABLE, all_types, small_model
from tolerance import ILL_CONDITIONED, assert_another_run, assert_rounding, assert_trajectory, differs
from training import trained

import trl_packfa
import trl_packfa.register
from trl_packfa import PackedLayout
from trl_packfa.errors import PackingError, UnsupportedModel
from trl_packfa.patches.measured import results
from trl_packfa.patching.by_name import named_options

LAYOUT = PackedLayout.from_lengths(LENGTHS)
POSITIONS = {"position_ids": LAYOUT.position_ids()}
OFFSETS = {name: value for name, value in LAYOUT.flash_kwargs().items() if name != "seq_idx"}
BOTH = {**POSITIONS, **LAYOUT.flash_kwargs()}
TYPES = [name for name in all_types() if name not in NOT_BUILDABLE]
# Their code looks the name up in a dictionary of its own while the model is made.
OWN_TABLE = ("falcon", "git", "gpt_neo", "gptj")
# They ask transformers for neither a mask nor attention, so only `check` sees them.
UNSEEN = (
    "cpmant", "falcon_mamba", "mamba", "mamba2", "openai-gpt", "prophetnet", "reformer", "rwkv", "xlm", "xlnet",
    "xlstm",
)  # fmt: skip


# They do not pass position_ids on to their attention, so it refuses them.
DROPS_POSITIONS = (
    "cohere_compass_text", "ctrl", "dory", "fuyu", "gpt_bigcode", "moshi", "persimmon", "whisper",
)  # fmt: skip


def is_served(model):
    try:
        named_options(model.config.get_text_config().model_type)
        return model.config.model_type not in DROPS_POSITIONS
    except UnsupportedModel:
        return False


# What a type has in common with others: the level that it needs, and why it is refused.
KINDS = {name: (kind_of(results()[name]), name in OWN_TABLE, name in UNSEEN, name in DROPS_POSITIONS)
         for name in TYPES}  # fmt: skip


@pytest.mark.parametrize("model_type", one_of_each(TYPES, KINDS))
def test_every_type_is_exact_or_refused(model_type):
    eager = small_model(model_type, attn_implementation="eager")
    if not is_served(eager):
        with pytest.raises((UnsupportedModel, KeyError)) as refusal:
            model = small_model(model_type, attn_implementation="packfa")
            if model_type in UNSEEN:
                trl_packfa.check(model)
            ids = torch.cat(documents())[None]
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **BOTH)
        in_its_table = model_type in OWN_TABLE or refusal.value.args == ("packfa",)
        assert isinstance(refusal.value, UnsupportedModel) or in_its_table
        return
    eager.set_experts_implementation("eager")
    expected = torch.cat(alone(eager, documents())[0])
    model = small_model(model_type, attn_implementation="packfa")
    ids, served = torch.cat(documents())[None], 0
    with torch.no_grad():
        for told in (BOTH, POSITIONS, {**POSITIONS, "attention_mask": torch.ones_like(ids)}, OFFSETS):
            try:
                logits = torch.cat(split(model(input_ids=ids, use_cache=False, **told).logits))
            except PackingError as error:
                assert told is OFFSETS and "position_ids that restart" in str(error)
                continue
            served += 1
            difference = float((logits.double() - expected).abs().max() / expected.std())
            assert_rounding(difference, f"told {[*told]}", allowed=ILL_CONDITIONED)
        assert served >= 3
        assert differs(model(input_ids=ids, use_cache=False).logits[0], expected), "the control does not leak"


def losses_of(tmp_path, attention, **options):
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": words(5 + 7 * (i % 6), seed=i)} for i in range(200)])
    args = SFTConfig(
        str(tmp_path / attention), max_steps=20, logging_steps=1, max_length=64, per_device_train_batch_size=2,
        learning_rate=1e-3, report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=0, **options,
    )  # fmt: skip
    model = small_model("gemma2", attn_implementation=attention)
    trainer = trained(SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer()))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trls_packing_has_the_losses_of_eager_attention(tmp_path):
    """TRL's `bfd` rows, whose documents eager attention keeps apart by a mask of L x L made of positions."""
    ours, eager = (losses_of(tmp_path, name, packing=True) for name in ("packfa", "eager"))
    assert len(ours) == 20
    assert_trajectory(ours, eager)
    wrapped = losses_of(tmp_path / "wrapped", "eager", packing=True, packing_strategy="wrapped")
    assert_another_run(wrapped, eager)  # it leaks


SCRIPT = """
import json, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tiny_models import small_model
import trl_packfa.register
from trl_packfa import PackedLayout

distributed.init_process_group("gloo")
rank, mesh, norms = distributed.get_rank(), init_device_mesh("cpu", (2,)), {"ddp": {}, "fsdp": {}}
ids = torch.randint(3, 97, (1, 43), generator=torch.Generator().manual_seed(rank))
layout = PackedLayout.from_lengths([(13, 1, 29), (20, 23)][rank])
call = {"input_ids": ids, "position_ids": layout.position_ids(), **layout.flash_kwargs(), "use_cache": False}
for kind in norms:
    model = small_model("gemma2", attn_implementation="packfa").train()
    if kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh) if kind == "fsdp" else DistributedDataParallel(model)
    wrapped(**call).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
        norms[kind][name.replace("module.", "")] = float(gradient.double().norm())
if rank == 0:
    json.dump(norms, open(sys.argv[1], "w"))
distributed.destroy_process_group()
"""


def test_a_model_by_name_on_two_ranks_equals_one(tmp_path):
    script, out = tmp_path / "run.py", tmp_path / "norms.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run([*command, str(out)], check=True, cwd=Path(__file__).parents[2])
    model = small_model("gemma2", attn_implementation="eager").train()
    for rank, lengths in enumerate([(13, 1, 29), (20, 23)]):
        ids = torch.randint(3, 97, (1, 43), generator=torch.Generator().manual_seed(rank))
        logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids[0].split(list(lengths))]
        (torch.cat(logits).square().mean() / 2).backward()
    expected = {name: float(p.grad.double().norm()) for name, p in model.named_parameters()}
    for kind, found in json.loads(out.read_text()).items():
        assert found.keys() == expected.keys()
        for name, norm in expected.items():
            assert_rounding(abs(found[name] - norm) / norm, f"{kind} {name}")
