"""The trainers: `sft/` is `PackedSFTTrainer`, `preference/` holds the packed DPO, KTO and reward trainers,
`padding_free/` runs TRL's trainers without padding. What stands beside the folders serves all of them.
"""
