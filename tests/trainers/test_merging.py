"""After training: the adapter in the weights, and what comes out of them."""

import pytest
import tiny
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from tolerance import assert_float32, differs
from training import arguments, lora_config, packed_trainer, trained
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import trl_packfa
from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.trainers.common.hub import merge_adapter

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
    adapted = logits(PeftModel.from_pretrained(plain, adapter), ids)
    assert_float32(logits(merged, ids), adapted)
    assert differs(logits(merged, ids), before), "the adapter has learned something"
    assert not quantized or trainer.model.is_loaded_in_4bit
    assert not hasattr(merged.config, "quantization_config"), "the base was loaded unquantized"
    assert AutoTokenizer.from_pretrained(out).eos_token == "</s>"


def test_the_merged_model_generates_patched_or_not(base, tmp_path):
    _, adapter = train_adapter(base, tmp_path)
    merged, tokenizer = merge_adapter(adapter, tmp_path / "merged", dtype="float32")
    prompt = tokenizer("1 2 3", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = merged.generate(prompt, **options)
    with trl_packfa.patched(merged):
        assert torch.equal(merged.generate(prompt, **options), plain)
    assert plain.shape[1] > prompt.shape[1] and tokenizer.decode(plain[0])


def test_the_model_generates_right_after_training(base, tmp_path):
    trainer, adapter = train_adapter(base, tmp_path)
    ids = tiny.documents()[0][None]
    options = {"max_new_tokens": 6, "do_sample": False}
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    assert torch.equal(trainer.model.generate(input_ids=ids, **options), loaded.generate(input_ids=ids, **options))


def test_a_base_that_moved_is_named(base, tmp_path, capsys):
    _, adapter = train_adapter(base, tmp_path)
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    assert main(["merge", adapter, str(tmp_path / "merged")]) == 1
    assert "cannot load the base" in capsys.readouterr().err
    assert main(["merge", adapter, str(tmp_path / "merged"), "--base", str(moved)]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.dtype == AutoConfig.from_pretrained(moved).dtype, "the base's own"


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
    argv = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--push-to-hub", "me/mine"]
    assert main(argv) == 0
    assert pushed == ["me/mine", "me/mine"] and "pushed to me/mine" in capsys.readouterr().out
