"""Invoices are written once, counted without a gap, and equal their lines, by PostgreSQL itself; earlier rows filled.

Credits that were given before they were counted as lots were spent before what was paid in, the oldest first.
"""

from __future__ import annotations

from django.db import migrations

FILL = """
UPDATE billing_hold SET placed_by_id = quote.created_by_id,
    labels = jsonb_strip_nulls(jsonb_build_object(
        'workspace', quote.purchase -> 'workspace', 'node_spec', quote.purchase -> 'node_spec',
        'product', quote.purchase -> 'product'))
FROM billing_quote AS quote WHERE quote.id = billing_hold.quote_id;

UPDATE billing_creditgrant SET used_minor = lot.used FROM (
    SELECT given.id, greatest(0, least(given.amount_minor, coalesce(spent.total, 0) - (
        sum(given.amount_minor) OVER (PARTITION BY given.organization_id ORDER BY given.created_at, given.id)
        - given.amount_minor))) AS used
    FROM billing_creditgrant AS given
    LEFT JOIN (
        SELECT account.organization_id, -sum(entry.amount_minor) AS total
        FROM billing_entry AS entry
        JOIN billing_transaction AS moved ON moved.id = entry.transaction_id AND moved.kind = 'charge'
        JOIN billing_account AS account ON account.id = entry.account_id AND account.kind = 'wallet'
        GROUP BY account.organization_id
    ) AS spent ON spent.organization_id = given.organization_id
) AS lot WHERE lot.id = billing_creditgrant.id;
"""
RULES = """
CREATE FUNCTION billing_invoice_holds() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    invoice billing_invoice%ROWTYPE;
    corrected billing_invoice%ROWTYPE;
    lines record;
    due numeric;
BEGIN
    SELECT * INTO invoice FROM billing_invoice WHERE id = NEW.id;
    SELECT count(*) AS number, coalesce(sum(amount_minor), 0) AS amount, coalesce(sum(credit_minor), 0) AS credit
        INTO lines FROM billing_invoiceline WHERE invoice_id = invoice.id;
    IF (lines.number, lines.amount, lines.credit)
        IS DISTINCT FROM (invoice.line_count::bigint, invoice.subtotal_minor, invoice.credits_minor) THEN
        RAISE EXCEPTION 'The document % does not equal its lines', invoice.number
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF invoice.sequence < 1 OR invoice.sequence > 1 AND NOT EXISTS (
        SELECT 1 FROM billing_invoice WHERE kind = invoice.kind AND sequence = invoice.sequence - 1) THEN
        RAISE EXCEPTION 'The number before % is missing', invoice.number
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF invoice.kind = 'invoice' THEN
        due := round((invoice.subtotal_minor + invoice.credits_minor) * invoice.tax_percent
            / CASE WHEN invoice.tax_inclusive THEN 100 + invoice.tax_percent ELSE 100 END);
        IF invoice.tax_minor <> due THEN
            RAISE EXCEPTION 'The tax of % is %, not %', invoice.number, due, invoice.tax_minor
                USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        IF EXISTS (
            SELECT 1 FROM billing_invoiceline AS line LEFT JOIN billing_receipt AS receipt ON receipt.id = line.receipt_id
            WHERE line.invoice_id = invoice.id AND (
                receipt.id IS NULL OR receipt.total_minor <> line.amount_minor
                OR receipt.organization_id <> invoice.organization_id OR receipt.currency <> invoice.currency
                OR line.credit_minor <> -(SELECT coalesce(sum(used_minor), 0) FROM billing_credituse
                                          WHERE hold_id = receipt.hold_id))) THEN
            RAISE EXCEPTION 'A line of % is not its receipt', invoice.number
                USING ERRCODE = 'integrity_constraint_violation';
        END IF;
    ELSE
        SELECT * INTO corrected FROM billing_invoice WHERE id = invoice.corrects_id;
        IF corrected.kind <> 'invoice' OR (invoice.organization_id, invoice.currency, invoice.tax_percent, invoice.tax_inclusive)
            IS DISTINCT FROM (corrected.organization_id, corrected.currency, corrected.tax_percent, corrected.tax_inclusive)
            OR EXISTS (
                SELECT 1 FROM billing_invoiceline AS line LEFT JOIN billing_invoiceline AS of ON of.id = line.corrects_id
                WHERE line.invoice_id = invoice.id AND (
                    of.invoice_id IS DISTINCT FROM corrected.id
                    OR of.amount_minor + (SELECT sum(amount_minor) FROM billing_invoiceline WHERE corrects_id = of.id) < 0
                    OR of.credit_minor + (SELECT sum(credit_minor) FROM billing_invoiceline WHERE corrects_id = of.id) > 0))
            OR corrected.tax_minor + (SELECT sum(tax_minor) FROM billing_invoice WHERE corrects_id = corrected.id) < 0 THEN
            RAISE EXCEPTION 'The note % gives back what % did not charge', invoice.number, corrected.number
                USING ERRCODE = 'integrity_constraint_violation';
        END IF;
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER billing_invoice_holds AFTER INSERT ON billing_invoice
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_invoice_holds();
CREATE FUNCTION billing_invoiceline_fits() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- All positions are taken when the invoice is committed, so that no line comes later.
    IF NEW.position < 1 OR NEW.position > (SELECT line_count FROM billing_invoice WHERE id = NEW.invoice_id) THEN
        RAISE EXCEPTION 'The document has no place for this line' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER billing_invoiceline_fits BEFORE INSERT ON billing_invoiceline
    FOR EACH ROW EXECUTE FUNCTION billing_invoiceline_fits();
CREATE TRIGGER billing_invoice_append_only BEFORE UPDATE OR DELETE ON billing_invoice
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
CREATE TRIGGER billing_invoiceline_append_only BEFORE UPDATE OR DELETE ON billing_invoiceline
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
CREATE TRIGGER billing_invoicedocument_append_only BEFORE UPDATE OR DELETE ON billing_invoicedocument
    FOR EACH ROW EXECUTE FUNCTION billing_append_only();
"""
UNDO = """
DROP TRIGGER billing_invoicedocument_append_only ON billing_invoicedocument;
DROP TRIGGER billing_invoiceline_append_only ON billing_invoiceline;
DROP TRIGGER billing_invoice_append_only ON billing_invoice;
DROP TRIGGER billing_invoiceline_fits ON billing_invoiceline;
DROP TRIGGER billing_invoice_holds ON billing_invoice;
DROP FUNCTION billing_invoiceline_fits;
DROP FUNCTION billing_invoice_holds;
"""


class Migration(migrations.Migration):
    """Triggers, and figures of earlier rows."""

    dependencies = [("billing", "0005_credits_budgets_invoices")]
    operations = [migrations.RunSQL(FILL, migrations.RunSQL.noop), migrations.RunSQL(RULES, UNDO)]
