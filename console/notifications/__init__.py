"""Tell members and programs what happened: notices in the console, mails, and signed webhooks."""
