"""The benchmarks of one part each: attention, planning, a layer, the check; and the models they run on."""

import json
from pathlib import Path

import attention_speed
import check_beside_step
import half_attention
import layer_overhead
import pytest
import torch
import torch.nn.functional as F
from attention_speed import TRANSFORMERS, Heads, attend_with, bench_attention, document_lengths
from planning_speed import bench_pack, bench_start, bench_steps
from tolerance import assert_float32

from trl_packfa import PackedLayout
from trl_packfa.attention import sdpa
from trl_packfa.bench import presets
from trl_packfa.bench.arguments import read_arguments
from trl_packfa.bench.presets import PRESETS, preset_config
from trl_packfa.bench.run import model_path
from trl_packfa.errors import InvalidConfig, PackingError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_that_their_names_say(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(preset_config(name))
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    sizes = {"llama-3.2-1b": 1.24, "llama-3-8b": 8.03, "mistral-7b": 7.25, "granite-8b": 8.17, "phi-3-mini": 3.82}
    if name in sizes:
        assert billions == pytest.approx(sizes[name], abs=0.02)
    assert preset_config(name, vocab_size=200_000).vocab_size == 200_000


def test_lengths_add_up():
    for mix in ("short", "even", "uneven", "long", "whole"):
        assert sum(document_lengths(mix, 700, seed=0)) == 700
    assert document_lengths("whole", 700, seed=0) == [700]
    assert document_lengths("even", 700, seed=1) != document_lengths("even", 700, seed=2)


def test_a_mix_that_does_not_exist_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(attention_speed, "_in_process", lambda *args: pytest.fail("measured"))
    with pytest.raises(InvalidConfig, match="there is no mix of lengths 'flan'"):
        attention_speed.main(["--mixes", "flan"])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bench_attention_runs_what_can_run_and_says_why_not(lengths_file):
    sides = ["sdpa", TRANSFORMERS, "flex"]
    rows = bench_attention(tokens=[512], mixes=[lengths_file], sides=sides, heads=Heads(4, 1, 32), repeats=1)
    ours, theirs, flex = rows
    assert ours["us/token"] > 0 and ours["KB/token"] >= 0 and theirs["times the floor"] > 0
    assert flex["us/token"] is None and (torch.cuda.is_available() or "CUDA" in flex["remark"])
    huge = bench_attention(tokens=[2**22], mixes=["whole"], sides=["sdpa", TRANSFORMERS, "x"], repeats=1, slowest=1.0)
    assert [row["us/token"] for row in huge] == [None] * 3
    assert "its arithmetic alone takes" in huge[0]["remark"] and "its T x T mask takes" in huge[1]["remark"]
    assert "there is no side 'x'" in huge[2]["remark"]


def test_an_attentions_floor_follows_its_heads():
    wide = Heads(32, 8, 128)
    assert attention_speed.attention_flops([300, 20], wide) == 6 * 32 * 128 * (300**2 + 20**2)
    assert attention_speed.attention_bytes(320, wide, 2) == 6 * (32 + 8) * 128 * 320 * 2


def test_both_sides_of_the_attention_bench_compute_the_same():
    layout = PackedLayout.from_lengths([30, 1, 65])
    query, key, value = (torch.randn(96, heads, 64) for heads in (8, 2, 2))
    ours, theirs = (attend_with(side, layout, Heads(8, 2, 64))(query, key, value) for side in ("sdpa", TRANSFORMERS))
    assert_float32(ours, theirs)


def test_bench_pack_times_every_part():
    rows = bench_pack(documents=2000, row=256, mix="short")
    assert [row["documents"] for row in rows] == [2000, 2000, 1984] and all(row["documents/s"] > 0 for row in rows)


def test_bench_steps_plans_a_step_of_many_ranks():
    rows = bench_steps(ranks=[2, 16], row=256, mix="short")
    assert [row["documents"] for row in rows] == [8, 128, 64, 1024] and all(row["CPU ms"] >= 0 for row in rows)
    assert all(row["micro-batches"] <= row["accumulation"] and 1 <= row["imbalance"] < 2 for row in rows)


def test_bench_start_counts_once_and_maps_the_counts_then():
    parts = [row["part"] for row in bench_start(documents=[20_000])]
    assert parts == ["lengths, first rank", "lengths, another rank", "plan of an epoch, 8 ranks"]


def test_one_side_of_the_bench_of_half_precision_attends_in_float32(monkeypatch, capsys):
    monkeypatch.setattr(sdpa, "has_half_products", lambda dtype, device: True)
    computed, attend = [], F.scaled_dot_product_attention

    def noted(*args, **options):
        out = attend(*args, **options)
        computed.append(out.dtype)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    argv = ["--documents", "16", "32", "--tokens", "32", "--width", "192", "--layers", "1", "--repeats", "2", "--json"]
    assert half_attention.main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["documents"] for row in rows] == [16, 32]
    # Two lengths, three pairs of steps each, one layer.
    assert computed.count(torch.float32) == computed.count(torch.bfloat16) == 2 * 3


