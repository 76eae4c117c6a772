"""Users, organizations, memberships, roles, API tokens, service activation and the audit log."""
