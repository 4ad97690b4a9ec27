"""What gpu_report.py is made of: commands with limits of time, the steps that consist of them, the page of results."""
