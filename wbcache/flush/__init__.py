"""How the share is brought in line with the mount."""
