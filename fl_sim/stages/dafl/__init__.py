"""The DA-FL stage: clients publish synthetic records once, at a privacy cost, and the server stores the records."""
