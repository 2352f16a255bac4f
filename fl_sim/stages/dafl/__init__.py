"""The DA-FL stage: clients release synthetic records once, each release is charged, and all records are stored."""
