"""POSIX semantics over nodes, free of FUSE."""

from wbcache.filesystem.attributes import Changes
from wbcache.filesystem.files import Handle
from wbcache.filesystem.filesystem import FileSystem

__all__ = ["Changes", "FileSystem", "Handle"]
