"""Tell members and their programs what happened: by notices in the console, mails, and signed webhooks."""
