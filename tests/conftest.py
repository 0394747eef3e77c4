"""Settings of all tests.

Hypothesis does not time examples: the machine is shared, and a slow example is no failure. Its examples are the same in
every run, so that a failure can be had again.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "genesis", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("genesis")
