"""Products, orders, jobs and their attempts: from a purchase to the end of its run."""
