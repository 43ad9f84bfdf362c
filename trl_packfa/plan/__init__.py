"""`trl-packfa plan`: predict the effect of packing on a dataset from its lengths and a config, before GPUs are rented.

`gather` reads the document lengths, `compare` compares every strategy with the padded run, `trainers/sft/memory.py`
estimates the memory of a GPU, `advise` writes the advice, and `terminal` and `page` show the plan.
"""
