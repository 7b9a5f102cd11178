"""Command line of the fault share; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable

from tests.faultshare.faults import CAPABILITIES
from tests.faultshare.passthrough import Caching
from tests.faultshare.serve import Options, run


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    p = argparse.ArgumentParser(
        prog="python -m tests.faultshare",
        description="Serve the directory BACKING at MOUNTPOINT as a slow, failing network share.",
    )
    p.add_argument("backing", metavar="BACKING")
    p.add_argument("mountpoint", metavar="MOUNTPOINT")
    p.add_argument("--control", metavar="SOCKET", help="unix socket to take commands on")
    p.add_argument("--background", action="store_true", help="return when the mount answers")
    p.add_argument("--fsname", default="faultshare", help="source in the mount table")
    speed = p.add_argument_group("speed (0: without limit)")
    speed.add_argument("--latency-ms", type=float, default=0, help="round trip of every call")
    speed.add_argument("--jitter-ms", type=float, default=0, help="random extra, at most")
    speed.add_argument("--iops", type=float, default=0, help="calls a second")
    speed.add_argument("--bandwidth-mb", type=float, default=0, help="10^6 bytes a second")
    kernel = p.add_argument_group("what the kernel may cache")
    kernel.add_argument("--attr-timeout", type=float, default=0, metavar="S")
    kernel.add_argument("--entry-timeout", type=float, default=0, metavar="S")
    kernel.add_argument("--keep-cache", action="store_true", help="keep pages across opens")
    kernel.add_argument("--direct-io", action="store_true", help="keep no pages at all")
    kernel.add_argument("--readahead-kb", type=int, help="read-ahead of the mount")
    lacks = p.add_argument_group("what the share cannot do")
    lacks.add_argument(
        "--lack", action="append", default=[], choices=sorted(CAPABILITIES), metavar="CAPABILITY"
    )
    lacks.add_argument("--no-xattr", action="store_true", help="no xattr calls (ENOSYS)")
    lacks.add_argument("--squash", action="store_true", help="everybody is nobody there")
    lacks.add_argument("--name-max", type=int, default=255, help="longest name, in bytes")
    lacks.add_argument("--mtime-resolution", type=float, default=0, metavar="S")
    lacks.add_argument("--read-only", action="store_true")
    logs = p.add_argument_group("log")
    logs.add_argument("--log-data", metavar="DIR", help="keep written bytes, to replay the log")
    logs.add_argument("--log-limit", type=int, default=1_000_000, help="operations kept")
    tests = p.add_argument_group("for test programs")
    tests.add_argument("--ready-fd", type=int, help="gets a line of JSON when ready")
    tests.add_argument("--lifeline-fd", type=int, help="the share ends when this does")
    return p


def options(args: argparse.Namespace) -> Options:
    """The options that parsed arguments stand for."""
    return Options(
        backing=os.path.abspath(args.backing),
        mountpoint=os.path.realpath(args.mountpoint),
        control=None if args.control is None else os.path.abspath(args.control),
        fsname=args.fsname,
        caching=Caching(args.attr_timeout, args.entry_timeout, args.keep_cache, args.direct_io),
        settings={
            "latency_ms": args.latency_ms,
            "jitter_ms": args.jitter_ms,
            "iops": args.iops,
            "bandwidth_mb": args.bandwidth_mb,
            "name_max": args.name_max,
            "mtime_resolution": args.mtime_resolution,
            "read_only": args.read_only,
        },
        lacking=tuple(args.lack),
        xattr=not args.no_xattr,
        squash=args.squash,
        readahead_kb=args.readahead_kb,
        log_data=None if args.log_data is None else os.path.abspath(args.log_data),
        log_limit=args.log_limit,
        lifeline_fd=args.lifeline_fd,
    )


def serve(opts: Options, ready_fd: int | None) -> int:
    """Run the share; say on *ready_fd* that it answers, or why it does not."""

    def say(message: dict[str, object]) -> None:
        nonlocal ready_fd
        if ready_fd is not None:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
            os.close(ready_fd)
            ready_fd = None

    try:
        run(opts, lambda: say({"ready": True}))
    except (OSError, RuntimeError) as error:
        if ready_fd is None:
            raise
        say({"error": str(error)})
        return 1
    return 0


def in_background(start: Callable[[int], int]) -> int:
    """Run *start* in a session of its own; return when it has written to the descriptor it got."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reading)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os._exit(start(writing))
        os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.readline()
    message = json.loads(answer) if answer else {"error": "it ended before it was ready"}
    if "error" in message:
        print(f"faultshare: {message['error']}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Entry point; the exit status."""
    args = parser().parse_args()
    logging.basicConfig(format="faultshare: %(levelname)s: %(message)s")
    if not os.path.isdir(args.backing) or not os.path.isdir(args.mountpoint):
        print("faultshare: BACKING and MOUNTPOINT must be directories", file=sys.stderr)
        return 2
    opts = options(args)
    if args.background:
        return in_background(lambda fd: serve(opts, fd))
    return serve(opts, args.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
