"""The trainers: `common/` serves all of them, `sft/` is `PackedSFTTrainer`, `padding_free/` runs TRL's trainers
without padding, `preference/` holds the packed DPO, KTO and reward trainers.
"""
