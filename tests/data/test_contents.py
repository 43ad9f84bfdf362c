"""What documents hold: refused by dataset, document and value before a model sees it, in datasets and in streams."""

import logging

import numpy as np
import pyarrow as pa
import pytest
import tiny
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tolerance import assert_trajectory
from training import FORMATS, arguments, losses, packed_trainer, padded_trainer, trained
from trl import SFTConfig

from trl_packfa import DataCollatorForPacking, PackedSFTConfig
from trl_packfa.checking import vocabulary_of
from trl_packfa.cli.main import main
from trl_packfa.data import dataset as data
from trl_packfa.data.collator import LOSSES, SAVED
from trl_packfa.data.dataset import cut_stream, read_lengths
from trl_packfa.data.raw_dataset import measure, without_format
from trl_packfa.errors import InvalidDataset
from trl_packfa.patching.inspect import known_ids, known_labels

DOCUMENTS = [{"input_ids": list(range(5, 5 + n))} for n in range(3, 20)]
LABELLED = [{**document, "labels": document["input_ids"]} for document in DOCUMENTS]
PAIRS = [{"prompt": "1 ", "completion": "2"}] * 9
MESSAGES = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def among(documents, odd):
    """The odd one is document 7."""
    return [*documents[:7], odd, *documents[7:]]


WRONG = {
    "a row": (among(DOCUMENTS, {"input_ids": None}), "'input_ids' is None"),
    "a token": (among(DOCUMENTS, {"input_ids": [5, None]}), "'input_ids' holds None among its tokens"),
    "a label": (among(LABELLED, {"input_ids": [5, 6], "labels": [5, None]}), "'labels' holds None among its tokens"),
    "all labels": (among(LABELLED, {"input_ids": [5, 6], "labels": None}), "'labels' is None"),
    "labels too few": (among(LABELLED, {"input_ids": [5, 6], "labels": [5]}), "'labels' has 1 tokens, its"),
    "text": (among([{"text": "1 2"}] * 9, {"text": None}), "'text' is None"),
    "messages": (among([{"messages": MESSAGES}] * 9, {"messages": None}), "'messages' is None"),
    "prompt": (among(PAIRS, {"prompt": None, "completion": "2"}), "'prompt' is None"),
    "completion": (among(PAIRS, {"prompt": "1 ", "completion": None}), "'completion' is None"),
}  # fmt: skip
UNKNOWN = {
    "beyond": (among(DOCUMENTS, {"input_ids": [5, 97]}), "input_ids", 97),
    "negative": (among(DOCUMENTS, {"input_ids": [5, -3]}), "input_ids", -3),
    "ignored": (among(DOCUMENTS, {"input_ids": [5, -100, 6]}), "input_ids", -100),
    "label beyond": (among(LABELLED, {"input_ids": [5, 6], "labels": [-100, 400]}), "labels", 400),
    "label negative": (among(LABELLED, {"input_ids": [5, 6], "labels": [5, -5]}), "labels", -5),
}


def train(documents, out, *, stream=False, **options):
    dataset = Dataset.from_list(documents)
    dataset = dataset.to_iterable_dataset() if stream else dataset
    args = arguments(out=out, max_steps=3, max_length=64, check_packing=False)
    return losses(trained(packed_trainer(args, train_dataset=dataset, **options)))


@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
@pytest.mark.parametrize("case", WRONG)
def test_none_is_refused_with_the_documents_number(case, stream, tmp_path):
    documents, said = WRONG[case]
    with pytest.raises(InvalidDataset, match=f"^document 7 of the train dataset: {said}"):
        train(documents, tmp_path, stream=stream)
    assert len(train([d for i, d in enumerate(documents) if i != 7], tmp_path, stream=stream)) == 3


@pytest.mark.parametrize("case", UNKNOWN)
def test_tokens_that_the_model_does_not_have(case, tmp_path):
    """An index error on a CPU, the end of the process's device on CUDA."""
    documents, column, value = UNKNOWN[case]
    said = rf"document 7 of the train dataset: '{column}' holds {value}\.\n.* tokens 0 to 96(.|\n)*resize_token_emb"
    with pytest.raises(InvalidDataset, match=said):
        train(documents, tmp_path)
    with pytest.raises(InvalidDataset, match=rf"the batch holds token {value}, but the model has tokens 0 to 96"):
        train(documents, tmp_path, stream=True)


