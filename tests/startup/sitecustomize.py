"""For every Python that the tests start (run_tests.sh puts this folder on PYTHONPATH): most end after a few seconds.

A fifth of the CPU time of a process that imports train.py went to Python's garbage collector, which walks through the
million objects that an import of torch leaves, again and again, and once more at the end.
"""

import atexit
import gc

gc.set_threshold(10_000, 20, 50)
atexit.register(gc.freeze)
