"""Float8 training by torchao."""

import os

# torchao's compiled extensions serve inference and MXFP8, neither of which is used here; where they do not
# load, torchao says so on every rank.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
