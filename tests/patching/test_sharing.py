"""`patch(model, unpad=True, share_prefixes=True)`: what rows begin with is computed once; nobody outside can tell."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from calls import watched
from padded import padded, rows
from peft import LoraConfig, get_peft_model
from pretended import pretend
from selection import exhaustive, in_full
from test_unpadding import assert_same, compare_adapters, compare_copies, counted, run
from tiny_models import small_model
from tolerance import assert_float32, assert_low_precision, assert_recomputed, differs
from transformers import AutoModelForSequenceClassification

from trl_packfa import describe, patch, patched, unpatch
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.errors import InvalidConfig
from trl_packfa.layout import PackedLayout, shared_rows
from trl_packfa.patching.forwards import BackboneOverride
from trl_packfa.patching.unpadding import Sharing

# Rewritten attention, windows of 8 that a branch reaches back through, softcap, sinks, ALiBi, experts, transformers'
# interface, an attention function of its own.
TYPES = (
    "llama", "mistral", "granite", "phi", "phi3", "qwen2", "gemma2", "gemma3", "bloom", "falcon", "mpt",
    "gpt_oss", "mixtral", "olmo2", "gptj", "cohere",
)  # fmt: skip
ALONE = {
    "mamba2": "documents run one by one in Mamba2Mixer",
    "qwen3_next": "documents run one by one in Qwen3NextGatedDeltaNet",
    "roformer": "the backbone runs document by document",
    "phi3-longrope": "the rotary embedding's frequencies depend on the length of a document",
}
SHARED = 2 * 20 + 17


def shared(model):
    return patch(model, unpad=True, share_prefixes=True)


def model(name):
    return tiny.model(name) if name in tiny.ARCHITECTURES else small_model(name)


def documents():
    """Three that begin with the same 20 tokens, two with the same 17, and one by itself, in no order."""
    one, two, *rest = tiny.documents((20, 17, 5, 9, 1, 30, 4, 13), seed=3)
    return [torch.cat([one, rest[0]]), torch.cat([two, rest[1]]), torch.cat([one, rest[2]]), rest[3],
            torch.cat([two, rest[4]]), torch.cat([one, rest[5]])]  # fmt: skip


def compare(model, batch, **options):
    """A padded batch as it was, and with shared prefixes."""
    expected = run(model, batch, **options)
    assert_same(run(shared(model), batch, **options), expected, batch)
    return counted(model)


@pytest.mark.parametrize("side", ["left", *in_full("right", "both")])
@pytest.mark.parametrize("name", TYPES)
def test_rows_are_what_they_were(name, side):
    made = model(name)
    assert compare(made, padded(documents(), side)).shared == SHARED
    assert "shared prefixes: computed once, exact: prefixes once against in each row" in describe(made)


@pytest.mark.parametrize("name", ALONE)
def test_where_more_than_attention_mixes_tokens_each_row_runs_by_itself(name, caplog):
    made = model(name)
    assert compare(made, padded(documents())).shared == 0
    assert f"shared prefixes: not used, rows are computed separately: {ALONE[name]}" in describe(made)
    told = [record.message for record in caplog.records if "share no prefixes" in record.message]
    assert len(told) == 1 and ALONE[name] in told[0]


def test_learned_positions_go_on_from_the_prefix():
    """Rows are padded on the right: on the left, gpt2 and BART count from the pads on."""
    assert compare(small_model("gpt2"), padded(documents())).shared == SHARED
    made = shared(small_model("bart"))
    assert "computed separately: documents run one by one in BartLearnedPositionalEmbedding" in describe(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", *in_full("mistral", "gemma2")])
def test_half_precision_is_as_near_to_float32_as_rows_by_themselves(name, dtype):
    batch = padded(documents())
    real = batch["attention_mask"].bool()
    outputs = [model(name)(**batch).logits[real].detach().double()]
    for share in (False, True):
        made = patch(model(name).to(dtype), unpad=True, share_prefixes=share)
        outputs.append(made(**batch).logits[real].detach())
    assert counted(made).shared == SHARED
    assert_low_precision(outputs[2], outputs[1], outputs[0], factor=2.0)


def test_negative_control_branches_that_see_each_other(monkeypatch):
    made, batch = tiny.model(), padded(documents())
    expected = rows(made(**batch).logits, batch["attention_mask"])
    shared(made)

    def take(self, call, found):
        chain = [tuple(range(len(found.segments)))]
        return found.take_call(call), PackedLayout.from_lengths(found.segments, documents=chain)

    monkeypatch.setattr(BackboneOverride, "_taken", take)
    logits = rows(made(**batch).logits, batch["attention_mask"])
    assert differs(logits[5], expected[5])


@pytest.mark.parametrize(("share", "reentrant"), [
    (False, None), (False, False), (True, None), (True, False), (True, True),
])  # fmt: skip
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
def test_adapters_and_gradient_checkpointing(order, share, reentrant):
    found = compare_adapters(order, reentrant, documents(), share_prefixes=share)
    assert found.calls and found.shared == SHARED * share


@pytest.mark.parametrize("share", [False, True])
def test_the_routers_loss_counts_a_token_in_each_row(share):
    made = small_model("mixtral", router_aux_loss_coef=0.1)
    for side in ("right", "left"):
        batch = padded(documents(), side)
        expected = made(**batch, output_router_logits=True).aux_loss
        with patched(made, unpad=True, share_prefixes=share):
            assert_float32(made(**batch, output_router_logits=True).aux_loss, expected.double())
            assert counted(made).calls and counted(made).shared == SHARED * share


def test_a_classifier_pools_the_last_token_of_each_row():
    config = small_model("llama", num_labels=1, pad_token_id=0).config
    made, batch = AutoModelForSequenceClassification.from_config(config).eval(), padded(documents(), "left")
    expected = made(**batch).logits
    with patched(made, unpad=True, share_prefixes=True):
        assert_float32(made(**batch).logits, expected.double())
        assert counted(made).shared == SHARED


# What a call may hold by which rows differ where their ids do not, or that goes on from elsewhere.
APART = {
    "positions": lambda batch: {"position_ids": torch.arange(50, 50 + batch.shape[1]).expand(batch.shape)},
    "embeddings": lambda batch: {"inputs_embeds": torch.randn(*batch.shape, 64), "input_ids": None},
    "a cache": lambda batch: {"use_cache": True},
}


@pytest.mark.parametrize("what", APART)
def test_calls_that_say_more_of_a_token_than_its_id_share_nothing(what):
    made, batch = tiny.model(), padded(documents())
    call, real = {**batch, **APART[what](batch["input_ids"])}, batch["attention_mask"].bool()
    expected = made(**call).logits[real].detach()
    assert_float32(shared(made)(**call).logits[real].detach(), expected.double())
    assert counted(made).shared == 0


class ReadsItsConfig(torch.nn.Module):
    """A module that reads a rate at each call, as GPT-Neo's and BLT's do."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(dropout=0.5, layerdrop=0.5)

    def forward(self, x):
        return torch.nn.functional.dropout(x, self.config.dropout, self.training)


