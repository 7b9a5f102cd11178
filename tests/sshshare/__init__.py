"""A real network share for tests: sshfs over loopback to an sshd, through a delaying proxy."""

from tests.sshshare.share import SshShare

__all__ = ["SshShare"]
