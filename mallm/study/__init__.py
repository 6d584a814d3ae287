"""What is done with many runs, or with one that is stored: tables, sweeps, comparisons, judging again, exporting."""
