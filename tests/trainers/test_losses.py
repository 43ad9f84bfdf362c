"""Facts of a batch that enter a loss besides its tokens: the padded run's, or refused; weights of examples."""

from functools import partial

import pytest
import tiny
import torch
from datasets import Dataset, IterableDataset
from selection import in_full
from tiny_models import small_model
from tolerance import assert_another_run, assert_float32, assert_trajectory, assert_weights
from torch.utils.data import DataLoader
from training import arguments, batches_of, dataset, losses, packed_trainer
from trl import SFTConfig, SFTTrainer

import trl_packfa
from trl_packfa import DataCollatorForPacking, PackedSFTTrainer
from trl_packfa.data.batching import FREE, KEPT, TOGETHER
from trl_packfa.data.collator import SOURCES
from trl_packfa.data.step_cutting import Origins, how_to_cut
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.patching.state import find_state
from trl_packfa.trainers.sft import loss_terms
from trl_packfa.trainers.sft.loss_terms import count_examples, example_weights

PLAIN = {
    "optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0, "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 3, "max_steps": 3, "max_length": 96,
}  # fmt: skip


def pair(
    tmp_path, *, strategy="step", model=lambda: tiny.model(layers=2), data=None, compute_loss_func=None, check=False,
    mixin=None, late=None, **options,
):  # fmt: skip
    """Train TRL's trainer and ours, or subclasses of them with `mixin`, after the change `late`."""
    options, trainers = {**PLAIN, "out": tmp_path, **options}, []
    data = data or {"train_dataset": dataset(), "eval_dataset": dataset(10, seed=5)}
    ours = {"packing_strategy": strategy, "use_peft": False, "check_packing": check}
    for cls, args in ((SFTTrainer, arguments(SFTConfig, **options)), (PackedSFTTrainer, arguments(**ours, **options))):
        given = {"processing_class": tiny.tokenizer(), "compute_loss_func": compute_loss_func, **data}
        trainers.append((cls if mixin is None else type("Own", (mixin, cls), {}))(model(), args, **given))
        if late is not None:
            late(trainers[-1])
        trainers[-1].train()
    return trainers


def assert_same(padded, packed):
    weights = [{name: p.detach() for name, p in t.model.named_parameters()} for t in (packed, padded)]
    assert_weights(*weights, steps=len(losses(padded)))
    evaluated = [trainer.evaluate()["eval_loss"] for trainer in (packed, padded)]
    assert_trajectory([*losses(packed), evaluated[0]], [*losses(padded), evaluated[1]])


# Some that train nothing: of no label, of one token, of a label that nothing precedes.
UNTRAINED = [
    {"input_ids": ids, "labels": labels}
    for i in range(12)
    for ids, labels in [
        ([5, 6 + i, 7, 8], [-100, 6 + i, 7, 8]),
        ([5, 6, 7, 8 + i] * (1 + i % 3), [-100] * 4 * (1 + i % 3)),
        ([9 + i], [9 + i]),
        ([5 + i] * (2 + i), [-100] + [5 + i] * (1 + i)),
        ([7, 8 + i, 9], [7, -100, -100]),
    ][: 2 + i % 4]
]


@pytest.mark.parametrize("strategy", ["step", *in_full("minibatch")])
def test_labels_of_first_tokens_count_where_trls_trainer_counts_them(tmp_path, strategy, monkeypatch):
    """It divides the loss of a class whose name does not end in `ForCausalLM` by all labels. On texts that is one more
    for each document."""
    data = {"train_dataset": Dataset.from_list([{"input_ids": [4 + i % 40] * (1 + 5 * i % 9)} for i in range(48)])}
    build = partial(pair, tmp_path, strategy=strategy, model=lambda: small_model("gpt2"), data=data)
    padded, packed = build()
    assert not padded._loss_shifts_labels
    assert_trajectory(losses(packed), losses(padded))
    monkeypatch.setattr(loss_terms, "FIRST_LABELS", "none such")
    padded, packed = build()
    assert_another_run(losses(packed), losses(padded))