def test_a_rate_that_a_forward_reads_from_its_config_is_seen():
    module = ReadsItsConfig()
    sharing = Sharing(module, None)
    assert sharing._draws() == "ReadsItsConfig.dropout"
    module.config.dropout = 0.0
    assert sharing._draws() is None, "no forward reads layerdrop"
    module.config.dropout = 0.1
    assert sharing._draws() is not None and Sharing(module.eval(), None)._draws() is None


def test_rows_without_pads_share_and_rows_that_are_the_same_are_one():
    made = tiny.model()
    ids = torch.stack(tiny.documents((30, 30)))
    ids[1, :25] = ids[0, :25]
    for batch, shared in ((ids, 25), (ids[:1].repeat(3, 1), 60)):
        call = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        assert compare(made, call).shared == shared
        unpatch(made)


def test_nothing_is_shared_while_something_is_drawn_at_random(caplog):
    made, batch = shared(tiny.model(attention_dropout=0.5)), padded(documents())
    made.eval()(**batch)
    assert counted(made).shared == SHARED  # no dropout outside of training
    for _ in range(2):
        made.train()(**batch)
    assert counted(made).shared == SHARED
    told = [r.message for r in caplog.records if "draws its own random numbers" in r.message]
    assert len(told) == 1 and "LlamaModel share no prefixes while LlamaAttention.attention_dropout" in told[0]
    noisy = shared(tiny.model()).train()
    noisy.get_input_embeddings().neftune_noise_alpha = 5.0  # as transformers' Trainer does
    noisy(**batch)
    assert counted(noisy).shared == 0
    del noisy.get_input_embeddings().neftune_noise_alpha
    noisy(**batch)
    assert counted(noisy).shared == SHARED


