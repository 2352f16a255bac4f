"""The command line. ``verbs`` and ``running_verbs`` define the commands (verbs). Other modules have their code."""
