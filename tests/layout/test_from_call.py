"""Contradicting boundaries are refused by name; what is not packed is left alone."""

from inspect import signature

import pytest
import tiny
import torch
from peft import PrefixTuningConfig, get_peft_model
from tiny_models import small_model
from tolerance import assert_float32, differs
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from trl_packfa import PackedLayout, patch
from trl_packfa.errors import InvalidLayout, PackingError, UnsupportedModel
from trl_packfa.layout.from_call import layout_of

IDS = torch.ones(1, 10, dtype=torch.long)
LAYOUT = PackedLayout.from_lengths([4, 6])


def test_boundaries_of_one_row_or_of_several():
    running, two = torch.arange(10)[None], IDS.expand(2, -1)
    assert layout_of({"input_ids": IDS}) is layout_of({"input_ids": IDS, "position_ids": running}) is None
    layout = layout_of({"input_ids": two, "position_ids": LAYOUT.position_ids()})  # one set for every row
    assert (layout.lengths, layout.rows) == ((4, 6, 4, 6), 2)
    # A document split in two keeps counting; only cu_seq_lens says so.
    assert layout_of({"input_ids": IDS, "position_ids": running, **LAYOUT.flash_kwargs()}).lengths == (4, 6)
    with pytest.raises(InvalidLayout, match="crosses the end of a row"):
        layout_of({"input_ids": IDS.view(2, 5), "cu_seq_lens_q": LAYOUT.cu_seqlens})
    padded = PackedLayout.from_lengths([3, 1, 2, 2], padding=2)  # for two rows of four tokens
    found = layout_of({"input_ids": torch.ones((2, 4), dtype=torch.long), "packed_layout": padded})
    assert (found.rows, found.padding, found.true_lengths) == (2, 2, (3, 1, 2))


def test_a_padded_batch_is_left_alone():
    for mask in (torch.tensor([[1] * 8 + [0] * 2]), torch.tensor([[0] * 2 + [1] * 8])):
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        for positions in (torch.arange(10)[None], counted, counted.masked_fill(mask == 0, 1)):
            assert layout_of({"input_ids": IDS, "position_ids": positions, "attention_mask": mask}) is None


FILLED = {"packed_layout": {"packed_layout": LAYOUT}, "cu_seq_lens_q": LAYOUT.flash_kwargs(),
          "position_ids": {"position_ids": LAYOUT.position_ids() + 10}}  # fmt: skip
# transformers 5.24 renames `past_key_values` before the backbone is called.
CACHE = "(past_key_values|cache)"


def test_a_cache_in_use_is_left_alone():
    model = patch(tiny.model())
    prefix = model(input_ids=IDS, use_cache=True)
    assert prefix.past_key_values.get_seq_length() == 10
    pads = torch.tensor([[1] * 10 + [0] * 3 + [1] * 7])
    counted = (pads.cumsum(1) - 1).masked_fill(pads == 0, 1)[:, 10:]
    one = PackedLayout.from_lengths([10])
    for call in (
        {},
        {"position_ids": torch.arange(10, 20)[None]},
        {"position_ids": counted, "attention_mask": pads},
        {"packed_layout": one, **one.flash_kwargs()},
    ):
        assert layout_of({"input_ids": IDS, "past_key_values": prefix.past_key_values, **call}) is None
    cached = {"input_ids": IDS[:, :1], "past_key_values": prefix.past_key_values}
    assert layout_of({**cached, **FILLED["packed_layout"]}) is None


@pytest.mark.parametrize("told", FILLED)
def test_boundaries_beside_a_filled_cache_are_refused(told):
    """They would be ignored: each document would see what is cached and those before it."""
    model = patch(tiny.model())
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(InvalidLayout, match=rf"{told}.* came with a filled {CACHE}(.|\n)*Drop {CACHE}"):
        model(input_ids=IDS, past_key_values=cache, **FILLED[told])
    assert model(input_ids=IDS, past_key_values=cache).logits.shape[1] == 10


def test_continuous_batching_is_generation_and_left_alone():
    """Its calls bring `cu_seq_lens_q` of several requests beside a paged cache, which no packed row could use."""
    model = tiny.model()
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=96, pad_token_id=0)
    room = ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64)
    requests = [[5, 6, 7, 8], [9, 10, 11], [4] * 9]

    def generated():
        answers = model.generate_batch(requests, generation_config=config, continuous_batching_config=room)
        return [answer.generated_tokens for answer in answers.values()]

    stock = generated()
    assert [len(tokens) for tokens in stock] == [4, 4, 4]
    assert [generated() for options in ({}, {"unpad": True}) if patch(model, **options)] == [stock, stock]