def test_nothing_is_shared_while_an_adapter_drops():
    batch, config = padded(documents()), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    adapted = get_peft_model(tiny.model(), config)
    shared(adapted).train()(**batch)
    assert counted(adapted).shared == 0
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # as TRL's `disable_dropout` does
    adapted(**batch)
    assert counted(adapted).shared == SHARED
    # Another adapter takes the place of the first: there are as many modules as before.
    adapted.add_adapter("other", config)
    adapted.delete_adapter("default")
    adapted.set_adapter("other")
    adapted.train()(**batch)
    assert counted(adapted).shared == SHARED


def test_a_layout_that_serves_two_batches_shares_the_prefixes_of_each():
    made, layout = shared(tiny.model(layers=2)), PackedLayout.from_lengths([40, 40, 30])
    alike, apart = (list(torch.randint(3, 90, (110,)).split([40, 40, 30])) for _ in range(2))
    alike[1][:20] = alike[0][:20]
    for tokens in (alike, apart, alike):
        batch = {"input_ids": torch.cat(tokens)[None], "position_ids": layout.position_ids(), "packed_layout": layout}
        packed = layout.split(made(**batch, use_cache=False).logits.detach())
        for own, found in zip(tokens, packed, strict=True):
            assert_float32(found, made(input_ids=own[None], use_cache=False).logits[0].detach().double())
    assert counted(made).shared == 2 * 20


def test_activated_lora_and_missing_unpad_are_refused():
    with pytest.raises(InvalidConfig, match="share_prefixes=True needs unpad=True"):
        patch(tiny.model(), share_prefixes=True)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8])
    made = shared(get_peft_model(tiny.model(), config))
    assert "computed separately: activated LoRA begins at the last invocation of a document" in describe(made)


@pytest.mark.parametrize("share", [False, True])
def test_the_patch_is_copied_pickled_undone_and_idempotent(share):
    assert all(bool(counts.shared) == share for counts in compare_copies(padded(documents()), share_prefixes=share))


def test_ids_are_compared_once_for_all_models(monkeypatch):
    models = [shared(tiny.model(layers=1, seed=seed)) for seed in (0, 1)]
    compared = watched(monkeypatch, shared_rows, "share")
    batch = padded(documents())
    for made in (*models, *models):
        made(**batch)
    assert len(compared) == 1


@pytest.mark.parametrize("share", [False, True])
def test_under_torch_compile(share):
    made = patch(tiny.model(layers=2), unpad=True, share_prefixes=share)
    compiled = torch.compile(made, backend="aot_eager")
    for batch in (padded(documents(), "left"), padded(documents()[:4]), padded(documents()[2:])):
        real = batch["attention_mask"].bool()
        logits, grads = run(compiled, batch)
        expected, expected_grads = run(made, batch)
        assert_float32(logits[real], expected[real].double())
        for ours, theirs in zip(grads.values(), expected_grads.values(), strict=True):
            assert_recomputed(ours, theirs.double())
    assert bool(counted(made).shared) == share


@pytest.mark.parametrize("backend", ["varlen", *exhaustive("flash")])
def test_flash_attention_in_a_graph_is_told_of_keys_apart(backend, monkeypatch):
    """One graph of any documents, as for those that share nothing; the stand-in compares what it is told. The head
    sees the padded batch: one graph for the first, one for any other."""
    pretend(monkeypatch, backend)
    with torch.autocast("cpu", torch.bfloat16):
        made = patch(tiny.model("mistral", layers=2), backend=backend, unpad=True, share_prefixes=True)
        compiled = torch.compile(made, backend="aot_eager")
        for batch in (padded(documents()), padded(documents()[:4]), padded(documents()[2:], "left")):
            real = batch["attention_mask"].bool()
            found = [forward(**batch).logits[real] for forward in (compiled, made)]
            assert torch.equal(*found)
            found[0].float().square().mean().backward()
    assert compiled_graphs() == 3
