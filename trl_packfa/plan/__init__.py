"""`trl-packfa plan`: what packing will do to a dataset, from its lengths and a config, before GPUs are rented.

`gather` reads lengths, `compare` puts every strategy beside the padded run, `memory` estimates what a GPU must hold,
`advise` says what follows; `terminal` and `page` show it.
"""
