"""`python -m wbcache.cli` is the `wbcache` program."""

from wbcache.cli import main

main()
