"""`python -m inline_attention`: the command `inline` where only an interpreter is at hand, as under torchrun."""

import sys

from inline_attention.cli import main

sys.exit(main())
