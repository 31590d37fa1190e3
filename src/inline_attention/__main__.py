"""`python -m inline_attention`: the command `inline` where only an interpreter is at hand, as under torchrun."""

import sys

from inline_command import main

sys.exit(main())