def test_a_trained_head_that_is_tied_knows_its_labels(tmp_path):
    """PEFT ties it to the embedding, and swaps the numbers of its features. The sizes are those of its weight."""
    logs = []
    for build, config in ((packed_trainer, PackedSFTConfig), (padded_trainer, SFTConfig)):
        adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True,
                             task_type="CAUSAL_LM", lora_dropout=0.0)  # fmt: skip
        model = tiny.model(layers=1, tie_word_embeddings=True)
        trainer = build(arguments(config, tmp_path, max_steps=2), model=model, peft_config=adapter)
        trainer.train()
        logs.append(losses(trainer))
    assert_trajectory(*logs)
    head, table = trainer.model.get_output_embeddings(), trainer.model.get_input_embeddings()
    assert head.out_features != len(head.weight) == known_labels(trainer.model) == known_ids(trainer.model)
    assert vocabulary_of(trainer.model) == len(table.weight) == 97


def test_the_number_is_the_users_where_documents_were_dropped_before(tmp_path):
    """Two without a trained token, which packing drops."""
    untrained = [{"input_ids": [5], "labels": [5]}] * 2
    with pytest.raises(InvalidDataset, match="document 9 of the train dataset: 'input_ids' holds 97"):
        train(untrained + among(LABELLED, {"input_ids": [5, 97], "labels": [5, 6]}), tmp_path)


def test_an_evaluation_dataset_is_looked_at_too(tmp_path):
    bad = Dataset.from_list(UNKNOWN["beyond"][0])
    for evaluation, name in ((bad, "eval"), ({"easy": Dataset.from_list(DOCUMENTS), "hard": bad}, "hard")):
        with pytest.raises(InvalidDataset, match=f"document 7 of the {name} dataset: 'input_ids' holds 97"):
            train(DOCUMENTS, tmp_path, eval_dataset=evaluation)


@pytest.mark.parametrize(
    ("tokens", "held"), [([5.0, 6.0], "double"), (["5", "6"], "string"), ([[5, 6]], "lists"), ([True, False], "bool")]
)
def test_tokens_that_are_no_whole_numbers(tokens, held, tmp_path):
    with pytest.raises(InvalidDataset, match=f"column 'input_ids' of the train dataset holds {held}, not lists"):
        train([{"input_ids": tokens}] * 9, tmp_path)
    with pytest.raises(InvalidDataset, match=r"document 0 of the train dataset: 'input_ids' holds .* not a whole"):
        train([{"input_ids": tokens}] * 9, tmp_path, stream=True)


def test_the_collator_alone_takes_what_it_is_given():
    """Only a model says which tokens there are."""
    example = {"input_ids": [5, 97], "labels": [-100, 97]}
    assert DataCollatorForPacking()([example])["input_ids"].tolist() == [[5, 97]]
    assert DataCollatorForPacking(vocab_size=98)([example])["labels"].tolist() == [[-100, 97]]
    with pytest.raises(InvalidDataset, match="holds token 97, but the model has tokens 0 to 96"):
        DataCollatorForPacking(vocab_size=97)([example])


