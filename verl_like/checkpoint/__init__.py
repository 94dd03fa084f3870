"""Layout, rotation and resume of checkpoint folders (driver side)."""
