"""TRL's trainers without padding.

`padding_free` finds the models of a trainer and patches them, `run` reports and has the first batch checked, `online`
loads models for GRPO and RLOO by the command line.
"""
