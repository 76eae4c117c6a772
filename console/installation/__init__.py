"""What the operator sets about this installation without touching code: its brand, legal texts and notices."""
