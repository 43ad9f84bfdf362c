"""After training: the adapter in the weights, and what comes out of them."""

import pytest
import tiny
import torch
import transformers
import vision
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_models.encoders import small_encoder
from tolerance import assert_float32, differs
from training import arguments, lora_config, packed_trainer, trained
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer

import trl_packfa
from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.scripts.merging import load_for_check, merge_adapter

SIZES = {"layers": 2, "intermediate_size": 128, "attention_bias": False}


@pytest.fixture
def base(tmp_path):
    return tiny.save(tmp_path / "base", tiny.model(**SIZES))


def train_adapter(base, tmp_path, **options):
    """An adapter, trained for a few steps and saved; the trainer that made it."""
    trainer = trained(packed_trainer(arguments(out=tmp_path / "run", **options), model=base, peft_config=None))
    trainer.save_model(str(tmp_path / "adapter"))
    return trainer, str(tmp_path / "adapter")


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids[None]).logits


@pytest.mark.parametrize("quantized", [False, True], ids=["lora", "qlora"])
def test_the_merged_model_is_the_adapter_on_the_base(base, tmp_path, quantized):
    if quantized:
        pytest.importorskip("bitsandbytes")
    trainer, adapter = train_adapter(base, tmp_path, load_in_4bit=quantized)
    out = tmp_path / "merged"
    assert main(["merge", adapter, str(out), "--dtype", "float32"]) == 0
    merged, (ids, *_) = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), tiny.documents()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain, ids)
    loaded = PeftModel.from_pretrained(plain, adapter)
    adapted, weights = logits(loaded, ids), dict(trainer.model.named_parameters())
    saved = {name: weight for name, weight in loaded.named_parameters() if "lora_B" in name}
    assert saved and all(torch.equal(weight.to(weights[name].dtype), weights[name]) for name, weight in saved.items())
    assert_float32(logits(merged, ids), adapted)
    assert differs(logits(merged, ids), before), "the adapter has learned something"
    assert trainer.check_report.is_exact and (not quantized or trainer.model.is_loaded_in_4bit)
    assert not hasattr(merged.config, "quantization_config"), "the base was loaded unquantized"
    assert AutoTokenizer.from_pretrained(out).eos_token == "</s>"


