"""The mount beside a native directory: the same calls, values and errors compared.

Most tests are tables of cases. A case builds something in an empty directory and then makes calls;
it runs in a native directory and in the mount, in three states of what was built (`parity.State`).
"""

import pytest

pytest.register_assert_rewrite("tests.posix.parity")
