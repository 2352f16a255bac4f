"""The command line. ``verbs`` and ``running_verbs`` define the commands (verbs); other modules execute them."""
