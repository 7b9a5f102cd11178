"""Proofs on real mounts over a share that counts, delays, fails and remembers.

Each test works in a directory of its own (`stage.Stage`) of a mounted fault share. What the share
was asked, in which order, and what it held after each call is what they look at.
"""

import pytest

pytest.register_assert_rewrite("tests.endtoend.stage", "tests.endtoend.history")
