"""Parts of gpu_report.py: commands with limits of time, steps made of commands, the page of results."""