@pytest.mark.parametrize("strategy", ["step", "minibatch"])
@pytest.mark.parametrize("max_length", [96, 5, None])
def test_documents_that_train_nothing_keep_their_place_in_the_padded_runs_batches(tmp_path, strategy, max_length):
    """In training and in evaluation, a mean over batches. TRL drops those without a label within max_length."""
    data = Dataset.from_list(UNTRAINED)
    padded, packed = pair(
        tmp_path, strategy=strategy, data={"train_dataset": data, "eval_dataset": {"a": data}}, check=True,
        max_length=max_length, per_device_eval_batch_size=3,
    )  # fmt: skip
    assert len(packed.train_dataset) == len(padded.train_dataset) < len(UNTRAINED) or max_length is None
    assert_trajectory(losses(packed), losses(padded))
    evaluated = [trainer.evaluate()["eval_a_loss"] for trainer in (packed, padded)]
    assert_trajectory(evaluated[:1], evaluated[1:])
    trained_only = packed.evaluate(data.filter(lambda row: any(label != -100 for label in row["labels"][1:])))
    assert_another_run([trained_only["eval_loss"]], evaluated[1:])  # without them batches are others


LOSSES = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "chunked_nll": {"loss_type": "chunked_nll"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "dft, label smoothing": {"loss_type": "dft", "label_smoothing_factor": 0.1},
    "all tokens": {"completion_only_loss": False},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ["step", *in_full("minibatch")])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_trls_is_the_padded_runs(tmp_path, name, strategy):
    assert_same(*pair(tmp_path, strategy=strategy, pad_to_multiple_of=16, **LOSSES[name]))


def test_negative_control_another_loss_is_another_run(tmp_path):
    plain, _ = pair(tmp_path)
    _, smoothed = pair(tmp_path, label_smoothing_factor=0.1)
    assert_another_run(losses(smoothed), losses(plain))


def means():
    """A model whose forward takes no `num_items_in_batch`, as it tells the Trainer (Gemma 4 does)."""
    model = tiny.model(layers=2)
    model.accepts_loss_kwargs = False
    return model


def test_a_mean_over_each_micro_batch_keeps_the_padded_cuts(tmp_path):
    padded, packed = pair(tmp_path, model=means)
    assert packed._cutter.how == KEPT
    assert_same(padded, packed)
    assert [h["micro_batches"] for h in packed.state.log_history if "micro_batches" in h] == [3, 3, 3]
    assert packed.packing_plan["micro_batches_per_step"] == pytest.approx(3)


