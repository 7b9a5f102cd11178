"""Hours in minutes: random work on a share that fails in every way, kills and remounts, a model.

`weather` is what happens to the share, `soak` the rounds, with what must hold whenever everything
has been flushed; the work itself is `tests.churn`.
"""
