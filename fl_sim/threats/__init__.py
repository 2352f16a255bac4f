"""Threats to a finished run and answers to them: unlearning of a client, and the membership of records."""
