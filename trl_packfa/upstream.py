"""The private names of other packages that the code touches, each with what no public name gives.

A row's path ends in the name. `Class._name` is looked up. `Class()._name` exists only on instances, or on what a
function has touched, so it is looked for in the source of the class, its bases, or the function. Braces list names.
`tests/repository/test_private_names.py` finds each use in the code, and each name in the oldest and newest versions.
"""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """A private name: its path, why it is touched, and the only versions that have it, `""` for all tested ones."""

    path: str
    why: str
    only: str = ""


PRIVATE = (
    # TRL's trainers and head.
    Private("trl.{SFT,DPO,KTO,Reward}Trainer._tag_names", "tags of the model card"),
    Private("trl.{SFT,DPO,KTO,Reward}Trainer._prepare_dataset", "tokenized by TRL, then cut and counted by us"),
    Private("trl.{DPO,KTO}Trainer._precompute_ref_logps", "runs in the constructor, and needs the patch before"),
    Private("trl.{SFT,DPO,KTO,Reward}Trainer()._metrics", "logged means; a hook of the Trainer's log gets only sums"),
    Private("trl.{SFT,DPO,KTO,Reward}Trainer()._total_train_tokens", "the count that TRL logs, which counts pads"),
    Private("trl.{SFT,DPO,KTO}Trainer()._tokenizer", "the tokenizer of a processor, as TRL found it"),
    Private("trl.{SFT,DPO,KTO}Trainer()._is_vision_dataset", "whether TRL collates images"),
    # transformers: hooks of the Trainer that a packed trainer extends or calls.
    Private("transformers.Trainer._get_train_sampler", "the order of examples that rows and steps are cut from"),
    Private("transformers.Trainer._get_num_items_in_batch", "counts the labels of a step that is not collated yet"),
    Private("transformers.Trainer._prepare_input", "moves one value of a batch; copies that need not wait"),
    Private("transformers.Trainer._prepare_inputs", "moves a batch that no loader has made"),
    Private("transformers.Trainer._track_num_input_tokens", "would tell pads of packed rows by their id"),
    Private("transformers.Trainer._set_signature_columns_if_needed", "keeps the columns of packing"),
    Private("transformers.Trainer()._signature_columns", "the list of these columns"),
    Private("transformers.Trainer._remove_unused_columns", "rows with images keep their number"),
    Private("transformers.Trainer._get_collator_with_removed_columns", "the collator of a stream's own loader"),
    Private("transformers.Trainer._save_checkpoint", "a checkpoint is marked whole after its last file"),
    Private("transformers.Trainer._get_output_dir", "the folder of that checkpoint, in a search too"),
    Private("transformers.Trainer()._train_batch_size", "the batch size that `auto_find_batch_size` has found"),
    Private("transformers.Trainer()._loss_shifts_labels", "whether the Trainer counts first labels"),
    # transformers: models and configs.
    Private("transformers.PreTrainedConfig._attn_implementation", "the attention that a module runs"),
    Private("transformers.PreTrainedConfig._experts_implementation", "the kernel of experts, part of a check"),
    Private("transformers.PreTrainedConfig()._name_or_path", "a key of `to_dict` that no check depends on"),
    Private(
        "transformers.modeling_layers.GradientCheckpointingLayer()._gradient_checkpointing_func",
        "the layer's checkpoint with its options: the class's own would recompute without the documents",
    ),
    Private("transformers.models.bloom.modeling_bloom.BloomAttention._reshape", "splits the fused projection"),
    Private("transformers.models.falcon.modeling_falcon.FalconAttention._split_heads", "splits its three layouts"),
    Private("transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention._attn", "attention, on heads"),
    Private(
        "transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention._attn",
        "attention, on heads",
    ),
    Private("transformers.models.gptj.modeling_gptj.GPTJAttention._attn", "attention", "transformers<5.24"),
    Private("transformers.models.codegen.modeling_codegen.CodeGenAttention._attn", "attention", "transformers<5.24"),
    # accelerate, datasets, PEFT.
    Private("accelerate.ParallelismConfig._validate_accelerator", "refuses gloo's ranks, though a mesh runs on them"),
    Private("accelerate.hooks.add_hook_to_module()._hf_hook", "tells a module whose forward accelerate has moved"),
    Private("accelerate.hooks.add_hook_to_module()._old_forward", "where it has moved the forward to"),
    Private("datasets.IterableDataset()._epoch", "the epoch in memory that all workers share; `epoch` is a copy"),
    Private("datasets.IterableDataset()._ex_iterable", "tells shuffle buffers, which `state_dict` does not show"),
    Private("peft.tuners.tuners_utils.BaseTunerLayer._{active_adapter,disable_adapters}",
            "watched by identity, for each call; the properties are slow"),
    Private("peft.tuners.lora.model.LoraModel()._peft_gradient_checkpointing_forward_hooks",
            "hooks of activated LoRA that stay after a call without gradients"),
    # torch: modules. Their public methods add hooks, and do not list them.
    Private("torch.nn.Module()._{forward,forward_pre,backward,backward_pre}_hooks", "no kernel may skip a hook"),
    Private("torch.nn.modules.module._global_{forward,forward_pre,backward,backward_pre}_hooks", "nor these"),
    Private("torch.nn.Module()._{modules,parameters}", "watched by identity, for each call; generators are slow"),
    Private("torch.nn.Module._call_impl", "a layer's call with its hooks, to compile"),
    Private("torch.nn.Module._compiled_call_impl", "the compiled call: marked, seen and switched off"),
    Private("torch.Tensor._version", "counts writes, so that what was read from a tensor is read again"),
    # torch: compilation.
    Private("torch._dynamo.maybe_mark_dynamic", "sizes that change; `mark_dynamic` raises where one is fixed"),
    Private("torch._dynamo.config.patch", "limits of graphs, which `torch.compiler` does not set"),
    Private("torch._dynamo.utils.counters", "the number of graphs"),
    Private("torch._dynamo.eval_frame.OptimizedModule()._orig_mod", "the model inside of a compiled one"),
    Private("torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",
            "mask rules index tensors by tensors under vmap, as in transformers"),
    Private("torch.utils._pytree.tree_{leaves,map}", "tensors in any output; torch 2.7 has no public module"),
    # torch: kernels, backwards, ranks.
    Private("torch.ops.mkldnn._is_mkldnn_{bf16,fp16}_supported", "only oneDNN knows if the CPU has instructions"),
    Private("torch._C._autograd._get_current_graph_task_keep_graph", "saved tensors that nobody reads again"),
    Private("torch._C._autograd._top_saved_tensors_default_hooks", "whether saved tensors are recomputed or moved",
            only="torch>2.7"),
    Private("torch.distributed.device_mesh.DeviceMesh._flatten", "the mesh of all ranks under accelerate's name"),
    # The standard library.
    Private("argparse._SubParsersAction", "the type of what `add_subparsers` returns"),
)  # fmt: skip
