"""Speed and memory against peers: every contender in one process, timed in turn."""
