"""The last module that the server of tests/worlds/processes.py imports: forks have composed, and look for no garbage.

Hydra reads its files for the first configuration of a process, and a look for garbage goes through all that was
imported: a fifth of a second of CPU each. The look would also write to each object, which copies the server's memory.
"""

import atexit
import gc

from verl_like.trainer.compose import compose

compose([])
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or libraries tell that it was leaked
