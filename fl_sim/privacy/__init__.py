"""Privacy: mechanisms, the events that state their costs, accountants, ledgers, privacy statements and audits."""
