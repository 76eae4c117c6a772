"""A published book stays as it is, whichever way somebody comes at it.

No price may move into it, none may slip in while it is being published, and its own row stays too.
"""

from __future__ import annotations

from django.db import migrations

PUBLISHED = """
CREATE OR REPLACE FUNCTION billing_published_prices() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    books bigint[];
BEGIN
    books := CASE TG_OP
        WHEN 'INSERT' THEN ARRAY[NEW.book_id]
        WHEN 'DELETE' THEN ARRAY[OLD.book_id]
        ELSE ARRAY[OLD.book_id, NEW.book_id]
    END;
    -- Waits for a publication in progress; the next statement sees what it wrote.
    PERFORM 1 FROM billing_pricebook WHERE id = ANY(books) ORDER BY id FOR SHARE;
    IF EXISTS (SELECT 1 FROM billing_pricebook WHERE id = ANY(books) AND published_at IS NOT NULL) THEN
        RAISE EXCEPTION 'A published price book is never edited, only superseded'
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE FUNCTION billing_published_book() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'A published price book is never edited, only superseded'
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER billing_book_published BEFORE UPDATE OR DELETE ON billing_pricebook
    FOR EACH ROW WHEN (OLD.published_at IS NOT NULL) EXECUTE FUNCTION billing_published_book();
"""
UNDO = """
DROP TRIGGER billing_book_published ON billing_pricebook;
DROP FUNCTION billing_published_book;
"""


class Migration(migrations.Migration):
    """Triggers."""

    dependencies = [("billing", "0002_ledger_rules")]
    operations = [migrations.RunSQL(PUBLISHED, UNDO)]
