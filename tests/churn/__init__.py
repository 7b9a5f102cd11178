"""Random changes by several processes in a mount, and what they must leave behind.

`model` says what a directory should hold, `operations` picks and carries out operations, `worker`
is a process that does so through a mount and keeps a log of what was acknowledged, `team` runs
several of them and knows what each one's directory should hold.
"""
