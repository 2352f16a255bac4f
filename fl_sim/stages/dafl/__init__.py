"""The DA-FL stage: clients release synthetic records once, each release is charged to a ledger, and all are stored."""
