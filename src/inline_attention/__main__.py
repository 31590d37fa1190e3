"""`python -m inline_attention` is the command `inline`, for launchers that start a module, such as torchrun."""

import sys

from inline_command import main

sys.exit(main())
