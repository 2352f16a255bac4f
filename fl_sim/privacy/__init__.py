"""Privacy: mechanisms, the events that they release, accountants, ledgers, privacy statements and audits."""
