"""What all commands share: result rows, statistics, the machine, output. templates/ has the HTML reports."""
