"""The floor: who acts, for which organization, with which role, and what was done. Knows nothing of what is sold."""