def test_calls_of_a_layer_repeat_and_grow_with_what_runs():
    """The first time fills caches of the libraries."""

    def count(which):
        return layer_overhead._count(layer_overhead._call(layer_overhead.SIDES[1], which, 2))

    _, first, again = ([count(which) for which in layer_overhead.PASSES] for _ in range(3))
    assert first == again and first[0] < first[1] < first[2]


def test_no_pair_is_refused():
    with pytest.raises(InvalidConfig, match="repeats=0"):
        layer_overhead.bench_overhead(repeats=0)


@pytest.mark.slow
def test_the_check_is_timed_beside_a_step(preset, lengths_file, tmp_path, capsys):
    argv = ["--model", preset, "--lengths", lengths_file, "--json", "--output_dir", str(tmp_path)]
    assert check_beside_step.main(argv) == 0
    out = capsys.readouterr().out
    check, step = json.loads(out[out.index("[\n") :])  # libraries print lines at import
    assert check["seconds"] > 0 and step["seconds"] > 0 and check["share of 500 steps"].endswith("%")


def test_a_preset_is_kept_for_later_runs(tmp_path, monkeypatch):
    """Under a name that says what it is; one that was cut off is made again."""
    made = []

    def save(name, folder, **options):
        assert not folder.exists()
        folder.mkdir()
        made.append((name, options["dtype"]))
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("trl_packfa.bench.run.save_preset_apart", save)
    kept = tmp_path / "kept"
    command = ["--model", "tiny", "--presets", str(kept), "--output_dir", str(tmp_path), "--dtype"]
    with pytest.raises(KeyboardInterrupt):
        model_path(read_arguments([*command, "bfloat16"]), tmp_path)
    paths = [model_path(read_arguments([*command, dtype]), tmp_path) for dtype in ("bfloat16", "bfloat16", "float32")]
    assert made == [("tiny", "bfloat16")] * 2 + [("tiny", "float32")]
    assert paths == [str(kept / f"tiny-{dtype}-None-42") for dtype in ("bfloat16", "bfloat16", "float32")]


def test_a_folder_with_the_name_of_a_preset_is_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert model_path(read_arguments(["--model", "tiny", "--output_dir", "out"]), tmp_path) == "tiny"


@pytest.mark.slow
def test_a_preset_is_made_in_a_process_of_its_own(tmp_path, monkeypatch):
    """The memory of a GPU that a process has taken for weights stays its own until it ends."""
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *a, **k: pytest.fail("made here"))
    asked = read_arguments(["--model", "tiny", "--dtype", "bfloat16", "--output_dir", str(tmp_path)])
    made = Path(model_path(asked, tmp_path))
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(PackingError, match=r"preset 'tiny' could not be made\.\n  - .*float31"):
        presets.save_preset_apart("tiny", tmp_path, dtype="float31", tokenizer=None, seed=3)
