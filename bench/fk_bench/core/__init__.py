"""Code shared by all commands: result rows, statistics, the machine, output. templates/ has the HTML reports."""
