"""TRL's trainers on small models and uneven data, all built with the same code."""

import importlib

import tiny
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tolerance import BFLOAT16_PAIRS, record, share_of_allowed
from training import arguments, logs_of, trained

import trl_packfa

# What the trainers are called here; the rest is experimental in TRL 1.16.
STABLE = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
EXPERIMENTAL = ("orpo", "cpo", "tpo", "gkd", "distillation", "online_dpo", "bema_dpo")
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]


def pairs(count=24):
    """Return preference pairs of very uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 30, (count, 3), generator=generator).tolist()
    return [
        {"prompt": tiny.words(a, seed=i) + " ", "chosen": tiny.words(b, seed=1000 + i),
         "rejected": tiny.words(c + 5, seed=2000 + i)}
        for i, (a, b, c) in enumerate(sizes)
    ]  # fmt: skip


def classifier(labels=1):
    language = tiny.model(layers=2)
    config = language.config
    config.num_labels, config.pad_token_id = labels, 0
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.load_state_dict(language.state_dict(), strict=False)
    return model


def tokenizer(side="right"):
    made = tiny.tokenizer()
    made.padding_side = side
    return made


# What takes the place of TRL's trainers of pairs.
PACKED = {"dpo": "PackedDPO", "reward": "PackedReward", "kto": "PackedKTO"}
ALL_PACKED = {"sft": "PackedSFT", **PACKED}


def build_packed(kind, out, **options):
    """Build a packed trainer of this kind with the arguments of `build`."""
    trainer, config = (getattr(trl_packfa, ALL_PACKED[kind] + what) for what in ("Trainer", "Config"))
    return build(kind, out, **{"cls": trainer, "config": config, "use_peft": False, **options})


def _reward(completions, **columns):
    return [float(len(text.split()) % 5) for text in completions]


def _adapter(kind):
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    return {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules=_LINEAR, task_type=task)}


def _saved(folder):
    """Save a model, because GRPO and RLOO load their reference by name."""
    tiny.model(layers=2).save_pretrained(folder / "model")
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


def build(
    kind, out, *, lora=False, model=None, cls=None, config=None, data=None, reference=True, stream=False, given=None,
    **options,
):  # fmt: skip
    """Build a trainer of this kind; `cls` and `config` replace TRL's classes. Without `reference` the trainer finds
    its own. With `stream` the training data are a stream. `given` are further arguments of the trainer."""
    data = pairs() if data is None else data
    batch = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "learning_rate": 1e-4}
    model = model or (classifier() if kind == "reward" else tiny.model(layers=2))
    adapter = {**(_adapter(kind) if lora else {}), **(given or {})}

    def made(cls_, config_, rows, *, settings=None, side="right", **own):
        asked = arguments(config or config_, out, **{**batch, **(settings or {}), **options})
        train_dataset = Dataset.from_list(rows)
        return (cls or cls_)(
            own.pop("model", model), args=asked,
            train_dataset=train_dataset.to_iterable_dataset() if stream else train_dataset,
            eval_dataset=Dataset.from_list(rows[:8]), processing_class=tokenizer(side), **own, **adapter,
        )  # fmt: skip

    prompts = [{"prompt": row["prompt"]} for row in data]
    reference = {} if lora or not reference else {"ref_model": tiny.model(layers=2)}
    if kind == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in data]
        return made(trl.SFTTrainer, trl.SFTConfig, rows)
    if kind == "dpo":
        return made(trl.DPOTrainer, trl.DPOConfig, data, **reference)
    if kind == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
            for i, row in enumerate(data)
        ]
        return made(trl.KTOTrainer, trl.KTOConfig, rows, **reference)
    if kind == "reward":
        return made(trl.RewardTrainer, trl.RewardConfig, data)
    if kind in ("grpo", "rloo"):
        trainer, config_ = (getattr(trl, kind.upper() + what) for what in ("Trainer", "Config"))
        settings = {"beta": 0.04, "num_generations": 4, "num_generations_eval": 4, "max_completion_length": 12}
        own = {"reward_funcs": [_reward, classifier()], "reward_processing_classes": [None, tokenizer()]}
        own |= {} if lora else {"model": _saved(out)}
        return made(trainer, config_, prompts, settings=settings, side="left", **own)
    if kind == "distillation":
        own = {"teacher_model": tiny.model(layers=2, seed=5), "settings": {"max_completion_length": 8}}
        return made(trl.DistillationTrainer, trl.DistillationConfig, prompts, side="left", **own)
    return _experimental(kind, made, data, prompts)


def _experimental(kind, made, data, prompts):
    length = {"settings": {"max_length": 60}}
    if kind in ("orpo", "cpo", "tpo"):
        module = importlib.import_module(f"trl.experimental.{kind}")
        trainer, config = (getattr(module, kind.upper() + what) for what in ("Trainer", "Config"))
        rows = [{**row, "reference": row["chosen"]} for row in data] if kind == "tpo" else data
        return made(trainer, config, rows, **length)
    if kind == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        rows = [
            {"messages": [{"role": "user", "content": row["prompt"].strip()},
                          {"role": "assistant", "content": row["chosen"]}]}
            for row in data
        ]  # fmt: skip
        settings = {"lmbda": 0.5, "max_new_tokens": 8, "max_length": 60}
        return made(GKDTrainer, GKDConfig, rows, settings=settings, teacher_model=tiny.model(layers=2, seed=5))
    if kind == "online_dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        own = {"reward_funcs": classifier(), "reward_processing_classes": tokenizer()}
        settings = {"max_new_tokens": 8, "max_length": 64}
        return made(OnlineDPOTrainer, OnlineDPOConfig, prompts, settings=settings, side="left", **own)
    if kind == "bema_dpo":
        from trl.experimental.bema_for_ref_model import DPOTrainer

        return made(DPOTrainer, trl.DPOConfig, data, ref_model=tiny.model(layers=2))
    raise ValueError(kind)


# What is no figure of the training itself, or is another by its nature.
_TIMES = ("time", "second", "epoch")
# At the first step policy and reference are one: which of two equal rewards is larger is rounding's to say.
ROUNDED = ("rewards/accuracies",)


# TRL's means over the tokens of a micro-batch, over its answers of one label, and its smallest and largest rewards:
# re-cut steps have other micro-batches.
OF_MICRO_BATCHES = {
    "dpo": ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"),
    "reward": ("min_reward", "max_reward"),
    "kto": ("entropy", *(f"{what}/{of}" for what in ("logits", "logps", "rewards")
                         for of in ("chosen", "rejected", "margins"))),
}  # fmt: skip


# KTO's `kl` is the difference of two rows' log-probabilities, sums over their tokens, and rounding is as large as they
# are: 1e-5 of a `kl` near 0 is a few units in the last place of log-probabilities of 200. Rewards are such differences
# times beta, which is 0.1.
_DIFFERENCE_OF = {"kl": 1.0, **{f"rewards/{of}": 0.1 for of in ("chosen", "rejected", "margins")}}


def encoder_decoder():
    """Build a classifier that cannot run without its pads: its decoder attends to an encoder."""
    torch.manual_seed(0)
    sides = {f"{side}_{size}": value for side in ("encoder", "decoder")
             for size, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
    config = transformers.BartConfig(vocab_size=tiny.VOCAB, d_model=16, pad_token_id=0, num_labels=1, **sides)
    return transformers.BartForSequenceClassification(config)


def differences(logs, others, *, only=(), dtype=torch.float32):
    """Return the worst difference of each metric, or of those named, over all steps, as a share of what is allowed."""
    worst, places = {}, BFLOAT16_PAIRS if dtype is torch.bfloat16 else None
    for steps, (entry, other) in enumerate(zip(logs, others, strict=True), 1):
        for name, value in entry.items():
            wanted = name in only or not only
            if wanted and isinstance(value, (int, float)) and not any(word in name for word in _TIMES):
                terms = max(abs(entry.get(f"logps/{of}", 0.0)) for of in ("chosen", "rejected"))
                unit = {"steps": steps, "size": _DIFFERENCE_OF.get(name, 0.0) * terms, "dtype": dtype}
                found = abs(share_of_allowed(other[name], value, **unit, places=places))
                worst[name] = max(worst.get(name, 0.0), found)
    return worst


def beyond(expected, logs, *, only=(), besides=(), dtype=torch.float32, times=1.0):
    """Return the metrics that differ by more than allowed, or by more than `times` as much, with their shares."""
    # In bfloat16 two tokens are often equally likely.
    rounded = (*ROUNDED, "mean_token_accuracy") if dtype is torch.bfloat16 else ROUNDED
    worst = {
        name: found for name, found in differences(expected, logs, only=only, dtype=dtype).items()
        if name not in (*rounded, *besides)
    }  # fmt: skip
    record(f"run of pairs, {dtype}" if times == 1.0 else "run, control", max(worst.values()))
    return {name: found for name, found in worst.items() if found > times}


def train(trainer, **options):
    torch.manual_seed(0)
    return logs_of(trained(trainer, **options))


def run(make, *args, **options):
    """Build a trainer from a known seed and train it; return the training logs, and the trainer."""
    torch.manual_seed(0)
    trainer = make(*args, **options)
    return train(trainer), trainer
