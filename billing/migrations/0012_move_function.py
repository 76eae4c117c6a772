"""A posting without a lock of its own: the balances move in the order that the caller gives, which is the locks' order.

`billing_post` (migration 0008) stays: a console of the version before calls it while this one is brought up.
"""

from __future__ import annotations

from django.db import migrations

CREATE = """
CREATE FUNCTION billing_move(
    of_reference text, of_kind text, of_description text, at timestamptz, accounts bigint[], amounts bigint[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    posted bigint;
BEGIN
    FOR part IN 1 .. cardinality(accounts) LOOP
        UPDATE billing_account SET posted_minor = posted_minor + amounts[part] WHERE id = accounts[part];
    END LOOP;
    INSERT INTO billing_transaction (reference, kind, description, created_at)
        VALUES (of_reference, of_kind, of_description, at) RETURNING id INTO posted;
    INSERT INTO billing_entry (transaction_id, account_id, amount_minor)
        SELECT posted, part.account, part.amount FROM unnest(accounts, amounts) AS part(account, amount);
END $$;
"""


class Migration(migrations.Migration):
    """The function."""

    dependencies = [("billing", "0011_write_offs_and_invoice_mail")]
    operations = [
        migrations.RunSQL(CREATE, "DROP FUNCTION billing_move(text, text, text, timestamptz, bigint[], bigint[])")
    ]
