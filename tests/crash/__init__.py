"""Kill the daemon at any moment: what was acknowledged is there after the next mount.

`model` says what a directory should hold, `operations` picks and carries out operations, `worker`
is a process that does so through a mount and keeps a log of what was acknowledged, `mounting`
starts, kills and unmounts daemons.
"""