def test_the_model_generates_after_training_and_merged_patched_or_not(base, tmp_path):
    trainer, adapter = train_adapter(base, tmp_path)
    merged, tokenizer = merge_adapter(adapter, tmp_path / "merged", dtype="float32")
    prompt = tokenizer("1 2 3", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = merged.generate(prompt, **options)
    with trl_packfa.patched(merged):
        assert torch.equal(merged.generate(prompt, **options), plain)
    assert plain.shape[1] > prompt.shape[1] and tokenizer.decode(plain[0])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    found = trainer.model.generate(input_ids=prompt, **options)
    assert torch.equal(found, loaded.generate(input_ids=prompt, **options))


def test_a_base_that_moved_is_named(base, tmp_path, capsys):
    _, adapter = train_adapter(base, tmp_path)
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    assert main(["merge", adapter, str(tmp_path / "merged")]) == 1
    assert "cannot load the base of the adapter" in capsys.readouterr().err
    assert main(["merge", adapter, str(tmp_path / "merged"), "--base", str(moved)]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.dtype == AutoConfig.from_pretrained(moved).dtype, "the base's own"


ATTENTION = r".*(query|value|q_proj|v_proj)"


def of_task(kind):
    """A base without the head of the task, the model that is trained from it, the adapter's task, and its inputs."""
    ids = tiny.documents()[0][None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "images":
        return vision.model(), None, "CAUSAL_LM", inputs
    head, labels, task = {
        "reward": ("SequenceClassification", 1, "SEQ_CLS"),
        "classes": ("SequenceClassification", 5, "SEQ_CLS"),
        "tokens": ("TokenClassification", 4, "TOKEN_CLS"),
        "question": ("QuestionAnswering", None, "QUESTION_ANS"),
        "masked": ("MaskedLM", None, None),
        "features": (None, None, "FEATURE_EXTRACTION"),
    }[kind]
    base = tiny.model(**SIZES) if kind == "reward" else small_encoder("bert", "MaskedLM")
    return base, (head, {} if labels is None else {"num_labels": labels}), task, inputs


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("kind", ["reward", "classes", "tokens", "question", "masked", "features", "images"])
def test_adapter_of_each_task_keeps_its_head_in_the_merged_model(tmp_path, kind, moved):
    made, head, task, inputs = of_task(kind)
    base = tiny.save(tmp_path / "base", made)
    if kind == "images":
        vision.processor().save_pretrained(base)
        cls, labels = type(made), {}
    else:
        cls, labels = getattr(transformers, f"AutoModelFor{head[0]}" if head[0] else "AutoModel"), head[1]
    config = LoraConfig(r=4, target_modules=ATTENTION, task_type=task, init_lora_weights=False,
                        modules_to_save=["pooler"] if kind in ("classes", "features") else None)  # fmt: skip
    trained = get_peft_model(cls.from_pretrained(base, dtype=torch.float32, **labels), config).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "modules_to_save" in name:
                parameter.normal_(std=0.3)
        expected = trained(**inputs)[0]
    trained.save_pretrained(tmp_path / "adapter")
    where = []
    if moved:
        where = ["--base", str((tmp_path / "base").rename(tmp_path / "moved"))]
    out = tmp_path / "merged"
    assert main(["merge", str(tmp_path / "adapter"), str(out), "--dtype", "float32", *where]) == 0
    merged = cls.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert_float32(merged(**inputs)[0], expected)
        plain = cls.from_pretrained(where[1] if moved else base, dtype=torch.float32, **labels).eval()
        assert differs(plain(**inputs)[0], expected), "the adapter changes the result"
        assert torch.equal(trained(**inputs)[0], expected)
    if kind == "images":
        assert type(AutoProcessor.from_pretrained(out)) is type(vision.processor())
    if not moved:
        checked = load_for_check(base, dtype="float32", adapter=str(tmp_path / "adapter")).eval()
        with torch.no_grad():
            assert torch.equal(checked(**inputs)[0], expected)


def test_added_tokens_and_their_embeddings_are_merged_onto_a_base_that_moved(base, tmp_path):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    tokenizer.add_tokens([f"<{i}>" for i in range(20)])
    model.resize_token_embeddings(len(tokenizer))
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    ids = torch.tensor([len(tokenizer) - 1, 3, len(tokenizer) - 2])
    expected = logits(adapted, ids)
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    merged, _ = merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged", base=str(moved))
    assert_float32(logits(merged, ids), expected)


def test_model_with_weights_of_neither_base_nor_adapter_is_refused(tmp_path):
    base = tiny.save(tmp_path / "base", small_encoder("bert", "MaskedLM"))  # has no pooler
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(target_modules=ATTENTION, task_type="SEQ_CLS"))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedModel, match=r"bert\.pooler\.dense\.bias, .* would be random"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")


def test_base_without_a_place_for_a_weight_of_the_adapter_is_refused(base, tmp_path):
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora_config()).save_pretrained(tmp_path / "adapter")
    shallow = tiny.save(tmp_path / "shallow", tiny.model(**{**SIZES, "layers": 1}))
    with pytest.raises(UnsupportedModel, match=r"of the adapter '.*' have no place in LlamaForCausalLM"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged", base=shallow)
    assert not (tmp_path / "merged").exists()


def test_what_cannot_be_merged_is_refused(base, tmp_path):
    with pytest.raises(UnsupportedModel, match=r"there is no adapter in(.|\n)*A full fine-tune has no adapter"):
        merge_adapter(base, tmp_path / "merged")
    with pytest.raises(InvalidConfig, match="is not empty"):
        merge_adapter(base, base)
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(tiny.model(**SIZES), prompts).save_pretrained(tmp_path / "prompts")
    with pytest.raises(InvalidConfig, match="PROMPT_TUNING has no weights to merge"):
        merge_adapter(str(tmp_path / "prompts"), tmp_path / "merged")


def test_the_merged_model_is_pushed_if_asked(base, tmp_path, monkeypatch, capsys):
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora_config()).save_pretrained(tmp_path / "adapter")
    pushed = []
    for cls in ("modeling_utils.PreTrainedModel", "tokenization_utils_base.PreTrainedTokenizerBase"):
        monkeypatch.setattr(f"transformers.{cls}.push_to_hub", lambda self, repo: pushed.append(repo))
    argv = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--push_to_hub", "me/mine"]
    assert main(argv) == 0
    assert pushed == ["me/mine", "me/mine"] and "pushed to me/mine" in capsys.readouterr().out