def test_a_loop_of_a_users_own_keeps_its_cache():
    """A call that hands over an empty cache, by either name, gets it back filled, with pads and without."""
    model = patch(tiny.model(), unpad=True)
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    for name in ("past_key_values", *(["cache"] if "cache" in signature(type(model).forward).parameters else [])):
        for call in ({}, {"attention_mask": mask}):
            cache = DynamicCache(config=model.config)
            model(input_ids=IDS.expand(2, -1), **{name: cache}, **call)
            assert cache.get_seq_length() == 10


def test_the_prefix_of_an_adapter_is_a_filled_cache(tmp_path):
    """`patch` refuses the adapter by name; this one came after it."""
    model = patch(tiny.model(layers=2))
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(InvalidLayout, match=f"packed_layout came with a filled {CACHE}"):
        model(input_ids=IDS, packed_layout=LAYOUT)


def test_a_mask_of_document_numbers_is_refused():
    """LLaMA-Factory's; transformers takes them all for ones."""
    model, numbers = patch(tiny.model()), torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 0]])
    said = r"values up to 3, which look like numbers of documents(.|\n)*position_ids"
    with pytest.raises(InvalidLayout, match=said):
        model(input_ids=IDS, attention_mask=numbers)
    for mask in (numbers.clamp(max=1), numbers.bool(), numbers.clamp(max=1).float()):
        assert layout_of({"input_ids": IDS, "attention_mask": mask}) is None


@pytest.mark.parametrize(("model_type", "name", "options"), [
    ("gemma3", "token_type_ids", {}),
    ("gemma4_unified", "mm_token_type_ids", {}),
    ("hrm_text", "token_type_ids", {"prefix_lm": True}),
])  # fmt: skip
def test_token_types_that_make_masks_are_refused(model_type, name, options):
    """Unpacked they open the mask in both directions, which packing does without."""
    model, (ids,) = patch(small_model(model_type, **options)), tiny.documents((10,))
    ids, types = ids[None] % 50, torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0, 0, 0]])
    told = {"input_ids": ids, "packed_layout": LAYOUT, "use_cache": False}
    with pytest.raises(PackingError, match=rf"^{name} are not all 0 in a packed batch(.|\n)*Drop {name}"):
        model(**told, **{name: types})
    assert torch.equal(model(**told, **{name: types * 0}).logits, model(**told).logits)
    alone = {"input_ids": ids[:, :4], "use_cache": False}
    with torch.no_grad():
        assert differs(model(**alone, **{name: types[:, :4]}).logits, model(**alone).logits), "they do nothing here"


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "big_bird", "openai-gpt", "xlnet"])
def test_token_types_that_are_looked_up_are_honoured(model_type):
    model, (ids,) = patch(small_model(model_type)), tiny.documents((10,))
    ids, types = ids[None] % 50, torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        packed = model(input_ids=ids, token_type_ids=types, packed_layout=LAYOUT).logits
        parts = zip(ids.split((4, 6), 1), types.split((4, 6), 1), strict=True)
        alone = [model(input_ids=i, token_type_ids=t).logits for i, t in parts]
        plain = model(input_ids=ids, packed_layout=LAYOUT).logits
    assert_float32(packed, torch.cat(alone, 1).double())
    assert differs(plain, packed)


@pytest.mark.parametrize("model_type", ["big_bird", "bert"])
def test_a_row_longer_than_the_positions_of_documents_that_fit(model_type):
    lengths = (30, 40, 20, 33)
    model = patch(small_model(model_type, max_position_embeddings=64))
    docs = [ids % 50 for ids in tiny.documents(lengths)]
    with torch.no_grad():
        packed = model(**tiny.batch(docs)).logits
        alone = [model(input_ids=ids[None]).logits[0] for ids in docs]
    assert_float32(packed[0], torch.cat(alone).double())
    with pytest.raises(PackingError, match="65 tokens, the model has 64 positions"):
        model(**tiny.batch([docs[0].repeat(3)[:65], docs[1]]))


def test_attention_that_no_patch_computes_fails_instead_of_leaking():
    """Weights that are asked for, an attention that the patch missed, two-way attention."""
    model = patch(tiny.model())
    with pytest.raises(PackingError, match="no T x T matrix exists"):
        model.model(input_ids=IDS, packed_layout=LAYOUT, output_attentions=True)
    del vars(model.model.layers[1].self_attn)["forward"]
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError):
            model(input_ids=IDS, packed_layout=LAYOUT)
    model = tiny.model("gemma3", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="attends in both directions"):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())
