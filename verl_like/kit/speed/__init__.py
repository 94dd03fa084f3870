"""Distance of a step from what its devices allow, and what to change first."""
