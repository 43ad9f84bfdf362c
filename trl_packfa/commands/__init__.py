"""The commands of `trl-packfa`: a file each, with `add`, which declares it on argparse, and what it runs.

Nothing heavy is imported before a command runs, so that `--help` is instant.
"""

from __future__ import annotations

from . import backends, bench, check, completion, demo, env, merge, models, recipes, train

# In the order of `--help`; a new command is a file with `add(commands)` and a name here.
COMMANDS = (train, demo, check, bench, merge, models, backends, recipes, env, completion)

__all__ = ["COMMANDS"]
