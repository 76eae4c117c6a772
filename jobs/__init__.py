"""What was bought and how its run goes: products, orders, jobs, attempts."""
