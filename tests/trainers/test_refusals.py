"""Refusals of the trainer, each with one clear error, and what it only seems to refuse. The table of requirements: how
a row becomes an error, what a run knows."""

from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
import vision
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PromptTuningConfig
from selection import in_full
from tiny_models import small_model
from tolerance import assert_trajectory
from training import FORMATS, arguments, dataset, logs_of, losses, packed_trainer, padded_trainer, trained
from transformers import DataCollatorWithFlattening, default_data_collator
from trl import SFTConfig

from trl_packfa.config.arguments import ARGUMENTS, WITHOUT_PADS
from trl_packfa.config.requirements import Found, Requirement, Run, require
from trl_packfa.errors import ContaminationError, InvalidConfig, InvalidDataset, NoBackend, UnsupportedModel
from trl_packfa.kernels.lm_head.chunked import Head
from trl_packfa.layout.call_context import find_layout
from trl_packfa.trainers.requirements.built import BUILT, PATCHED
from trl_packfa.trainers.requirements.data import DATA
from trl_packfa.trainers.requirements.runs import LAUNCH, MACHINE, SETUP
from trl_packfa.trainers.requirements.training import Training
from trl_packfa.trainers.sft.construction import settle_arguments


def contaminated(tmp_path, when):
    """Build a trainer whose second layer mixes the documents of a layout where `when(attention, layout)` holds."""
    trainer = packed_trainer(arguments(out=tmp_path))
    attention = trainer.model.base_model.model.model.layers[1].self_attn
    override = vars(attention)["forward"]

    def leak(hidden_states, **kwargs):
        layout = find_layout((), kwargs)
        if layout is not None and when(attention, layout):
            hidden_states = hidden_states + hidden_states.mean(dim=1, keepdim=True)
        return override(hidden_states, **kwargs)

    attention.forward = leak
    return trainer


