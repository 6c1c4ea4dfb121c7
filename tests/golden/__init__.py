"""What this code computed at one commit: the numbers of whole runs, a dataset and a run folder."""
