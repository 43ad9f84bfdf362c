"""Entry point of `python -m trl_packfa`, which `accelerate launch -m trl_packfa` needs."""

import sys

from .cli.main import main

sys.exit(main())
