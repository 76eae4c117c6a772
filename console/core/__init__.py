"""What all packages of the console share: errors, pagination, parsers, encryption, tasks, server-sent events."""
