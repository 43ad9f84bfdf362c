"""`python -m trl_packfa`, for `accelerate launch -m trl_packfa`."""

import sys

from .cli.main import main

sys.exit(main())
