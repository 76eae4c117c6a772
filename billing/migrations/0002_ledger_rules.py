"""The ledger's rules, kept by PostgreSQL itself: entries sum to zero, and what is written stays as it is."""

from __future__ import annotations

from django.db import migrations

ZERO_SUM = """
CREATE FUNCTION billing_entries_balance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT 1 FROM billing_entry JOIN billing_account ON billing_account.id = billing_entry.account_id
        WHERE transaction_id = NEW.transaction_id
        GROUP BY transaction_id HAVING sum(amount_minor) <> 0 OR count(DISTINCT currency) > 1
    ) THEN
        RAISE EXCEPTION 'The entries of transaction % do not sum to zero in one currency', NEW.transaction_id
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER billing_entries_balance AFTER INSERT ON billing_entry
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_entries_balance();
"""
APPEND_ONLY = """
CREATE FUNCTION billing_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: correct it with a new transaction', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER billing_entry_append_only BEFORE UPDATE OR DELETE ON billing_entry
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
CREATE TRIGGER billing_transaction_append_only BEFORE UPDATE OR DELETE ON billing_transaction
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
CREATE TRIGGER billing_receipt_append_only BEFORE UPDATE OR DELETE ON billing_receipt
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
"""
PUBLISHED_PRICES = """
CREATE FUNCTION billing_published_prices() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT 1 FROM billing_pricebook
        WHERE published_at IS NOT NULL AND id = CASE WHEN TG_OP = 'INSERT' THEN NEW.book_id ELSE OLD.book_id END
    ) THEN
        RAISE EXCEPTION 'A published price book is never edited, only superseded'
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER billing_price_published BEFORE INSERT OR UPDATE OR DELETE ON billing_price
    FOR EACH ROW EXECUTE FUNCTION billing_published_prices();
"""
UNDO = """
DROP TRIGGER billing_price_published ON billing_price;
DROP TRIGGER billing_receipt_append_only ON billing_receipt;
DROP TRIGGER billing_transaction_append_only ON billing_transaction;
DROP TRIGGER billing_entry_append_only ON billing_entry;
DROP TRIGGER billing_entries_balance ON billing_entry;
DROP FUNCTION billing_published_prices;
DROP FUNCTION billing_append_only;
DROP FUNCTION billing_entries_balance;
"""


class Migration(migrations.Migration):
    """Triggers."""

    dependencies = [("billing", "0001_initial")]
    operations = [migrations.RunSQL(ZERO_SUM + APPEND_ONLY + PUBLISHED_PRICES, UNDO)]
