"""What a run costs and who has paid: prices, quotes, holds, the ledger, top-ups. Never meets `storage`."""
