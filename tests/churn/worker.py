"""A process that works in its own directory of a mount and logs what was acknowledged.

    python -m tests.churn.worker DIRECTORY STATE LOG SEED

STATE holds the pickled model of the directory. The log has a line before each operation,
``["try", operation]``, and one after it, ``["done"]``; what is not done when the log ends was
under way. When bytes that only the share has are out of reach for a while: ``["skipped"]``. The
worker ends when the mount's daemon dies (exit code 0), on SIGTERM (0), or when something is not as
it should be, after a line ``["wrong", text]`` (exit code 1).
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import sys

from tests.churn.model import File, Model
from tests.churn.operations import Chooser, Executor, UnreadableError

DEAD = {errno.ENOTCONN, errno.ECONNABORTED}
"""What a mount answers whose daemon has died."""

READ_SHARE = 0.05
"""Of the operations are followed by reading a file back."""


def main() -> int:
    directory, state, log_path, seed = sys.argv[1:]
    with open(state, "rb") as file:
        model: Model = pickle.load(file)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    os.umask(0)
    random_ = random.Random(seed)
    chooser, executor = Chooser(model, random_), Executor(directory)

    def say(*line: object) -> None:
        os.write(log, json.dumps(line).encode() + b"\n")

    try:
        while not stopped:
            for operation in chooser.next():
                say("try", operation)
                try:
                    executor.execute(operation)
                except UnreadableError:
                    say("skipped")
                    continue
                say("done")
                model.apply(operation)
            if random_.random() < READ_SHARE:
                files = [(path, e) for path, e in model.walk() if isinstance(e, File)]
                if files:
                    path, entry = random_.choice(files)
                    try:
                        data = executor.read(path)
                    except UnreadableError:
                        continue
                    if data != entry.data:
                        say("wrong", f"{path} reads otherwise than it was written")
                        return 1
    except OSError as error:
        if error.errno in DEAD:
            return 0
        say("wrong", f"errno {errno.errorcode.get(error.errno or 0)}: {error}")
        return 1
    finally:
        executor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
