"""Float8 training by torchao."""

import os

# torchao's compiled extensions are for inference and MXFP8, which are not used here. If they do not load, torchao says
# so on every rank.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