@pytest.mark.parametrize("arrow", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_measures_are_those_of_python(arrow):
    """Empty, missing and holed documents, chunks, selections; numbers of every width."""
    rng = np.random.default_rng(0)
    rows = [
        None if i % 7 == 3 else [None if rng.random() < 0.05 else int(n) for n in rng.integers(-100, 90, size=i % 5)]
        for i in range(60)
    ]
    chunks = pa.chunked_array([pa.array(part, arrow(pa.int16())) for part in (rows[:11], rows[11:])])
    table = pa.table({"labels": chunks})
    dataset = Dataset(table).select([*range(59, 20, -1), 3, 0])
    found = measure(dataset, "labels")
    for number, row in enumerate(dataset["labels"]):
        known = [n for n in row or [] if n is not None]
        counted = [n for n in known if n != -100]
        assert found.length[number] == (-1 if row is None else len(row))
        assert found.holes[number] == len(row or []) - len(known)
        assert (found.lowest[number], found.highest[number]) == (min(counted, default=0), max(counted, default=0))


@pytest.mark.parametrize(("kind", "name", "streams"), [
    ("torch", "pre-tokenized", False), ("torch", "pre-tokenized", True), ("torch", "messages", False),
    pytest.param("numpy", "pre-tokenized", False, marks=pytest.mark.slow),
    pytest.param("numpy", "messages", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_formatted_datasets_train_as_plain_ones(kind, name, streams, tmp_path):
    """As TRL trains them."""
    plain = Dataset.from_list(FORMATS[name])
    args, runs = arguments(out=tmp_path, max_length=64, check_packing=False), []
    for dataset in (plain, plain.with_format(kind)):
        torch.manual_seed(0)
        given = dataset.to_iterable_dataset().with_format(dataset.format["type"]) if streams else dataset
        trainer = trained(packed_trainer(args, train_dataset=given, eval_dataset=dataset))
        runs.append((losses(trainer), trainer.evaluate()["eval_loss"]))
    assert runs[0] == runs[1]


def test_columns_that_a_format_hides_stay_hidden():
    """The labels here, without which every token is trained."""
    plain = Dataset.from_list(FORMATS["pre-tokenized"])
    hidden = plain.with_format("torch", ["input_ids"])
    shown = plain.with_format("torch", ["input_ids"], output_all_columns=True)
    assert without_format(hidden)[5] == {"input_ids": plain[5]["input_ids"]}
    assert without_format(shown)[5] == plain[5] and without_format(plain) is plain


def test_plan_looks_too(saved, tmp_path, capsys):
    data = tmp_path / "none.jsonl"
    data.write_text('{"text": "1 2"}\n{"text": null}\n')
    given = ["--dataset_name", str(data), "--tokenizer", saved["MODEL"]]
    assert main(["plan", *given]) == 1
    assert "document 1 of the train dataset: 'text' is None" in capsys.readouterr().err


def of(labels):
    def rows():
        for label in labels:
            yield {"input_ids": [1, 2, 3], "labels": [-100, label, label]}

    return IterableDataset.from_generator(rows)


def test_documents_that_train_nothing_are_told_even_if_none_of_their_call_is_kept(caplog):
    """Counts of dropped documents travel with a document that is kept: of these hundred none is."""
    with caplog.at_level(logging.WARNING):
        kept = list(cut_stream(of([-100] * 100 + [5, -100, 6]), max_length=8, overflow="truncate"))
    assert [document["labels"] for document in kept] == [[-100, 5, 5], [-100, 6, 6]]
    assert "100 documents of the stream" in caplog.text
    assert [sum(column) for column in zip(*(document[LOSSES] for document in kept), strict=True)][2] == 1


def test_lengths_of_a_saved_dataset_map_one_file_that_processes_share(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_COUNTED", 7)  # several parts, which become one
    counts = np.random.default_rng(0).integers(1, 9, 50).tolist()
    Dataset.from_dict({"input_ids": [[1] * count for count in counts]}).save_to_disk(tmp_path)
    for dataset in (Dataset.load_from_disk(tmp_path), Dataset.load_from_disk(tmp_path).shuffle(seed=0)):
        before = pa.total_allocated_bytes()
        lengths = read_lengths(dataset)
        assert pa.total_allocated_bytes() == before and not lengths.flags.owndata, "no copy in memory"
        assert lengths.tolist() == [len(ids) for ids in dataset["input_ids"]]
        assert lengths.dtype == np.int32 and not lengths.flags.writeable


def test_lengths_count_what_is_computed_and_nothing_of_an_empty_dataset():
    columns = {"input_ids": [[1, 2, 3, 1, 2, 4], [5]], SAVED: [2, 0]}
    assert read_lengths(Dataset.from_dict(columns)).tolist() == [4, 1]
    assert read_lengths(Dataset.from_dict(columns).select([])).shape == (0,)
