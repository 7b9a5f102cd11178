"""Every byte of a few files, checked against a copy in memory, on a real mount over a slow share.

`tester` does everything to one file that a program can do, and is sure of its bytes at any moment;
`worker` is one of several processes that share a file.
"""
