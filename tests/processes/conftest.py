"""The mounts of other groups: beside a native directory, and over a share that can be made slow."""

from tests.endtoend.conftest import mount, slow_share, stage
from tests.posix.conftest import at_rest, base, parity, state, under_way

__all__ = ["at_rest", "base", "mount", "parity", "slow_share", "stage", "state", "under_way"]
