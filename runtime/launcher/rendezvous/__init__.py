"""How the launchers of a run meet, start the ranks together, and restart them after the loss of a node."""
