"""How far a step is from what its devices allow, and what to change first."""
