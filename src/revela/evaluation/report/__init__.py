"""One page of HTML about runs: page.py puts together what the other files read, draw and lay out."""
