"""What users do with each library: writes, and whether all of it is there again.

    python -m tests.libraries.programs.NAME PART DIRECTORY

Each part is a process of its own: another's warnings, threads and state are no test's. ``write``
writes into an empty directory, ``check`` finds the same there, in whatever place it is now, and
changes nothing. Where others are: they are named and driven by the tests.
"""
