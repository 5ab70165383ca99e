"""What holds for every test: one compute thread, no network, reproducible hypothesis.

Set before any test imports torch or transformers, which read the environment once.
"""

from __future__ import annotations

import os

os.environ.update(
    OMP_NUM_THREADS="1",  # two cores are shared by all test processes
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
os.environ.pop("HYBRIDSCHED_TRACEBACK", None)  # tests of messages expect messages

from hypothesis import HealthCheck, settings

# No deadline: how long an example takes depends on who else uses the machine. derandomize: a red run stays red.
settings.register_profile("repository", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", parent=settings.get_profile("repository"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repository"))
