"""wbcache: a write-back cache file system for slow network shares."""

__version__ = "0.1.0"
