"""The fault share: a directory served as a slow, failing network share.

A pass-through FUSE file system over a plain *backing* directory. It is the share that
wbcache is tested against, and a stand-in for a real one when none is at hand::

    python -m tests.faultshare BACKING MOUNTPOINT --latency-ms 30 --iops 1000 --bandwidth-mb 100 \\
        --background --control /tmp/share.sock

serves BACKING at MOUNTPOINT (``fuse.faultshare`` in the mount table) until it is unmounted
(``fusermount3 -u MOUNTPOINT``) or gets SIGTERM. Through the control socket a test slows it,
hangs it, makes it fail, fill up, lose capabilities or vanish, while it runs, and reads the log of
every call in the order in which the calls took effect. ``--help`` lists the options.

From Python, everything goes through :class:`tests.faultshare.client.FaultShare`::

    with FaultShare(backing, latency_ms=30) as share:
        share.hang(["rename"])
        ...
        share.release()
        assert [op.path for op in share.log() if op.op == "rename"] == [...]

What it does not imitate: there is no client cache of its own beyond the kernel's (attribute and
entry timeouts are 0 unless asked for, so that each call of a program is a call on the share), an
``fsync`` is logged and takes its time but does not force the backing directory to disk, file locks
are local to this host, and a write clears set-id bits even when root writes. Ask for
``--attr-timeout 1 --entry-timeout 1`` to have a client that remembers attributes, as those of NFS
and sshfs do; without, opening ``a/b`` takes six round trips.

The modules, lowest first: ``faults`` (what should happen to a call), ``oplog`` (what did),
``nodes``, ``usage`` and ``backing`` (the directory), ``replay`` (the states it went through),
``gate`` (waiting), ``calls`` and ``passthrough`` (FUSE), ``control`` (the socket), ``serve`` (the
process), ``remote`` (the socket's other end), ``client``.
"""