def test_negative_control_cut_anew_the_means_are_others(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packfa.trainers.sft.trainer.how_to_cut", lambda *args, **options: (FREE, ""))
    padded, packed = pair(tmp_path, model=means)
    assert_another_run(losses(packed), losses(padded))


def test_how_a_step_may_be_cut():
    args = arguments()
    assert how_to_cut(args, balances_experts=False) == (FREE, "")
    assert how_to_cut(args, balances_experts=True)[0] == TOGETHER
    assert how_to_cut(args, balances_experts=True, counts_tokens=False)[0] == KEPT
    assert how_to_cut(args, balances_experts=False, own_loss=True)[0] == KEPT
    by_rank = arguments(average_tokens_across_devices=False)
    assert how_to_cut(by_rank, balances_experts=False) == (FREE, "")
    assert how_to_cut(by_rank, balances_experts=False, world_size=2)[0] == KEPT


def by_tokens(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum()
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / count


def by_micro_batch(outputs, labels, num_items_in_batch=None):
    """Not linear in what a micro-batch holds."""
    return by_tokens(outputs, labels, (labels[:, 1:] != -100).sum()).sqrt()


def by_row(outputs, labels, num_items_in_batch=None):
    """Each row counts the same."""
    rows = zip(outputs.logits, labels, strict=True)
    return torch.stack([by_tokens(type(outputs)(logits=x[None]), y[None]) for x, y in rows]).mean()


class Rows:
    """A mean over rows, which a packed row does not have."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = by_row(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Regularized:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = loss + 1e-3 * sum((p**2).sum() for p in model.parameters())
        return (loss, None) if return_outputs else loss


class Looking:
    looked = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.looked += inputs["labels"].numel()
        return super().training_step(model, inputs, num_items_in_batch)


class Loading:
    def get_train_dataloader(self):
        rows = self._remove_unused_columns(self.train_dataset, "training")
        return self.accelerator.prepare(DataLoader(rows, batch_size=4, collate_fn=self.data_collator))


@pytest.mark.parametrize("strategy", ["step", *in_full("minibatch")])
@pytest.mark.parametrize("mixin", [Rows, Looking, Loading, *in_full(Regularized)])
def test_a_subclass_acts_as_one_of_trls_trainer(tmp_path, mixin, strategy):
    padded, packed = pair(tmp_path, mixin=mixin, strategy=strategy)
    assert_same(padded, packed)
    if mixin is Looking:
        assert packed.looked == padded.looked > 0
    if mixin is not Loading:  # the model computes no pads
        assert find_state(packed.model).unpadding.pads > 0


def test_negative_control_a_subclass_whose_rows_are_packed_trains_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(PackedSFTTrainer, "_wants_rows", lambda self: False)
    padded, packed = pair(tmp_path, mixin=Rows)
    with pytest.raises(AssertionError, match="worst step"):
        assert_trajectory(losses(packed), losses(padded))


def test_a_subclass_whose_examples_are_named_gets_packed_rows(tmp_path):
    trainer = packed_trainer(
        arguments(out=tmp_path, loss_by="source"), cls=type("Own", (Looking, PackedSFTTrainer), {})
    )
    trainer.train()
    assert trainer.looked > 0 and "loss/0" in trainer.state.log_history[0]


def unscaled(trainer):
    trainer.model_accepts_loss_kwargs = False


def with_rows(trainer):
    trainer.compute_loss = partial(Rows.compute_loss, trainer)


def with_function(trainer):
    trainer.compute_loss_func = by_micro_batch


@pytest.mark.parametrize("late", [unscaled, with_rows, with_function])
def test_what_changes_after_construction_acts_as_in_trls_trainer(tmp_path, late):
    padded, packed = pair(tmp_path, late=late)
    assert_trajectory(losses(packed), losses(padded))
    plain, _ = pair(tmp_path) if late is unscaled else (None, None)
    if plain is not None:  # a negative control: it is another training
        with pytest.raises(AssertionError, match="worst step"):
            assert_trajectory(losses(packed), losses(plain))


def test_late_changes_that_contradict_packing_are_refused(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path))
    trainer.compute_loss_func = by_row
    with pytest.raises(InvalidConfig, match="compute_loss_func by_row cannot be packed"):
        trainer.train()
    trainer.compute_loss_func, trainer.args = None, arguments(out=tmp_path)
    with pytest.raises(InvalidConfig, match=r"trainer\.args was replaced after construction"):
        trainer.train()
    trainer = packed_trainer(arguments(out=tmp_path, max_tokens_per_microbatch=400))
    with_rows(trainer)
    with pytest.raises(InvalidConfig, match="max_tokens_per_microbatch=400 has no effect"):
        trainer.train()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("loss_func", [by_tokens, by_micro_batch])
def test_a_users_loss_is_given_the_padded_runs_micro_batches(tmp_path, loss_func):
    assert_same(*pair(tmp_path, compute_loss_func=loss_func))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_users_loss_of_rows_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"compute_loss_func by_row cannot be packed(.|\n)*padded, .* packed"):
        packed_trainer(arguments(out=tmp_path), compute_loss_func=by_row)
    with pytest.raises(InvalidConfig, match=r"it failed on logits and labels of two documents: AttributeError"):
        packed_trainer(arguments(out=tmp_path), compute_loss_func=lambda outputs, labels, **_: outputs.loss.mean())
    with pytest.raises(InvalidConfig, match="compute_loss_func with loss_weighting='example'"):
        packed_trainer(arguments(out=tmp_path, loss_weighting="example"), compute_loss_func=by_tokens)


@pytest.mark.parametrize("is_asked", [True, False])
def test_late_refusal_leaves_the_model_patched_as_it_was(tmp_path, is_asked):
    for options in (None, {"fused_kernels": False}):
        model = small_model("roformer")
        names = [name for name, _ in model.named_parameters()]
        before = None if options is None else find_state(trl_packfa.patch(model, **options))
        if is_asked:
            with pytest.raises(UnsupportedModel, match="neftune_noise_alpha with model type 'roformer'"):
                packed_trainer(arguments(out=tmp_path, neftune_noise_alpha=5.0, use_peft=True), model=model)
        else:
            plain = SFTConfig(str(tmp_path), neftune_noise_alpha=5.0, report_to="none", use_cpu=True)
            trainer = PackedSFTTrainer(
                model, args=plain, train_dataset=dataset(), processing_class=tiny.tokenizer(), peft_config=None
            )
            assert not trainer.args.packing
        assert find_state(model) is before and [name for name, _ in model.named_parameters()] == names


OPTIONS = {
    "use_peft": False, "optim": "sgd", "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0,
    "train_sampling_strategy": "sequential", "completion_only_loss": True,
}  # fmt: skip


def own_loss(model, example):
    ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"])
    return torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], ignore_index=-100)


@pytest.mark.parametrize("counts", [True, False], ids=["by step", "by micro-batch"])
@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_every_example_counts_the_same(tmp_path, strategy, counts):
    """Losses of SGD steps over single examples with gradient accumulation, unpacked and by hand."""
    args = arguments(out=tmp_path, packing_strategy=strategy, loss_weighting="example", gradient_accumulation_steps=2,
                     max_steps=4, **OPTIONS)  # fmt: skip
    trained = tiny.model(layers=2)
    trained.accepts_loss_kwargs = counts  # without, as in Gemma 4, TRL takes the mean of each micro-batch
    trainer = packed_trainer(args, model=trained, peft_config=None)
    model, examples = tiny.model(layers=2), list(trainer.train_dataset)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(4):
        optimizer.zero_grad()
        batch = examples[8 * step : 8 * (step + 1)]
        loss = sum(own_loss(model, example) / len(batch) for example in batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    trainer.train()
    assert_trajectory(losses(trainer), expected)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert_float32(ours, theirs)


def test_negative_control_tokens_weigh_otherwise(tmp_path):
    runs = []
    for weighting in ("token", "example"):
        args = arguments(out=tmp_path, loss_weighting=weighting, max_steps=2, **OPTIONS)
        runs.append(packed_trainer(args, model=tiny.model(layers=2), peft_config=None))
        runs[-1].train()
    assert_another_run(losses(runs[0])[:1], losses(runs[1])[:1])


def test_weights_of_packed_and_padded_examples():
    examples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5]}, {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}]
    batch = DataCollatorForPacking(pad_to_multiple_of=8)(examples)
    assert count_examples(batch) == 2
    weights = example_weights(batch)
    trained = batch["labels"][:, 1:] != -100
    assert torch.equal(weights[trained], torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    padded = {"labels": torch.tensor([[5, 6, -100], [-100, 6, 7]])}
    assert torch.equal(example_weights(padded)[padded["labels"][:, 1:] != -100], torch.tensor([1.0, 0.5, 0.5]))
    assert count_examples(padded) == 2


@pytest.mark.parametrize("strategy", ["step", "minibatch", "bfd"])
def test_each_sources_loss_is_logged(tmp_path, strategy):
    args = arguments(out=tmp_path, packing_strategy=strategy, max_length=96, loss_by="source", max_steps=1, **OPTIONS)
    trainer = packed_trainer(args, model=tiny.model(layers=2), peft_config=None)
    model = tiny.model(layers=2)  # a copy of the trainer's would share TRL's forward with it
    batches, sums = batches_of(trainer), {}
    trainer.train()
    for batch in batches:
        split = batch["packed_layout"].split
        for source, ids, labels in zip(batch[SOURCES], split(batch["input_ids"]), split(batch["labels"]), strict=True):
            logits = model(input_ids=ids[None]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            total = sums.setdefault(source, [0.0, 0])
            total[0], total[1] = total[0] + float(loss), total[1] + int((labels[1:] != -100).sum())
    logged = trainer.state.log_history[0]
    names = sorted(sums)
    assert len(names) > 1
    assert_trajectory([[logged[f"loss/{n}"] for n in names]], [[sums[n][0] / sums[n][1] for n in names]])


@pytest.mark.parametrize("strategy", ["step", "bfd"])
def test_sources_of_a_stream_are_logged(tmp_path, strategy):
    stream = IterableDataset.from_generator(lambda: iter(dataset()))
    args = arguments(out=tmp_path, loss_by="source", packing_strategy=strategy, max_length=96, max_steps=2)
    trainer = packed_trainer(args, train_dataset=stream)
    trainer.train()
    assert {"loss/0", "loss/1", "loss/2"} <= set(trainer.state.log_history[0])


def test_a_batch_without_boundaries_is_one_document_of_a_padded_micro_batch():
    """As a user's collator may make it."""
    assert Origins.of_whole({"input_ids": torch.ones((1, 4))}) == Origins((4,), (0,), (4,), (4,))
