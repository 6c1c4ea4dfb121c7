"""Fixtures shared by all tests."""

import os

# Before torch is imported: forked ranks must inherit neither OpenMP threads nor compiler workers. Tests on a GPU fork
# none, and compile as a run does, on all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
if os.environ.get("TEST_GPU") != "1":  # several ranks of a test would share a GPU, and forked ones could not use it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from hypothesis import Phase, settings

# How long an example takes says nothing on a busy machine, and shrinking one that fails takes minutes.
settings.register_profile("suite", deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
settings.load_profile("suite")
