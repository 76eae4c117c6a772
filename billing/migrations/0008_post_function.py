"""A posting as one call: the statements of `ledger.post` as a function, whose plans each connection makes once."""

from __future__ import annotations

from django.db import migrations

CREATE = """
CREATE FUNCTION billing_post(
    of_reference text, of_kind text, of_description text, at timestamptz, accounts bigint[], amounts bigint[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    posted bigint;
BEGIN
    PERFORM FROM billing_account WHERE id = ANY(accounts)
        ORDER BY organization_id IS NULL, id FOR NO KEY UPDATE;
    INSERT INTO billing_transaction (reference, kind, description, created_at)
        VALUES (of_reference, of_kind, of_description, at)
        ON CONFLICT (reference) DO NOTHING RETURNING id INTO posted;
    IF posted IS NULL THEN
        RETURN false;
    END IF;
    INSERT INTO billing_entry (transaction_id, account_id, amount_minor)
        SELECT posted, part.account, part.amount FROM unnest(accounts, amounts) AS part(account, amount);
    UPDATE billing_account SET posted_minor = posted_minor + part.amount
        FROM unnest(accounts, amounts) AS part(account, amount) WHERE id = part.account;
    RETURN true;
END $$;
"""


class Migration(migrations.Migration):
    """The function."""

    dependencies = [("billing", "0007_payment_mails")]
    operations = [
        migrations.RunSQL(CREATE, "DROP FUNCTION billing_post(text, text, text, timestamptz, bigint[], bigint[])")
    ]
