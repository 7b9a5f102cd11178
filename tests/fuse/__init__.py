"""What pyfuse3 and the kernel do that a file system must be ready for."""
