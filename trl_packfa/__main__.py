"""`python -m trl_packfa`, for `accelerate launch -m trl_packfa`."""

import sys

from .cli import main

sys.exit(main())
