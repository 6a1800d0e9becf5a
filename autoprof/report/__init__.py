"""Reports: the data of a run, the findings as sentences, and the pages that show both."""