@pytest.mark.parametrize("when", [
    lambda attention, layout: True,
    lambda attention, layout: layout.num_documents > 3 and not attention.training,
], ids=["always", "in evaluation alone"])  # fmt: skip
def test_a_contaminated_model_is_never_trained(when, tmp_path):
    trainer = contaminated(tmp_path, when)
    with pytest.raises(ContaminationError, match=r"leak: (.|\n)*layers.1.self_attn"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_transformers_flattening_collator_is_welcome(tmp_path):
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer, own = (
        trained(packed_trainer(arguments(out=tmp_path), **options)) for options in ({"data_collator": flattening}, {})
    )
    assert losses(trainer) == losses(own)


def listed(**row):
    return {"train_dataset": Dataset.from_list([row])}


NO_LABEL = {"input_ids": [5, 6], "labels": [-100, -100]}
PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
TWO_ROWS = {"data_collator": lambda examples: {"input_ids": torch.ones(2, 3).long()}}
STREAM = IterableDataset.from_generator(lambda: iter(dataset()))
ON_THE_FLY = {"train_dataset": dataset().with_transform(lambda batch: batch)}
# What the config asks for, what the trainer is given, and what is said.
REFUSED = {
    "an empty dataset": ({}, {"train_dataset": Dataset.from_list([])}, InvalidDataset, "the train dataset is empty"),
    "a list": ({}, {"train_dataset": [{"text": "1"}]}, InvalidDataset, r"not list(.|\n)*Dataset\.from_list\(rows\)"),
    "a file": ({}, {"train_dataset": "my.jsonl"}, InvalidDataset, r"not str(.|\n)*data_files=\"my\.jsonl\""),
    "an unknown column": ({}, listed(a=1), InvalidDataset, r"\['a'\], which is no TRL format"),
    "text that is none": ({}, listed(text=7), InvalidDataset, "'text' .* holds int, expected str"),
    "a prompt alone": ({}, listed(prompt="1"), InvalidDataset, "no TRL format"),
    "no label": ({}, listed(**NO_LABEL), InvalidDataset, "no document has a token to train on"),
    "images": ({}, listed(messages=FORMATS["messages"][0]["messages"], images=["x"]), ValueError, "vision"),
    "a transform": ({}, ON_THE_FLY, InvalidDataset, r"train dataset is transformed on the fly(.|\n)*dataset\.map"),
    "an empty eval dataset": ({}, {"eval_dataset": Dataset.from_list([])}, InvalidDataset,
                              "the eval dataset is empty"),
    "an adapter on the head": ({}, {"peft_config": LoraConfig(target_modules=["q_proj", "lm_head"])}, InvalidConfig,
                               "targets 'lm_head'"),
    "prompt tuning": ({}, {"peft_config": PROMPTS}, UnsupportedModel, "virtual tokens are put before the row"),
    "a collator without boundaries": ({}, {"data_collator": default_data_collator}, InvalidConfig,
                                      "does not carry document boundaries"),
    "a collator of two rows": ({}, TWO_ROWS, InvalidConfig, "does not carry document boundaries"),
    "a document too long": ({"max_length": 20, "overflow": "error"}, {}, InvalidDataset,
                            r"document \d+ has \d+ tokens, max_length is 20"),
    "a stream without a budget": ({"max_length": None}, {"train_dataset": dataset().to_iterable_dataset()},
                                  InvalidConfig, "on a stream needs a token budget"),
    "metrics of packed rows": ({"eval_packing": True}, {"compute_metrics": lambda p: {}}, InvalidConfig,
                               "metrics are computed example by example"),
    "a loaded model to quantize": ({"load_in_4bit": True}, {"peft_config": None}, InvalidConfig,
                                   "already loaded, without quantization"),
    "an unknown source": ({"loss_by": "origin"}, {}, InvalidConfig,
                          r"loss_by='origin': the training dataset has no such column(.|\n)*source"),
    "an unknown source of a stream": ({"loss_by": "origin"}, {"train_dataset": STREAM}, InvalidConfig,
                                      r"loss_by='origin'(.|\n)*source"),
    "offloading to itself": ({"activation_offloading": True}, {}, InvalidConfig,
                             r"activation_offloading=True without an accelerator(.|\n)*to the CPU"),
    "a budget smaller than a stream's documents": ({"max_tokens_per_microbatch": 63, "max_length": 64},
                                                   {"train_dataset": STREAM}, InvalidConfig,
                                                   "a document of a stream, which may have 64 tokens"),
    "dispatched batches": ({"accelerator_config": {"dispatch_batches": True}}, {}, InvalidConfig,
                           "dispatch_batches=True cannot carry"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_at_construction(tmp_path, case):
    asked, given, error, message = REFUSED[case]
    args = arguments(out=tmp_path, **asked)
    with pytest.raises(error, match=message):
        packed_trainer(args, **given)


def test_unsupported_architecture_is_refused_before_the_data_is_touched(tmp_path):
    model = small_model("cpmant")
    model.save_pretrained(tmp_path / "cpmant")

    def untouchable():
        yield {"text": "1 2"}
        raise AssertionError("the dataset was read")

    data = IterableDataset.from_generator(untouchable)
    for given in (model, str(tmp_path / "cpmant")):
        with pytest.raises(UnsupportedModel, match="no patch for model type 'cpmant'"):
            packed_trainer(arguments(out=tmp_path), model=given, train_dataset=data)


@pytest.mark.skipif(torch.cuda.is_available(), reason="varlen may run here")
def test_a_backend_that_cannot_run_here_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(NoBackend, match=r"'varlen' cannot run here(.|\n)*needs a CUDA(.|\n)*trl-packfa env"):
        packed_trainer(arguments(out=tmp_path, attention_backend="varlen"), model="never-loaded")
    packed_trainer(arguments(out=tmp_path, attention_backend="reference"))


FULL = {"max_steps": 3, "use_peft": False, "learning_rate": 1e-4}


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "llama4_text"])
def test_a_head_that_trl_skips_is_gone_around(tmp_path, model_type, caplog):
    """ModernBERT's decoder transforms its output before the LM head's product; Llama-4's backbone is not where our
    head looks. The losses are those of the model's own logits, packed and padded."""
    options = {"out": tmp_path, **FULL}
    packed = packed_trainer(arguments(**options), model=small_model(model_type), peft_config=None)
    assert "the model's own logits are used" in caplog.text
    packed.train()
    plain = packed_trainer(arguments(packing=False, **options), model=small_model(model_type), peft_config=None)
    plain.model.forward = Head(plain.model, partial(type(plain.model).forward, plain.model))
    plain.train()
    assert_trajectory(losses(packed), losses(plain))
    metrics = [[entry["mean_token_accuracy"] for entry in logs_of(trainer)] for trainer in (packed, plain)]
    assert metrics[0] == metrics[1]


def test_a_head_with_more_to_train_than_a_matrix_trains_all_of_it(tmp_path, caplog):
    """Dory multiplies each logit with a learned scale, at first 1, where TRL's fused head gives the same loss."""
    packed = packed_trainer(arguments(out=tmp_path, **FULL), model=small_model("dory"), peft_config=None)
    assert "our LM head does not train the head's logit_scale" in caplog.text
    before = packed.model.lm_head.logit_scale.detach().clone()
    packed.train()
    assert not torch.equal(packed.model.lm_head.logit_scale, before)
    assert packed.check_report["head"].holds
    stock = padded_trainer(arguments(SFTConfig, tmp_path), model=small_model("dory"), peft_config=None)
    before = stock.model.lm_head.logit_scale.detach().clone()
    stock.train()
    assert torch.equal(stock.model.lm_head.logit_scale, before), "the control: TRL's head leaves it out"


@pytest.mark.parametrize("model_type", ["gpt_oss", *in_full("mixtral", "bloom", "mamba")])
def test_general_levels_train_through_the_trainer(tmp_path, model_type):
    """Packed without a patch file of their own, the losses of TRL's padded trainer."""
    padded, packed = (
        trained(packed_trainer(arguments(out=tmp_path, packing=packs, **FULL), model=small_model(model_type),
                               peft_config=None)) for packs in (False, True)
    )  # fmt: skip
    assert packed.check_report.is_exact
    assert_trajectory(losses(packed), losses(padded))


def test_a_budget_smaller_than_a_document_is_refused_with_its_number(tmp_path):
    lengths = [len(ids) for ids in packed_trainer(arguments(out=tmp_path)).train_dataset["input_ids"]]
    longest = max(lengths)
    said = rf"={longest - 1} is smaller than document {lengths.index(longest)}, which has {longest} tokens"
    with pytest.raises(InvalidConfig, match=rf"max_tokens_per_microbatch{said}(.|\n)*Raise it to {longest}"):
        packed_trainer(arguments(out=tmp_path, max_tokens_per_microbatch=longest - 1))


@pytest.mark.parametrize("strategy", ["step", "bfd", *in_full("minibatch", "wrapped")])
def test_documents_of_no_or_one_token_and_a_dataset_smaller_than_a_step(tmp_path, strategy):
    """Documents that cannot be trained are dropped and counted, but keep their place in the padded run's batches where
    TRL keeps them (one token that has a label); one short step is trained, as padded training does."""
    documents = [{"input_ids": ids} for ids in ([], [5], [6, 7, 8], [9, 10])]
    options = {"max_length": 64, "gradient_accumulation_steps": 4, "max_steps": 2}
    args = arguments(out=tmp_path, packing_strategy=strategy, **options)
    trainer = packed_trainer(args, train_dataset=Dataset.from_list(documents))
    report = trainer.packing_reports["train"]
    kept = 2 if trainer.args.strategy.fills_rows else 3
    assert (report.dropped_untrained, report.packed_documents, report.trained_tokens) == (4 - kept, kept, 3)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["num_tokens"] == 3 + kept


RUN = Run(SimpleNamespace(size=3), "a trainer")
EVERY = (*ARGUMENTS, *WITHOUT_PADS, *SETUP, *LAUNCH, *BUILT, *PATCHED)


def test_row_that_finds_something_raises_what_why_and_do_with_the_values():
    row = Requirement(lambda r: r.size > 2 and "size", "{r.name} has {found}={r.size}.", why="{found} is {{big}}",
                      do="Lower {found}.", error=InvalidDataset)  # fmt: skip
    with pytest.raises(InvalidDataset) as raised:
        require((Requirement(lambda r: r.size > 3, "never"), row), RUN)
    assert str(raised.value) == "a trainer has size=3.\n  - size is {big}\nLower size."
    assert raised.value.why == ("size is {big}",)
    reasons = Requirement(lambda r: Found(r.size, ["a {reason}", "another"]), "{found} is too much.", why="-")
    with pytest.raises(InvalidConfig) as raised:
        require([reasons], RUN)
    assert str(raised.value) == "3 is too much.\n  - a {reason}\n  - another", "not the reason of its row"
    error = UnsupportedModel("its own words")
    with pytest.raises(UnsupportedModel) as raised:
        require([Requirement(lambda r: error, "never said")], RUN)
    assert raised.value is error, "of another table"


def test_every_row_says_what_to_do_unless_the_error_is_of_another_table():
    """Those of adapters, quantization, model types and shared rows have remedies of their own."""
    assert [row.what for row in EVERY if not row.do] == [
        "an adapter that cannot be packed.",
        "a model type that cannot be packed.",
        "a model with an adapter or a quantization that cannot be packed.",
        "sequence_parallel=... with mixers or ALiBi, or with attention heads that it does not divide.",
    ]


def test_first_examples_are_read_once_and_in_plain_values():
    reads = []

    class Counted(Dataset):
        def __iter__(self):
            reads.append(1)
            return super().__iter__()

    data = Counted(Dataset.from_list([{"input_ids": [5, 6], "text": "5 6"}]).data)
    run = Training(arguments(), "a trainer", given={"train_dataset": data})
    require(DATA, run)
    assert len(reads) == 1
    formatted = Training(arguments(), "a trainer", given={"train_dataset": data.with_format("torch")})
    assert formatted.examples == [("train", {"input_ids": [5, 6], "text": "5 6"})]


def test_config_is_as_it_was_after_training_and_late_arguments_are_held_against_the_table(tmp_path):
    args = arguments(out=tmp_path, max_steps=1, check_packing=False)
    before = dict(vars(args))
    trainer = trained(packed_trainer(args))
    assert vars(args) == before
    trainer.args.max_tokens_per_microbatch = 1
    with pytest.raises(InvalidConfig, match="max_tokens_per_microbatch=1: it must be 2 or more"):
        trainer.train()


def test_a_stream_is_begun_once_before_weights_are_read(tmp_path):
    begun = []

    def texts():
        begun.append(1)
        yield from ({"text": f"number {i}"} for i in range(20))

    stream = IterableDataset.from_generator(texts)
    plain = SFTConfig(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none")
    given = {"train_dataset": stream, "processing_class": tiny.tokenizer()}
    settled, refusal, _ = settle_arguments(tiny.model(layers=1), plain, given)
    assert settled.packing and refusal is None and begun == [1]


def test_sft_on_images_is_held_against_rows_of_every_packed_run_and_not_against_those_of_text():
    on_the_fly = vision.prompts().with_transform(lambda batch: batch)
    given = {"train_dataset": on_the_fly, "compute_metrics": print}
    run = Training(arguments(eval_packing=True), "a trainer", given=given)
    assert run.is_on_images and not run.packs_rows
    require((*DATA, *MACHINE), run)
    texts = Training(run.args, "a trainer", given={**given, "train_dataset": Dataset.from_list([{"text": "5 6"}])})
    with pytest.raises(InvalidConfig, match="compute_metrics with eval_packing=True"):
        require((*DATA, *MACHINE), texts)
    dispatched = arguments(accelerator_config={"dispatch_batches": True})
    with pytest.raises(InvalidConfig, match="dispatch_batches=True cannot carry"):
        require(MACHINE, run.with_args(dispatched))


def test_command_that_has_loaded_no_data_refuses_nothing_that_holds_for_text_alone():
    args = arguments(sequence_parallel=2)
    with pytest.raises(InvalidConfig, match="does not divide the number of processes"):
        require(MACHINE, Training(args, "a trainer"))
    require(MACHINE, Training(args, "a command", knows_data=False))
