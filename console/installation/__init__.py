"""The installation's brand, legal texts and notices, which the operator edits in /admin/."""
